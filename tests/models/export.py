"""Reference models as `.pte` files: `python -m tests.models.export NAME... --out DIR`.

Beside each `name.pte` stands `name.npz` with the inputs (`in<sample>_<argument>`) and eager torch's
answers (`out<sample>_<result>`), so that whoever uses an export needs neither torch nor executorch.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.models.messages import quiet
from tests.models.zoo import CASES, Built, Case

if TYPE_CHECKING:
    import numpy

VARIANTS = ("fp32", "fp16")


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what an export contains."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "executorch", "transformers", "timm", "torchvision"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def content_key(name: str, variant: str) -> str:
    """Return a hash of what an export is made from: these files, the versions of the exporters,
    name and variant."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for file in ("zoo.py", "blocks.py", "export.py"):
        digest.update((here / file).read_bytes())
    digest.update(json.dumps([versions(), name, variant]).encode())
    return digest.hexdigest()[:16]


def exporters_installed() -> bool:
    """Whether torch and executorch are there."""
    return all(importlib.util.find_spec(package) is not None for package in ("torch", "executorch"))


def default_folder() -> Path:
    """Return where exports are kept when no folder is named: one folder a user in the system's
    temporary folder."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"purevk-models-{user}"


def file_stem(name: str, variant: str) -> str:
    """Return the file name of an export without its ending: the model's name, and the variant
    unless it is fp32."""
    return name if variant == "fp32" else f"{name}_{variant}"


def trace_patterns_once() -> None:
    """Keeps the graphs of executorch's fusion patterns, which it traces anew for each delegate
    (seconds each)."""
    from executorch.backends.vulkan.patterns import fusable_patterns

    for entry in fusable_patterns.values():
        if entry.get_graphs_fn is not None and not hasattr(entry.get_graphs_fn, "cache_info"):
            entry.get_graphs_fn = functools.cache(entry.get_graphs_fn)


def lower(built: Built, variant: str, dynamic: bool) -> bytes:
    """Export `built` with executorch's VulkanPartitioner and return the `.pte` bytes.

    Args:
        variant: "fp32", or "fp16" for the partitioner's `force_fp16`.
        dynamic: sets the partitioner's `require_dynamic_shapes`.
    """
    import torch
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    trace_patterns_once()
    options: dict[str, bool] = {}
    if variant == "fp16":
        options["force_fp16"] = True
    if dynamic:
        options["require_dynamic_shapes"] = True
    with torch.no_grad():
        exported = torch.export.export(
            built.module, built.inputs, dynamic_shapes=built.dynamic_shapes, strict=False
        )
        edge = to_edge_transform_and_lower(
            exported,
            partitioner=[VulkanPartitioner(options)],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        return edge.to_executorch().buffer


def references(built: Built) -> dict[str, numpy.ndarray]:
    """Run eager torch on every sample and return the arrays of the `.npz`: `in<i>_<j>` and
    `out<i>_<j>`."""
    import torch

    arrays = {}
    with torch.no_grad():
        for index, sample in enumerate(built.samples):
            for position, tensor in enumerate(sample):
                arrays[f"in{index}_{position}"] = tensor.numpy().copy()
            results = built.module(*sample)
            results = results if isinstance(results, tuple | list) else (results,)
            for position, tensor in enumerate(results):
                arrays[f"out{index}_{position}"] = tensor.numpy().copy()
    return arrays


def export_pte(name: str, variant: str = "fp32", folder: str | Path | None = None) -> Path:
    """Return the path of the exported model; export it first unless the folder has the same one.

    Where torch or executorch is not installed, an export made from other sources or versions is
    taken as it is.

    Args:
        name: a key of `zoo.CASES`.
        variant: "fp32" or "fp16".
        folder: where exports are kept; None is `default_folder()`.

    Raises:
        KeyError: no such model.
        ValueError: no such variant.
        ModuleNotFoundError: it has to be exported, and torch, executorch or the model's package is
            not installed.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is none of {', '.join(VARIANTS)}")
    case = CASES[name]
    folder = Path(folder) if folder is not None else default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_stem(name, variant)}.pte"
    stamp, key = path.with_suffix(".key"), content_key(name, variant)
    complete = path.exists() and path.with_suffix(".npz").exists() and stamp.exists()
    if complete and (stamp.read_text().strip() == key or not exporters_installed()):
        return path
    _write(case, variant, path, key)
    return path


def _write(case: Case, variant: str, path: Path, key: str) -> None:
    import numpy

    with quiet():
        built = case.build()
        blob = lower(built, variant, case.dynamic)
        if built.stateful:
            built = case.build()  # tracing may have moved the state
        arrays = references(built)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with scratch.open("wb") as file:
        numpy.savez(file, **arrays)
    scratch.replace(path.with_suffix(".npz"))
    scratch.write_bytes(blob)
    scratch.replace(path)
    scratch.write_text(key)
    scratch.replace(path.with_suffix(".key"))


def load_samples(path: str | Path) -> list[tuple[list[numpy.ndarray], list[numpy.ndarray]]]:
    """Return the (inputs, eager outputs) of every recorded sample of an export, in order.

    Args:
        path: of the `.pte` or of its `.npz`.
    """
    import numpy

    with numpy.load(Path(path).with_suffix(".npz")) as file:
        arrays = {name: file[name] for name in file.files}
    count = 1 + max(int(name[2:].split("_")[0]) for name in arrays if name.startswith("in"))

    def row(prefix: str) -> list[numpy.ndarray]:
        found = sorted(
            (name for name in arrays if name.startswith(prefix)), key=lambda n: int(n.split("_")[1])
        )
        return [arrays[name] for name in found]

    return [(row(f"in{index}_"), row(f"out{index}_")) for index in range(count)]


def main(arguments: list[str] | None = None) -> int:
    """Export the named models (all without a name) and say where they are."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.export", description=main.__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; all if none is given"
    )
    parser.add_argument("--out", type=Path, default=default_folder(), help="folder for the files")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="default: both")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(CASES)}")
    for name in options.names or CASES:
        for variant in options.variant or VARIANTS:
            started = time.perf_counter()
            path = export_pte(name, variant, options.out)
            print(
                f"{path}  {path.stat().st_size} bytes  {time.perf_counter() - started:.1f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Exports the models with the executorch that is installed: `python make.py FOLDER [NAME ...]`.

For each model it writes `NAME.pte` and, where there are data files, `NAME/*.ptd`. The inputs
`in<sample>_<i>` and eager torch's results `out<sample>_<i>` (those of another method than forward:
`<method>.in0_0`) are in `FOLDER/../eager/NAME.npz`, or in `FOLDER/NAME.npz` where the installed
torch or torchao quantizes otherwise than the one that wrote the former. `FOLDER/made_with.json` has
the versions, the models that the release cannot export, with the first line of its error, those of
which an earlier release wrote the same file, and the operators that its partitioner takes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_operators
import numpy as np
import quantized_models  # noqa: F401 (adds to MODELS)
import torch
from models import MODELS, Model, Samples

SEED = 31


def results(module: Any, samples: Samples, prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays of the `.npz`: inputs and what eager torch makes of them, call after call."""
    arrays = {}
    for at, sample in enumerate(samples):
        arrays |= {f"{prefix}in{at}_{i}": tensor.numpy().copy() for i, tensor in enumerate(sample)}
        made = module(*sample)
        made = made if isinstance(made, tuple) else (made,)
        arrays |= {f"{prefix}out{at}_{i}": tensor.numpy().copy() for i, tensor in enumerate(made)}
    return arrays


def lower(model: Model) -> Any:
    """The executorch program."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import (
        EdgeCompileConfig,
        ExecutorchBackendConfig,
        to_edge_transform_and_lower,
    )

    parts = {"forward": (model.module, model.samples)} | model.methods
    exported = {
        name: torch.export.export(module, samples[0], dynamic_shapes=model.dynamic, strict=False)
        for name, (module, samples) in parts.items()
    }
    partitioners = {name: [VulkanPartitioner(dict(model.options))] for name in exported}
    edge = to_edge_transform_and_lower(
        exported,
        partitioner=partitioners,
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    return edge.to_executorch(ExecutorchBackendConfig(external_constants=model.external))


def write(name: str, folder: Path) -> None:
    """Exports one model into a folder."""
    torch.manual_seed(SEED)
    model = MODELS[name]()
    module = model.module.eval()
    if model.quantize is not None:
        module = model.quantize(module, model.samples[0])
    model = Model(**{**vars(model), "module": module})
    program = lower(model)
    arrays = results(model.fresh().eval() if model.fresh else module, model.samples)
    for method, (other, samples) in model.methods.items():
        arrays |= results(other, samples, f"{method}.")
    (folder / f"{name}.pte").write_bytes(program.buffer)
    keep(arrays, name, folder)
    with tempfile.TemporaryDirectory() as scratch:
        if hasattr(program, "write_tensor_data_to_file"):
            program.write_tensor_data_to_file(scratch)
        shutil.rmtree(folder / name, ignore_errors=True)
        if any(Path(scratch).iterdir()):
            shutil.copytree(scratch, folder / name)


def keep(arrays: dict[str, np.ndarray], name: str, folder: Path) -> None:
    """Writes the arrays beside the file, unless `../eager` has the same."""
    shared, own = folder.parent / "eager" / f"{name}.npz", folder / f"{name}.npz"
    own.unlink(missing_ok=True)
    if shared.exists():
        with np.load(shared) as kept:
            if kept.files == list(arrays) and all(
                np.allclose(kept[key], arrays[key], 1e-6, 1e-6) for key in arrays
            ):
                return
    np.savez_compressed(own if shared.exists() else shared, **arrays)


def reason(error: BaseException) -> str:
    """The first error's kind, the first line of its text, and the function that raised it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {text[0] if text else ''}"[:160]
        + f" ({Path(place.filename).name}, {place.name})"
    )


def same_as(folder: Path) -> dict[str, str]:
    """Removes the files that an earlier release wrote byte for byte; returns the releases that have
    them, by model."""

    def parts(path: Path) -> list[bytes]:
        return [part.read_bytes() for part in (path, *sorted(path.with_suffix("").glob("*.ptd")))]

    found = {}
    for path in sorted(folder.glob("*.pte")):
        for other in sorted(folder.parent.glob(f"*/{path.name}")):
            if other.parent.name < folder.name and parts(other) == parts(path):
                found[path.stem] = other.parent.name
                path.unlink()
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                break
    return found


def operators() -> list[str]:
    """Names of the operators that the partitioner takes, as files have them."""
    from executorch.backends.vulkan.op_registry import vulkan_supported_ops

    names = (key if isinstance(key, str) else key.__name__ for key in vulkan_supported_ops)
    return sorted({_with_overload(name.replace("::", ".")) for name in names})


def _with_overload(name: str) -> str:
    return (
        f"{name}.default"
        if name.startswith(("et_vk.", "llama.")) and name.count(".") == 1
        else name
    )


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    record = folder / "made_with.json"
    before = json.loads(record.read_text()) if record.exists() else {}
    refused, shared = before.get("refused", {}), before.get("same_as", {})
    for name in arguments[1:] or MODELS:
        refused.pop(name, None)
        shared.pop(name, None)
        try:
            with contextlib.redirect_stdout(sys.stderr), torch.no_grad():
                if name.startswith("kv_cache"):
                    llama_operators.load()
                write(name, folder)
        except Exception as error:  # whatever an exporter of another time raises is what this run is there to find out
            if os.environ.get("RAISE"):
                raise
            refused[name] = reason(error)
        print(name, refused.get(name, "ok"), flush=True)
    versions = {package: version(package) for package in ("executorch", "torch", "torchao")}
    shared |= same_as(folder)
    made_with = {
        "versions": versions,
        "refused": dict(sorted(refused.items())),
        "same_as": dict(sorted(shared.items())),
        "operators": operators(),
    }
    record.write_text(json.dumps(made_with, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

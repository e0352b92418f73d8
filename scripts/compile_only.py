#!/usr/bin/env python3
"""Compiles the kernels of models with a Vulkan driver, without running them, and prints what the
driver tells of the code: registers, spills, shared memory, code size, subgroups per SIMD.

    python scripts/compile_only.py --radv gfx1100
    python scripts/compile_only.py --radv vega10 --half resnet18 vit
    python scripts/compile_only.py --driver lvp tests/data/pte/topk.pte --out found.json

The driver need not have its hardware: with --radv, Mesa's driver for AMD opens a null device of any
family, which has no memory. Models are lowered for the features and limits of the device. Nothing is
allocated on it and nothing runs.

A model is a name of tests/models/gallery, a .pte or .pvk file, or "operators": the single operators
of `bench/operators.py`. Without models, a set that uses most templates. The exit code is 1 if a
model could not be lowered or a kernel could not be compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.operator_cases import Case, operator_cases  # noqa: E402
from bench.operators import build  # noqa: E402
from purevk import api, knobs  # noqa: E402
from purevk.cache import default_cache  # noqa: E402
from purevk.errors import PurevkError  # noqa: E402
from purevk.frontends.files import open_file  # noqa: E402
from purevk.graph.context import traits_of  # noqa: E402
from purevk.graph.kernels import KernelStore  # noqa: E402
from purevk.ir import GuardLog  # noqa: E402
from purevk.lower.lowering import KernelSpec  # noqa: E402
from purevk.passes.pipeline import optimize  # noqa: E402
from purevk.report.lowered import lower  # noqa: E402
from purevk.schedule.planning import make_plan  # noqa: E402
from purevk.tuning import DeviceTraits  # noqa: E402

MANIFESTS = Path("/usr/share/vulkan/icd.d")
FILES = (
    "linear_relu_half.pte", "topk.pte", "gather.pte", "dynamic_views.pte", "counted.pte", "counter.pte",
    "branch.pte",
)  # fmt: skip
NAMES = (
    "lstm", "transformer", "unet", "yolo_head", "graph_network", "selective_scan", "fourier_operator", "wavenet",
    "resnet18", "mobilenet_v3_small", "vit", "convnext_atto", "swin", "gpt2_cached", "mixtral",
)  # fmt: skip
OPERATORS, OPERATOR_MIB = "operators", (1 / 16, 16.0)
NOT_IN_HALF = "fourier_operator"  # torch has no FFT of float16 on the CPU
DEFAULT = (*(str(ROOT / "tests" / "data" / "pte" / name) for name in FILES), *NAMES, OPERATORS)
# The statistics of RADV in the table; of other drivers, all. The JSON file has all of any driver.
COLUMNS = {
    "VGPRs": "VGPRs",
    "SGPRs": "SGPRs",
    "Spilled VGPRs": "spilled V",
    "Spilled SGPRs": "spilled S",
    "Scratch size": "scratch",
    "LDS size": "LDS",
    "Code size": "code",
    "Subgroups per SIMD": "subgroups/SIMD",
}
SMALLER_IS_WORSE = {"Subgroups per SIMD"}


def choose_driver(driver: str | None, radv: str | None) -> None:
    """Sets the variables that the Vulkan loader and RADV read when an instance is made.

    Raises:
        SystemExit: there is no such manifest.
    """
    if radv:
        os.environ["RADV_FORCE_FAMILY"] = radv
        driver = driver or "radeon"
    if driver:
        named = sorted(MANIFESTS.glob("*_icd*.json"))
        found = [Path(driver), *(path for path in named if path.name.startswith(f"{driver}_icd"))]
        manifest = next((path for path in found if path.is_file()), None)
        if manifest is None:
            raise SystemExit(f"no driver {driver!r}: no such file, and none in {MANIFESTS}")
        os.environ["VK_DRIVER_FILES"] = os.environ["VK_ICD_FILENAMES"] = str(manifest)


def open_for_compiling() -> api.Device:
    """The picked device, with statistics of pipelines where it has them. The driver's pipeline cache
    stays off, so that each pipeline is compiled."""
    with_statistics = ("pipeline_statistics",)
    disabled = (*knobs.DISABLE(), "pipeline_cache")
    return api.Device(api.Instance().pick(), disable=disabled, request=with_statistics)


def parts_of(models: Sequence[str]) -> Iterator[tuple[str, str | Case]]:
    """What to lower, with a name for the report: models, and single operators."""
    for model in models:
        if model != OPERATORS:
            yield Path(model).name, model
            continue
        for mib in OPERATOR_MIB:
            for case in operator_cases(int(mib * 2**20)):
                yield f"{case.op} {case.form}, {mib:g} MiB", case


def kernels_of(model: str | Case, traits: DeviceTraits, half: bool) -> Iterator[KernelSpec]:
    """The kernels of a model or a single operator, lowered for a device."""
    if isinstance(model, Case):
        with GuardLog():
            yield from make_plan(optimize(build(model)[0], traits), traits).kernels
        return
    if Path(model).suffix in (".pte", ".pvk"):
        with open_file(model, check=False) as program:
            for method in program.methods:
                yield from lower(program, method, traits).plan.kernels
        return
    import torch
    from torch.utils import _pytree

    from purevk.frontends.torch.decompose import decompose
    from purevk.frontends.torch.exported import read_exported
    from tests.models.gallery import MODELS

    if model not in MODELS:
        raise SystemExit(f"no model {model!r}; scripts/models.py --list names those of the gallery")
    built = MODELS[model].build()
    module, inputs = built.module, built.inputs
    if half:
        module = module.half()
        inputs = _pytree.tree_map(
            lambda x: x.half() if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
            inputs,
        )
    with GuardLog():
        with torch.no_grad():
            exported = torch.export.export(
                module, inputs, dynamic_shapes=built.dynamic_shapes, strict=False
            )
        graph = read_exported(decompose(exported))
        yield from make_plan(optimize(graph, traits), traits).kernels


def compile_kernel(store: KernelStore, spec: KernelSpec) -> dict[str, Any]:
    """Compiles one pipeline, and gives what the driver tells of it."""
    start = time.perf_counter()
    row: dict[str, Any] = {
        "template": spec.template,
        "macros": dict(spec.macros),
        "constants": dict(spec.constants),
        "subgroup_size": spec.subgroup_size,
        "executables": [],
        "failed": None,
    }
    try:
        (pipeline,) = store.prepare([spec])
        if store.device.features.pipeline_statistics:
            row["executables"] = api.pipeline_statistics(pipeline)
    except PurevkError as error:
        row["failed"] = str(error)
    row["seconds"] = round(time.perf_counter() - start, 4)
    return row


def worst_by_template(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each template the number of its "pipelines", and the worst value of each statistic."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        worst = found.setdefault(row["template"], {"pipelines": 0})
        worst["pipelines"] += 1
        for executable in row["executables"]:
            for name, value in executable["statistics"].items():
                choose = min if name in SMALLER_IS_WORSE else max
                worst[name] = choose(worst.get(name, value), value)
    return found


def show(data: dict[str, Any]) -> None:
    """Prints the worst of each template, and what failed."""
    table = worst_by_template(data["pipelines"])
    told = list(dict.fromkeys(name for worst in table.values() for name in worst))[1:]
    columns = [name for name in COLUMNS if name in told] or told
    width = max((len(name) for name in table), default=0)
    print(f"{data['device']}, {data['driver']}, profile {data['profile']}")
    if not data["statistics"]:
        print("the driver tells no statistics of pipelines")
    print("worst value of the pipelines of each template")
    titles = ["pipelines", *(COLUMNS.get(name, name) for name in columns)]
    print(" " * width, *titles, sep="  ")
    for template, worst in sorted(table.items()):
        cells = [worst["pipelines"], *(worst.get(name, "") for name in columns)]
        texts = [f"{cell:>{len(title)}}" for cell, title in zip(cells, titles)]
        print(f"{template:{width}}", *texts, sep="  ")
    failed = [row for row in data["pipelines"] if row["failed"]]
    for model, reason in data["not_lowered"].items():
        print(f"not lowered: {model}: {reason}")
    for row in failed:
        print(f"not compiled: {row['template']} of {', '.join(row['models'])}: {row['failed']}")
    print(
        f"{len(data['pipelines'])} pipelines of {len(data['models'])} models,"
        f" {len(failed)} not compiled, {len(data['not_lowered'])} models not lowered"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a name or a file")
    parser.add_argument("--driver", help=f"a name in {MANIFESTS}, such as lvp, or a manifest")
    parser.add_argument("--radv", metavar="FAMILY", help="null device: gfx1100, navi21, vega10")
    parser.add_argument("--half", action="store_true", help="models of the gallery in float16")
    parser.add_argument("--out", metavar="FILE.json", help="writes all pipelines to a file")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    choose_driver(args.driver, args.radv)
    models = args.models or [name for name in DEFAULT if not args.half or name != NOT_IN_HALF]
    device = open_for_compiling()
    cache = default_cache()
    traits = traits_of(device, cache)
    store = KernelStore(device, cache, traits)
    data: dict[str, Any] = {
        "device": device.name,
        "driver": device.driver,
        "profile": traits.profile.name,
        "statistics": device.features.pipeline_statistics,
        "models": [],
        "not_lowered": {},
        "pipelines": [],
    }
    rows: dict[KernelSpec, dict[str, Any]] = {}
    for name, model in parts_of(models):
        data["models"].append(name)
        try:
            kernels = list(kernels_of(model, traits, args.half))
        except Exception as error:  # of the model's library, torch.export or purevk
            data["not_lowered"][name] = f"{type(error).__name__}: {error}"
            continue
        for spec in kernels:
            if spec not in rows:
                rows[spec] = {"models": [], **compile_kernel(store, spec)}
            rows[spec]["models"].append(name)
        print(f"{name}: {len(kernels)} pipelines", file=sys.stderr, flush=True)
    data["pipelines"] = list(rows.values())
    device.close()
    show(data)
    if args.out:
        Path(args.out).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 1 if data["not_lowered"] or any(row["failed"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

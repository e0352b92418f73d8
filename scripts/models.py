#!/usr/bin/env python3
"""Runs the gallery of models (tests/models/gallery) through purevk, straight from torch, through
torch.compile and as .pte, against eager torch.

    python scripts/models.py [NAME ...] [--json docs/data/models.json] [--again] [--only compile]
    [--quick] [--list]

Without names, all that the JSON file does not have yet; it is written after each model, so that a
run can be cut off and goes on. Kernels are compiled anew for each model: "compile" is a first
start. scripts/make_docs.py makes docs/models.md of the file.

--quick takes no times, and keeps kernels from model to model. It is for a machine that is busy with
other work: errors, segments and nodes on the CPU are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WAYS = ("compile", "torch.compile", "pte")
REPEATS = 15
_ENOUGH = 0.5  # seconds of repeated calls


def flat(results: Any) -> list[Any]:
    """The tensors among nested results, in order."""
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def relative_error(made: list[Any], wanted: list[Any]) -> float:
    """The largest difference between two lists of tensors, each relative to its wanted tensor's
    largest magnitude; infinite where sizes, numbers or infinities differ."""
    import torch

    if len(made) != len(wanted):
        return float("inf")
    worst = 0.0
    for a, b in zip(made, wanted):
        a, b = torch.as_tensor(a).double(), b.double()
        if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        if b.numel() == 0 or not b.isfinite().any():
            continue
        a, b = a[b.isfinite()], b[b.isfinite()]
        worst = max(worst, ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item())
    return worst


def best_seconds(call: Callable[[], Any]) -> float:
    """The fastest of a few calls, the first left out: what else runs on the machine makes the
    others slower."""
    call()
    times: list[float] = []
    while len(times) < REPEATS and (len(times) < 5 or sum(times) < _ENOUGH):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def exported_program(built: Any) -> Any:
    """The model through `torch.export`."""
    import torch

    with torch.no_grad():
        return torch.export.export(
            built.module, built.inputs, dynamic_shapes=built.dynamic_shapes, strict=False
        )


def hosts(method: Any) -> Counter[str]:
    """The nodes of a method that run on the CPU, by name."""
    from purevk.ir.host import HOST

    made: Counter[str] = Counter()
    for step in method.executable.plan.steps:
        if not step.on_device:
            node = step.nodes[0]
            made[
                "control flow" if node.graphs else node.args[0] if node.op == HOST else node.op
            ] += 1
    return made


def worst(call: Callable[..., Any], built: Any, wanted: list[list[Any]]) -> float:
    """The largest error over all samples."""
    return max(
        relative_error([x.clone() for x in flat(call(*sample))], reference)
        for sample, reference in zip(built.samples, wanted)
    )


def measure(
    program: Any, built: Any, wanted: list[list[Any]], seconds: float, quick: bool
) -> dict[str, Any]:
    """What a program makes of the samples, how fast, and where its nodes run."""
    error = worst(program.forward, built, wanted)
    last = built.samples[-1]
    report = program.report()
    made = {
        "error": error,
        "segments": report["segments"],
        "dispatches": report["dispatches"],
        "cpu": dict(sorted(hosts(program.method("forward")).items())),
    }
    if quick:
        return made
    return {
        **made,
        "ms": best_seconds(lambda: program.forward(*last)) * 1e3,
        "compile_s": seconds,
        "phases": {phase: round(value, 3) for phase, value in report["seconds"].items()},
    }


class NotExported(Exception):
    """torch.export does not take the model, or executorch could not make the file."""


def failure(error: BaseException) -> dict[str, Any]:
    """What a way that raised leaves in the row."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:400]
    return {
        "failed": f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"
    }


def straight(build: Callable[[], Any], wanted: list[list[Any]], quick: bool) -> dict[str, Any]:
    """The model through `purevk.compile`: of the exported program, or of the module where
    `torch.export` needs purevk's help, as for packed sequences, or an export for each size."""
    from purevk.errors import SizeConstraintError

    built = build()
    start = time.perf_counter()
    try:
        exported = exported_program(built)
    except Exception:  # whatever torch.export trips over
        return compiled(built, None, wanted, time.perf_counter() - start, quick)
    export = time.perf_counter() - start
    try:
        return compiled(built, exported, wanted, export, quick)
    except SizeConstraintError:
        return compiled(build(), None, wanted, 0.0, quick)


def compiled(
    built: Any, exported: Any, wanted: list[list[Any]], export: float, quick: bool
) -> dict[str, Any]:
    """An exported program through `purevk.compile`; None: the module itself."""
    import purevk

    arguments = (built.module, built.inputs) if exported is None else (exported,)
    options = {"dynamic_shapes": built.dynamic_shapes} if exported is None else {}
    start = time.perf_counter()
    try:
        program = purevk.compile(*arguments, **options)
    except Exception as error:
        if not options:
            raise
        raise NotExported(f"{type(error).__name__}: {error}") from error
    with program:
        seconds = time.perf_counter() - start
        made = measure(program, built, wanted, seconds, quick)
        return made if quick else {"export_s": export, **made}


def through_dynamo(
    build: Callable[[], Any], wanted: list[list[Any]], quick: bool
) -> dict[str, Any]:
    """The model through `torch.compile(backend="purevk")`. `graphs` and `breaks` say in how many
    parts dynamo took it; `eager` names why a graph fell back to eager torch, if one did."""
    import torch

    import purevk.dynamo  # noqa: F401  registers the backend
    from purevk import compiled_graphs

    built = build()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    known = {id(each) for each in compiled_graphs.shared}
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        compiled = torch.compile(built.module, backend="purevk")
        error = worst(compiled, built, wanted)
        seconds = time.perf_counter() - start
        if not built.stateful:
            error = max(error, worst(compiled, built, wanted))  # without tracing
        last = built.samples[-1]
        times = {} if quick else {"ms": best_seconds(lambda: compiled(*last)) * 1e3}
    counters = torch._dynamo.utils.counters
    programs = [each.program for each in compiled_graphs.shared if id(each) not in known]
    made = {
        "error": error,
        "segments": sum(program.report()["segments"] for program in programs),
        "dispatches": sum(program.report()["dispatches"] for program in programs),
        "cpu": dict(
            sorted(
                sum(
                    (hosts(p.method(name)) for p in programs for name in p.methods), Counter()
                ).items()
            )
        ),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sorted({reason.splitlines()[0] for reason in counters["graph_break"]}),
        "eager": sorted({str(w.message) for w in caught if "in eager torch" in str(w.message)}),
    }
    return made if quick else {**made, "compile_s": seconds, **times}


def lowered(built: Any) -> tuple[bytes, bool]:
    """The .pte of a model, and whether constants were folded first: executorch 1.5.1 cannot lower a
    delegate that reads no input, such as positions made of an arange and a number, which its own
    pass folds away."""
    import torch
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    from tests.models.export import lower, trace_patterns_once

    trace_patterns_once()
    dynamic = built.dynamic_shapes is not None
    try:
        return lower(built, "fp32", dynamic), False
    except Exception as error:
        if "FuseBatchNormPass" not in str(error):
            raise
    with torch.no_grad():
        exported = constant_prop_pass(exported_program(built).run_decompositions({}))
        edge = to_edge_transform_and_lower(
            exported,
            partitioner=[VulkanPartitioner({"require_dynamic_shapes": True} if dynamic else {})],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        return edge.to_executorch().buffer, True


def through_file(
    build: Callable[[], Any], wanted: list[list[Any]], keep: Path | None, name: str, quick: bool
) -> dict[str, Any]:
    """The model as a .pte of executorch's VulkanPartitioner, through `purevk.load`."""
    import purevk
    from purevk import pte
    from purevk.pte import types as P

    built = build()
    start = time.perf_counter()
    try:
        blob, folded = lowered(built)
    except Exception as error:  # whatever executorch trips over
        raise NotExported(f"{type(error).__name__}: {error}") from error
    export = time.perf_counter() - start
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{name}.pte").write_bytes(blob)
    with pte.read_program(blob) as file:
        calls = [call for chain in file.method("forward").chains for call in chain.instructions]
        delegates = sum(isinstance(call, P.DelegateCall) for call in calls)
        kernels = sum(isinstance(call, P.KernelCall) for call in calls)
    if built.stateful:
        built = build()  # tracing may have moved the state
    start = time.perf_counter()
    with purevk.load(blob) as program:
        seconds = time.perf_counter() - start
        return {
            **({} if quick else {"export_s": export}),
            "bytes": len(blob),
            "folded": folded,
            "delegates": delegates,
            "kernels": kernels,
            **measure(program, built, wanted, seconds, quick),
        }


def run_model(
    model: Any, ways: tuple[str, ...], keep: Path | None, quick: bool = False
) -> dict[str, Any]:
    """One row of the table, as JSON."""
    import torch

    with torch.no_grad():
        built = model.build()
        parameters = sum(p.numel() for p in built.module.parameters())
        wanted = [[x.clone() for x in flat(built.module(*sample))] for sample in built.samples]
        last = built.samples[-1]
        eager = None if quick else best_seconds(lambda: built.module(*last))
    row: dict[str, Any] = {
        "library": model.library,
        "about": model.about,
        "parameters": parameters,
        **({} if eager is None else {"eager_ms": eager * 1e3}),
        "tolerance": model.tolerance,
    }
    for way in ways:
        try:
            if way == "compile":
                row[way] = straight(model.build, wanted, quick)
            elif way == "torch.compile":
                row[way] = through_dynamo(model.build, wanted, quick)
            else:
                row[way] = through_file(model.build, wanted, keep, model.name, quick)
        except (
            Exception
        ) as error:  # whatever a model of this list runs into is what the list is for
            row[way] = failure(error)
    return row


def describe(name: str, row: dict[str, Any]) -> str:
    """A row as text for the terminal."""
    eager = f"  eager {row['eager_ms']:7.1f} ms" if "eager_ms" in row else ""
    parts = [f"{name:30} {row['parameters'] / 1e6:7.2f} M{eager}"]
    for way in WAYS:
        data = row.get(way)
        if data is None:
            continue
        if "failed" in data:
            parts.append(f"\n    {way}: {data['failed']}")
            continue
        mark = "" if data["error"] <= row["tolerance"] else " WRONG"
        cpu = f" cpu {data['cpu']}" if data["cpu"] else ""
        extra = f" delegates {data['delegates']}" if way == "pte" else ""
        if way == "torch.compile":
            extra = f" graphs {data['graphs']}"
            extra += f" breaks {data['breaks']}" if data["breaks"] else ""
            extra += f" EAGER {data['eager']}" if data["eager"] else ""
        times = f" {data['ms']:.1f} ms, compile {data['compile_s']:.1f} s" if "ms" in data else ""
        parts.append(
            f"\n    {way:13} error {data['error']:.1e}{mark} segments {data['segments']}{cpu}{extra}"
            f" dispatches {data['dispatches']}{times}"
        )
    return "".join(parts)


def main() -> int:
    from tests.models.gallery import MODELS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "--json", type=Path, help="file with the rows; read first, written after each model"
    )
    parser.add_argument("--again", action="store_true", help="also what the file already has")
    parser.add_argument("--only", choices=WAYS, help="one way only")
    parser.add_argument("--keep", type=Path, help="folder for the .pte files")
    parser.add_argument("--quick", action="store_true", help="no times, and kernels from the cache")
    parser.add_argument("--list", action="store_true", help="print the names")
    options = parser.parse_args()
    if options.list:
        print(
            "\n".join(
                f"{model.name:30} {model.library:14} {model.about}" for model in MODELS.values()
            )
        )
        return 0
    unknown = [name for name in options.names if name not in MODELS]
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}")
    os.environ.setdefault("MESA_SHADER_CACHE_DISABLE", "1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows = read_rows(options.json)
    ways = (options.only,) if options.only else WAYS
    bad = 0
    for name in options.names or MODELS:
        if name in rows["models"] and not options.names and not options.again:
            if all(way in rows["models"][name] for way in ways):
                continue
        with contextlib.nullcontext() if options.quick else fresh_cache():
            try:
                row = run_model(MODELS[name], ways, options.keep, options.quick)
            except Exception as error:  # the model itself, or eager torch
                print(f"{name:30} {failure(error)['failed']}", flush=True)
                bad += 1
                continue
        rows["models"][name] = {
            **{k: v for k, v in rows["models"].get(name, {}).items() if k in WAYS},
            **row,
        }
        bad += any("failed" in row[way] or row[way]["error"] > row["tolerance"] for way in ways)
        print(describe(name, row), flush=True)
        if options.json:
            write_rows(options.json, rows, list(MODELS))
    return 1 if bad else 0


@contextlib.contextmanager
def fresh_cache() -> Any:
    """An empty folder for kernels, so that what is compiled is counted."""
    from purevk.graph.context import default_context

    before = os.environ.get("PUREVK_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PUREVK_CACHE"] = folder
        try:
            with default_context():
                yield
        finally:
            if before is None:
                del os.environ["PUREVK_CACHE"]
            else:
                os.environ["PUREVK_CACHE"] = before


def read_rows(path: Path | None) -> dict[str, Any]:
    """What an earlier run left."""
    if path is not None and path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    return {"models": {}}


def write_rows(path: Path, rows: dict[str, Any], order: list[str]) -> None:
    """Writes the file whole, in the order of the gallery, with what the figures depend on."""
    from purevk.graph.context import default_context
    from tests.models.export import versions

    models = {name: rows["models"][name] for name in order if name in rows["models"]}
    data = {"device": default_context().device.name, "versions": versions(), "models": models}
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


if __name__ == "__main__":
    sys.exit(main())

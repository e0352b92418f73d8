"""What the first call of a model costs, with empty caches: torch's capture, purevk by phase, and
each kernel.

    python -m bench.first_calls MODEL... [--way torch.compile] [--kernels 5]

A model is a name of `tests/models/gallery`, or FILE.py:FUNCTION, where the function gives a module
and a tuple of inputs. Torch's capture is `torch.export`, and `run_decompositions` as a part of
purevk.compile; or a first call of `torch.compile(backend="aot_eager")`. Each time is in wall seconds /
CPU seconds of the process.
"""

from __future__ import annotations

import argparse
import os
import runpy
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock


def load(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A module and its inputs."""
    if ":" in name:
        path, _, function = name.rpartition(":")
        module, inputs = runpy.run_path(path)[function]()
        return module.eval(), inputs
    from tests.models.gallery import MODELS

    built = MODELS[name].build()
    return built.module, built.inputs


def timed(call: Callable[[], Any]) -> tuple[Any, str, float]:
    """The result of a call, its seconds as text, and its CPU seconds."""
    start, cpu = time.perf_counter(), time.process_time()
    result = call()
    cpu = time.process_time() - cpu
    return result, f"{time.perf_counter() - start:.1f} / {cpu:.1f}", cpu


def kernel_costs(context: Any) -> list[tuple[float, float, str]]:
    """CPU seconds of the driver and of the shader compiler for each kernel that programs hold,
    compiled once more, the slowest first, with what it is made of."""
    from purevk import api
    from purevk.graph.first_dispatch import dispatch_each
    from purevk.shaders.shaderc import load as load_compiler

    store, costs = context.kernels, []

    def run(spec: Any, spirv: bytes) -> None:
        made = api.create_pipelines(context.device, [store._pipeline_spec(spec, spirv)])
        dispatch_each(context.device, [(spec, made[0])])

    for spec in list(store._pipelines):
        spirv, _, shader = timed(partial(load_compiler().compile_job, store.job(spec)))
        _, _, driver = timed(partial(run, spec, spirv))
        macros = " ".join(f"{k}={v}" for k, v in spec.macros if not k.startswith("PUSH_"))
        costs.append((driver, shader, f"{spec.template} {macros}"))
    return sorted(costs, reverse=True)


def report(name: str, way: str, kernels: int) -> None:
    """Prints the costs of one model."""
    import torch

    import purevk
    import purevk.dynamo
    from purevk import compiled_graphs
    from purevk.graph.context import default_context

    context = default_context()
    module, inputs = load(name)
    module(*inputs)  # modules that note sizes on themselves
    if way == "compile":
        exported, text, _ = timed(lambda: torch.export.export(module, inputs, strict=False))
        print(f"{name}: torch.export {text}", end="")
        decompose: Callable[..., Any] = torch.export.ExportedProgram.run_decompositions
        texts: list[str] = []

        def timed_decompose(*args: Any, **kwargs: Any) -> Any:
            result, text, _ = timed(lambda: decompose(*args, **kwargs))
            texts.append(text)
            return result

        with mock.patch.object(torch.export.ExportedProgram, "run_decompositions", timed_decompose):
            program, text, _ = timed(lambda: purevk.compile(exported))
        programs = [program]
        print(f", purevk.compile {text}, of which run_decompositions {', '.join(texts)}", end="")
        call: Callable[..., Any] = program.forward
    else:
        _, text, _ = timed(lambda: torch.compile(module, backend="aot_eager")(*inputs))
        print(f"{name}: aot_eager {text}", end="")
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        call = torch.compile(module, backend="purevk")
    _, first, _ = timed(lambda: call(*inputs))
    _, second, _ = timed(lambda: call(*inputs))
    print(f", first call {first}, second {second}")
    if way != "compile":
        counters = torch._dynamo.utils.counters
        print(f"    graphs: {counters['stats']['unique_graphs']}")
        for reason, count in counters["graph_break"].items():
            print(f"    {count} breaks: {reason.splitlines()[0]}")
        programs = [shared.program for shared in compiled_graphs.shared]
    phases: dict[str, float] = {}
    for program in programs:
        for phase, seconds in program.report()["seconds"].items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    print("    " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items()))
    made = context.kernels.report
    print(f"    {made.pipelines} pipelines of {made.compiled + made.cached} kernels")
    if kernels:
        costs = kernel_costs(context)
        print(
            f"    CPU: driver {sum(c[0] for c in costs):.1f}, compiler {sum(c[1] for c in costs):.1f}"
        )
        for driver, shader, what in costs[:kernels]:
            print(f"    {driver:.2f} + {shader:.2f}  {what[:300]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--way", choices=("compile", "torch.compile"), default="compile")
    parser.add_argument("--kernels", type=int, default=0, help="print the slowest kernels")
    options = parser.parse_args()
    os.environ["MESA_SHADER_CACHE_DISABLE"] = "1"
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PUREVK_CACHE"] = folder
        import torch

        with torch.no_grad():
            for name in options.models:
                report(name, options.way, options.kernels)


if __name__ == "__main__":
    main()

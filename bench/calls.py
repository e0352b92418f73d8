"""Calls and loads beside torch on a GPU: `python bench/calls.py --models DIR --out FILE.json`.

For each model, in float32 and in half:

- a call of purevk from numpy to numpy, and the host's time in it without submitting and waiting;
- loading with a cold and with a warm cache, in new processes;
- eager torch and one replayed CUDA graph, each with and without copies from and to host memory.

The contenders are timed in rounds. Figures are medians. Every output is compared with eager torch in
float32, and a wrong one is marked.

DIR holds exports (`python -m tests.models.export NAME... --out DIR`). A model without an export is
traced by `purevk.compile`. Run it where the checkout can be imported. executorch is not needed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.timing import (
    Sampler,
    captured,
    error_of,
    exact_float32,
    interleave,
    machine,
    of_wall,
    reason_of,
)
from tests.models.export import VARIANTS, file_stem

MODELS = ("mobilenet_v2", "resnet50", "encoder2", "decoder")
LIMIT = {"fp32": 1e-3, "fp16": 6e-2}
"""The largest accepted error relative to the largest output: of other algorithms in float32, of halves in fp16."""


@dataclass
class Row:
    """One model in one variant. Times are medians in milliseconds, those named so in microseconds;
    None: not measured.

    `forward` is a call of purevk; `device` its part from submission to the end of the wait,
    `kernels` the sum of its dispatches timed one by one; `host_us` the rest of the call,
    `copies_us` what copying inputs and outputs takes of that. `cold` and `warm` are (device
    creation, load, first call) in fresh processes.
    """

    model: str
    variant: str
    source: str = ""
    forward: float | None = None
    least: float | None = None
    device: float | None = None
    kernels: float | None = None
    host_us: float | None = None
    copies_us: float | None = None
    dispatches: int | None = None
    cold: tuple[float, float, float] | None = None
    warm: tuple[float, float, float] | None = None
    compiled: int | None = None
    eager: float | None = None
    graph: float | None = None
    eager_resident: float | None = None
    graph_resident: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


class Inputs:
    """The calls that are timed: the first sample again and again, or, for a decoder, one position
    after the other."""

    def __init__(self, built: Any) -> None:
        arrays = [[tensor.numpy() for tensor in sample] for sample in built.samples]
        self.steps = arrays if built.stateful else arrays[:1]
        self._at = 0

    @property
    def first(self) -> list[numpy.ndarray]:
        return self.steps[0]

    def next(self) -> list[numpy.ndarray]:
        """The inputs of the next call."""
        self._at = (self._at + 1) % len(self.steps)
        return self.steps[self._at]

    def cast(self, dtypes: list[Any]) -> None:
        """Gives the arrays these dtypes, so that no call has to."""
        self.steps = [
            [a.astype(d, copy=False) for a, d in zip(step, dtypes)] for step in self.steps
        ]


def expected_output(built: Any) -> numpy.ndarray:
    """What eager torch on the CPU gives in float32 for the first sample."""
    import torch

    with torch.no_grad():
        return built.module(*built.samples[0]).float().numpy().copy()


class Purevk:
    """purevk on its default device."""

    def __init__(self, row: Row, built: Any, folder: Path) -> None:
        import purevk

        path = folder / f"{file_stem(row.model, row.variant)}.pte"
        if path.exists():
            row.source = path.name
            self.program = purevk.load(path)
        else:
            row.source = "purevk.compile"
            module, example = built.module, built.inputs
            if row.variant == "fp16":
                module = module.half()
                example = tuple(
                    each.half() if each.is_floating_point() else each for each in example
                )
            self.program = purevk.compile(module, example)
        self.inputs = Inputs(built)
        values = self.program.methods["forward"].graph.inputs
        self.inputs.cast([None if value is None else value.type.dtype.numpy for value in values])

    def call(self, arrays: list[numpy.ndarray] | None = None) -> Any:
        """One call on given inputs, or the next."""
        arrays = self.inputs.next() if arrays is None else arrays
        return self.program.forward(*arrays)

    def anatomy(self, row: Row, calls: int) -> None:
        """Fills in where the time of a call goes."""
        from purevk.cli.stopwatch import Stopwatch
        from purevk.report.timings import time_dispatches

        executable = self.program.methods["forward"].executable
        row.dispatches = len(executable.plan.dispatches)
        arrays = self.inputs.first
        whole, device = [], []
        with Stopwatch(self.program.device) as watch:
            for _ in range(calls):
                watch.reset()
                start = time.perf_counter()
                output = self.program.forward(*arrays)
                whole.append(time.perf_counter() - start)
                device.append(watch.device)
        row.device = 1e3 * statistics.median(device)
        row.host_us = 1e6 * statistics.median(one - two for one, two in zip(whole, device))
        copies = []
        targets = [numpy.empty_like(array) for array in (*arrays, output)]
        for _ in range(calls):
            start = time.perf_counter()
            for target, array in zip(targets, (*arrays, output)):
                numpy.copyto(target, array)
            copies.append(time.perf_counter() - start)
        row.copies_us = 1e6 * statistics.median(copies)
        row.kernels = 1e3 * sum(timing.seconds for timing in time_dispatches(executable, arrays))


class Torch:
    """torch on CUDA device 0: eager or as a graph, with copies between host and device or
    without."""

    def __init__(self, built: Any, variant: str, graph: bool, resident: bool) -> None:
        import torch

        self.torch, self.resident, self.inputs = torch, resident, Inputs(built)
        dtype = torch.float16 if variant == "fp16" else torch.float32
        cast = lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor  # noqa: E731
        self.module = built.module.to("cuda", dtype)
        self.host = [
            [cast(torch.from_numpy(a)).contiguous().pin_memory() for a in step]
            for step in self.inputs.steps
        ]
        self.device = [tensor.to("cuda") for tensor in self.host[0]]
        self.at = 0
        self.replay: Any = None
        with torch.inference_mode():
            if graph:
                self.replay, self.output = captured(lambda: self.module(*self.device))
            else:
                self.output = self.module(*self.device)
        self.landing = torch.empty(self.output.shape, dtype=self.output.dtype, pin_memory=True)

    def call(self, step: int | None = None) -> Any:
        """One call on the inputs of a step, or the next."""
        torch = self.torch
        self.at = (self.at + 1) % len(self.host) if step is None else step
        with torch.inference_mode():
            if not self.resident:
                for source, target in zip(self.host[self.at], self.device):
                    target.copy_(source, non_blocking=True)
            if self.replay is None:
                self.output = self.module(*self.device)
            else:
                self.replay()
            if not self.resident:
                self.landing.copy_(self.output, non_blocking=True)
            torch.cuda.synchronize()
        return self.landing if not self.resident else self.output

    def checked(self) -> numpy.ndarray:
        """The output for the first step, as float32 on the host."""
        return self.call(0).float().cpu().numpy()


LOAD = """
import json, sys, time
import numpy as np
import purevk
from purevk.graph.context import default_context
start = time.perf_counter()
default_context()
opened = time.perf_counter()
program = purevk.load(sys.argv[1])
loaded = time.perf_counter()
graph = program.methods["forward"].graph
shapes = [[d if isinstance(d, int) else 1 for d in v.type.dims] for v in graph.inputs]
program.forward(*(np.zeros(s, v.type.dtype.numpy) for s, v in zip(shapes, graph.inputs)))
done = time.perf_counter()
seconds = [opened - start, loaded - opened, done - loaded]
print(json.dumps([*(1e3 * each for each in seconds), program.report()["kernels"]["compiled"]]))
"""


def time_loads(row: Row, folder: Path, repeats: int) -> None:
    """Loads in fresh processes: once with empty caches (purevk's and the driver's), then some times
    with full ones."""
    path = folder / f"{file_stem(row.model, row.variant)}.pte"
    if not path.exists():
        row.why["load"] = "no .pte file"
        return
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ,
            "PUREVK_CACHE": f"{caches}/purevk",
            "PUREVK_PROGRESS": "0",
            "__GL_SHADER_DISK_CACHE_PATH": f"{caches}/driver",
            "MESA_SHADER_CACHE_DIR": f"{caches}/mesa",
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
            ),
        }
        Path(caches, "driver").mkdir()
        found = []
        for _ in range(1 + repeats):
            done = subprocess.run(
                [sys.executable, "-c", LOAD, str(path)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
            )
            if done.returncode:
                row.why["load"] = done.stderr.strip().splitlines()[-1]
                return
            found.append(json.loads(done.stdout.splitlines()[-1]))
    row.compiled = found[0][3]
    row.cold = tuple(found[0][:3])
    row.warm = tuple(statistics.median(each[n] for each in found[1:]) for n in range(3))
    if any(each[3] for each in found[1:]):
        row.why["load"] = "a warm start compiled kernels"


def measure(model: str, variant: str, folder: Path, seconds: float, loads: int) -> Row:
    """Times one model in one variant."""
    from bench.plain_decoder import build

    row = Row(model, variant)
    built = build(model)
    expected = expected_output(copy.deepcopy(built))
    contenders: dict[str, Sampler] = {}
    ours = None
    try:
        ours = Purevk(row, copy.deepcopy(built), folder)
        row.errors["purevk"] = error_of(ours.call(ours.inputs.first), expected)
        contenders["forward"] = of_wall(ours.call)
    except Exception as error:  # the table says what happened to one contender; the others go on
        row.why["purevk"] = reason_of(error)
    for name, graph, resident in (
        ("eager", False, False),
        ("graph", True, False),
        ("eager_resident", False, True),
        ("graph_resident", True, True),
    ):
        try:
            other = Torch(copy.deepcopy(built), variant, graph, resident)
            row.errors[name] = error_of(other.checked(), expected)
            contenders[name] = of_wall(other.call)
        except Exception as error:  # as above
            row.why[name] = reason_of(error)
    for name, times in interleave(contenders, seconds).items():
        setattr(row, name, statistics.median(times))
        if name == "forward":
            row.least = min(times)
    if ours is not None and "forward" in contenders:
        ours.anatomy(row, 200 if (row.forward or 0) < 20 else 10)
        ours.program.close()
    time_loads(row, folder, loads)
    return row


def show(rows: list[Row]) -> None:
    """Prints one table."""
    head = (
        "model",
        "purevk ms",
        "least",
        "device",
        "kernels",
        "host us",
        "copies us",
        "dispatches",
        "eager",
        "graph",
        "eager res.",
        "graph res.",
        "cold load",
        "warm load",
        "warm first",
    )
    lines = [head]
    for row in rows:

        def cell(value: float | None, digits: int = 3) -> str:
            return "-" if value is None else f"{value:.{digits}f}"

        limit = LIMIT[row.variant]
        wrong = {name for name, error in row.errors.items() if not error <= limit}

        def mark(name: str, value: float | None, wrong: set[str] = wrong) -> str:
            return cell(value) + ("!" if name in wrong else "")

        lines.append(
            (
                f"{row.model} {row.variant}",
                mark("purevk", row.forward),
                cell(row.least),
                cell(row.device),
                cell(row.kernels),
                cell(row.host_us, 0),
                cell(row.copies_us, 0),
                cell(row.dispatches, 0),
                mark("eager", row.eager),
                mark("graph", row.graph),
                mark("eager_resident", row.eager_resident),
                mark("graph_resident", row.graph_resident),
                cell(row.cold and row.cold[1], 0),
                cell(row.warm and row.warm[1], 0),
                cell(row.warm and row.warm[2], 1),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print(
            "  ".join(
                text.rjust(width) if n else text.ljust(width)
                for n, (text, width) in enumerate(zip(line, widths))
            )
        )
    for row in rows:
        print(
            f"{row.model} {row.variant}: {row.source}; errors "
            + ", ".join(f"{n} {e:.1e}" for n, e in row.errors.items())
        )
        for why in dict.fromkeys(row.why.values()):
            names = ", ".join(name for name, each in row.why.items() if each == why)
            print(f"{row.model} {row.variant}: not measured: {names}: {why}")


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints one table and writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--models", type=Path, required=True, help="folder of exports")
    parser.add_argument("--out", type=Path, help="write all figures there, as JSON")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="default: both")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="of timing a model, for all contenders together"
    )
    parser.add_argument("--loads", type=int, default=3, help="warm loads a model")
    options = parser.parse_args(arguments)
    os.environ.setdefault("PUREVK_PROGRESS", "0")
    try:
        exact_float32()
    except ImportError:
        parser.error(
            "torch is not installed; it builds the models and answers what they should give"
        )
    found, rows = machine(), []
    print(json.dumps(found))
    for model in options.names or MODELS:
        for variant in options.variant or VARIANTS:
            rows.append(measure(model, variant, options.models, options.seconds, options.loads))
            if options.out:
                options.out.write_text(
                    json.dumps({"machine": found, "rows": [asdict(row) for row in rows]}, indent=1)
                )
            print(f"{model} {variant} done", file=sys.stderr, flush=True)
    show(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

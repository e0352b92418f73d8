"""What a call costs the host when its sizes are new, known, or alternate: `python -m
bench.signatures [FILE.pte ...]`.

For each model, median milliseconds of CPU time of the calling thread, which the threads of a software
device do not disturb:

* *new*: a call with sizes that no call had before. Nothing is compiled.
* *record*: the part of *new* that evaluates sizes and records command buffers.
* *known*: a call with sizes that an earlier call had. *beyond* is its wall time without submitting
  and without waiting for the device.
* *alternate*: *beyond*, if two lengths alternate.

Without files: a chain of about 500 dispatches with symbolic sizes, and an encoder of 6 layers.
`--lowering` shows instead the time to compile large models, by phase, without the shader compiler
and the driver.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import purevk
from purevk.graph.compute_graph import ComputeGraph
from purevk.ir import Value
from purevk.ir import dims as _dims
from purevk.program import Program

LIMIT = 128  # the bound of every symbol


class Chain(nn.Module):
    """About 500 kernels that depend on one another, each with sizes of its own in its
    parameters."""

    def __init__(self, rounds: int = 125) -> None:
        super().__init__()
        self.rounds = rounds
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            y = torch.softmax(x @ self.weight, -1)
            x = torch.cat([y[:, 1:], y[:, :1]], 1).flip(1) + x.mean(1, keepdim=True)
        return x


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def built_in() -> Iterator[tuple[str, Program]]:
    length = torch.export.Dim("length", min=3, max=LIMIT)
    for name, module, width in (("chain", Chain(), 16), ("encoder, 6 layers", encoder(), 64)):
        torch.manual_seed(0)
        yield (
            name,
            purevk.compile(
                module.eval(), (torch.randn(1, 24, width),), dynamic_shapes=({1: length},)
            ),
        )


class Stopwatch:
    """Processor and wall time of the methods of classes, while entered."""

    def __init__(self, *watched: tuple[type, str]) -> None:
        self.watched = watched
        self.wall = self.cpu = 0.0

    def __enter__(self) -> Stopwatch:
        self._kept = [(owner, name, getattr(owner, name)) for owner, name in self.watched]
        for owner, name, function in self._kept:
            setattr(owner, name, self._timed(function))
        return self

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.thread_time() - cpu

        return timed

    def __exit__(self, *exc: object) -> None:
        for owner, name, function in self._kept:
            setattr(owner, name, function)


def inputs_of(program: Program, number: int) -> list[np.ndarray]:
    """Inputs whose dynamic sizes are `number`."""
    random = np.random.default_rng(number)
    made = []
    for value in program.method("forward").graph.inputs:
        if not isinstance(value, Value):
            continue
        sizes = tuple(
            size if isinstance(size, int) else min(number, _dims.upper(size))
            for size in value.type.dims
        )
        kind = value.type.dtype.numpy
        floats = kind.kind == "f"
        made.append(random.standard_normal(sizes).astype(kind) if floats else np.ones(sizes, kind))
    return made


def host_seconds(program: Program, order: Sequence[int]) -> float:
    """The median wall time of calls with these sizes, in this order, without submitting and without
    waiting for the device."""
    graph = program.method("forward").executable.graph
    device = ((type(graph.device.queue), "submit"), (purevk.api.Submission, "wait"))
    given = {number: inputs_of(program, number) for number in set(order)}
    rest = []
    for number in order:
        with Stopwatch(*device) as waiting:
            start = time.perf_counter()
            program.forward(*given[number])
            rest.append(time.perf_counter() - start - waiting.wall)
    return statistics.median(rest)


def measure(name: str, program: Program, rounds: int) -> dict[str, Any]:
    graph = program.method("forward").executable.graph
    new, record = [], []
    numbers = list(range(5, 5 + 2 * rounds, 2))
    program.forward(*inputs_of(program, LIMIT))
    for number in numbers:
        inputs = inputs_of(program, number)
        with Stopwatch((ComputeGraph, "_record")) as recording:
            start = time.thread_time()
            program.forward(*inputs)
            new.append(time.thread_time() - start)
        record.append(recording.cpu)
    known = [numbers[-1]] * rounds
    alternating = [numbers[-1 - call % 2] for call in range(2 * rounds)]
    recorded = graph.recorded
    beyond = {
        "known": host_seconds(program, known),
        "alternate": host_seconds(program, alternating),
    }
    again = graph.recorded - recorded
    return {
        "model": name,
        "dispatches": len(graph.dispatches),
        "new": statistics.median(new) * 1e3,
        "record": statistics.median(record) * 1e3,
        "known": beyond["known"] * 1e3,
        "alternate": beyond["alternate"] * 1e3,
        "recorded again": again,
        "specializations": len(program.method("forward").specializations),
    }


# -- lowering ------------------------------------------------------------------------------------
class GPT(nn.Module):
    """Like GPT-2 of 24 layers, narrow: as many nodes, small weights."""

    def __init__(self, layers: int = 24, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(100, width)
        self.positions = nn.Embedding(LIMIT, width)

        def parts():
            return nn.ModuleDict(
                {
                    "a": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "b": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )

        self.layers = nn.ModuleList(parts() for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            batch, length, width = x.shape
            q, k, v = (
                part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
                for part in layer["qkv"](layer["a"](x)).split(width, dim=2)
            )
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](y.transpose(1, 2).reshape(batch, length, width))
            x = x + layer["down"](
                nn.functional.gelu(layer["up"](layer["b"](x)), approximate="tanh")
            )
        return self.norm(x) @ self.embedding.weight.T


def large() -> Iterator[tuple[str, nn.Module, tuple[Any, ...], Any]]:
    length = torch.export.Dim("length", min=2, max=LIMIT)
    yield "GPT-2-like, 24 layers", GPT(), (torch.ones(1, 24, dtype=torch.int64),), ({1: length},)
    try:
        import timm
    except ImportError:
        return
    image = (torch.randn(1, 3, 224, 224),)
    yield "Swin-T", timm.create_model("swin_tiny_patch4_window7_224"), image, None
    yield "DenseNet-201", timm.create_model("densenet201"), image, None


def lowering(names: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for name, module, example, shapes in large():
        if names and not any(each.lower() in name.lower() for each in names):
            continue
        module = module.eval()
        start = time.perf_counter()
        with torch.no_grad():
            exported = torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
        torch_export = time.perf_counter() - start
        start = time.perf_counter()
        with purevk.compile(exported) as program:
            total = time.perf_counter() - start
            seconds = program.report()["seconds"]
            rows.append(
                {
                    "model": name,
                    "dispatches": program.report()["dispatches"],
                    "torch.export": torch_export,
                    **{
                        phase: seconds.get(phase, 0.0)
                        for phase in (
                            "import",
                            "passes",
                            "lower",
                            "kernels",
                            "constants",
                            "buffers",
                        )
                    },
                    "compile": total,
                }
            )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows[:1]:
        print("| " + " | ".join(row) + " |")
        print("|" + "---|" * len(row))
    for row in rows:
        print(
            "| "
            + " | ".join(
                f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()
            )
            + " |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "files",
        nargs="*",
        help="programs with dynamic sizes; with --lowering, parts of models' names",
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="sizes that are new, and calls with known ones"
    )
    parser.add_argument(
        "--lowering", action="store_true", help="measure compiling large models instead"
    )
    options = parser.parse_args(arguments)
    if options.lowering:
        show(lowering(options.files))
        return 0
    programs = (
        ((file, purevk.load(file)) for file in options.files) if options.files else built_in()
    )
    rows = []
    for name, program in programs:
        with program:
            rows.append(measure(name, program, options.rounds))
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

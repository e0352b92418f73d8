"""What optional device features cost or save: `python bench/features.py robust_access`.

Each case runs on one device twice, opened with all its features and without those named (and what
depends on them). The sums of the dispatches' times are taken in turns; the ratio is the time with
the features over the time without them, so that 1.02 says that they cost 2 %. Results of both are
compared with each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn import functional

from bench.networks import Of, Sample


def _matmul(size: int, dtype: torch.dtype) -> Sample:
    return Of(torch.matmul), tuple(torch.randn(size, size).to(dtype) / 64 for _ in range(2))


def _attention(heads: int, tokens: int, depth: int) -> Sample:
    attention = functional.scaled_dot_product_attention
    return Of(attention), tuple(torch.randn(1, heads, tokens, depth).half() for _ in range(3))


def _convolution(side: int, channels: int, dtype: torch.dtype) -> Sample:
    x = torch.randn(8, channels, side, side).to(dtype)
    weight = torch.randn(channels, channels, 3, 3).to(dtype) / 24
    return Of(lambda a, b: functional.conv2d(a, b, padding=1)), (x, weight)


def _encoder() -> Sample:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval(), (
        torch.randn(1, 128, 768),
    )


CASES: dict[str, Callable[[bool], Sample]] = {
    "matmul, float32": lambda big: _matmul(4096 if big else 128, torch.float32),
    "matmul, half": lambda big: _matmul(4096 if big else 128, torch.float16),
    "one row times a matrix, half": lambda big: (
        Of(functional.linear),
        (torch.randn(1, 1, 4096 if big else 64).half(), torch.randn(*[4096 if big else 64] * 2).half()),
    ),
    "attention, half": lambda big: _attention(*((16, 2048, 64) if big else (2, 64, 16))),
    "convolution 3 x 3, float32": lambda big: _convolution(*((56, 64) if big else (8, 8)), torch.float32),
    "convolution 3 x 3, half": lambda big: _convolution(*((56, 64) if big else (8, 8)), torch.float16),
    "sum of two": lambda big: (Of(torch.add), tuple(torch.randn(1 << (25 if big else 10)) for _ in "xy")),
    "softmax of rows": lambda big: (Of(lambda x: x.softmax(-1)), (torch.randn(8192 if big else 8, 1024),)),
    "sort of rows": lambda big: (Of(lambda x: x.sort(-1)[0]), (torch.randn(1024 if big else 4, 4096),)),
    "gather of rows": lambda big: (
        Of(functional.embedding),
        (torch.randint(0, 1000, (32768 if big else 64,)), torch.randn(1000, 512)),
    ),
    "encoder, 4 layers, 128 tokens": lambda big: _encoder(),
}  # fmt: skip


@dataclass
class Row:
    """One case: milliseconds with and without the features, and the largest difference of the
    results relative to the largest of them."""

    case: str
    with_ms: float
    without_ms: float
    difference: float

    @property
    def ratio(self) -> float:
        return self.with_ms / self.without_ms


def measure(name: str, sample: Sample, contexts: list[Any], rounds: int) -> Row:
    from purevk.program.compile import compile as compile_program
    from purevk.report.timings import time_dispatches

    module, args = sample
    programs = [compile_program(module, args, context=context) for context in contexts]
    results = [program.forward(*args) for program in programs]
    arrays = [each.numpy() for each in args]
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for taken, program in zip(times, programs):
            executable = program.method("forward").executable
            timings = time_dispatches(executable, arrays, 3, settle=0.1)
            taken.append(1e3 * sum(timing.seconds for timing in timings))
    for program in programs:
        program.close()
    one, two = (result.float() for result in results)
    difference = float((one - two).abs().max() / one.abs().max())
    with_ms, without_ms = map(statistics.median, times)
    return Row(name, with_ms, without_ms, difference)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("features", nargs="+")
    parser.add_argument("--small", action="store_true", help="sizes for a processor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="file for the figures, as JSON")
    args = parser.parse_args(arguments)
    from purevk import api
    from purevk.graph.context import Context
    from purevk.graph.limits import warm_up

    def opened(disable: list[str]) -> Context:
        return Context(api.Device(api.Instance().pick(None), disable=disable))

    contexts = [opened([]), opened(args.features)]
    absent = [each for each in args.features if each not in contexts[0].device.features]
    if absent:
        parser.error(f"{contexts[0].device.name} has no {', '.join(absent)}")
    if contexts[0].device.kind != "cpu":
        warm_up(contexts[0], 2.0)
    print(f"{contexts[0].device.name}: {', '.join(args.features)}")
    print(f"{'case':32} {'with ms':>10} {'without':>10}  ratio  difference")
    rows = []
    for name, make in CASES.items():
        row = measure(name, make(not args.small), contexts, args.rounds)
        rows.append(asdict(row))
        print(
            f"{name:32} {row.with_ms:10.4f} {row.without_ms:10.4f} {row.ratio:6.3f}"
            f"  {row.difference:.1e}",
            flush=True,
        )
    for context in contexts:
        context.close()
    if args.out:
        written = {"device": contexts[0].device.name, "features": args.features, "rows": rows}
        Path(args.out).write_text(json.dumps(written, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

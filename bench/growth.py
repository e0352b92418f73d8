"""How purevk grows: `python -m bench.growth` measures, and writes tables and a plot to RESULTS.md.

- Device time of a call by the length of a sequence (an encoder layer, and attention alone), by the
  batch, and by the side of an image, beside torch on the same processor or GPU.
- Time to load and to record by the number of nodes (`bench/nodes.py`).
- Host memory of the recordings that are kept, and the time of a call, by their number.

A GPU computes in half precision, with a CUDA graph of eager torch beside it; a software device in
float32, with torch on the CPU beside it. Contenders take turns, and every output is compared with
eager torch in float32. In halves, twice the error of torch in halves is accepted. A size is left
out if it does not fit the memory of the device or the time that is left; the tables say which, and
why.

`--out` also writes the figures as JSON, and `--from` makes the page of such a file again.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of torch sleep while purevk computes
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn import functional

from bench.networks import Layer, Of, ResNet, Sample, normalized
from bench.timing import (
    Budget,
    Sampler,
    error_of,
    exact_float32,
    interleave,
    machine,
    of_events,
    of_timestamps,
    of_wall,
    reason_of,
)

LIMIT = {torch.float16: 3e-2, torch.float32: 1e-3}
"""The largest accepted error relative to the largest output."""
_TIMES = 2.0  # the error of torch in the same dtype, which is accepted too
_MEMORY = 0.8  # of the device's memory that may be used
_CALLS = 12  # of each contender, about, at the least


@dataclass(frozen=True)
class Series:
    """Calls that differ in one size."""

    name: str
    about: str
    axis: str
    sizes: tuple[int, ...]
    build: Callable[[int], Sample]


@dataclass
class Point:
    """One size. Times in milliseconds of a call; `nbytes` of device memory; `flops` of a call."""

    size: int
    purevk: float | None = None
    torch: float | None = None
    nbytes: int | None = None
    flops: int | None = None
    error: float | None = None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.purevk is None or not self.torch else self.purevk / self.torch


@dataclass
class Results:
    """What the page shows."""

    machine: dict[str, Any]
    command: str
    series: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    recordings: list[dict[str, Any]] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)


def powers(first: int, last: int, step: int = 2) -> tuple[int, ...]:
    """Numbers that grow by a factor."""
    return tuple(first * step**n for n in range(1 + round(math.log(last / first, step))))


def all_series(software: bool) -> list[Series]:
    """What is measured on a software device, or on a GPU."""
    width, heads = (256, 4) if software else (768, 12)

    def network() -> torch.nn.Module:
        if software:
            return normalized(ResNet((1, 1, 1, 1), 16, 10), 64)
        return normalized(ResNet((3, 4, 6, 3), 64, 1000), 128)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v)

    side, about = (64, "a small ResNet") if software else (224, "ResNet-50")
    lengths = powers(16, 32768)
    return [
        Series(
            "encoder",
            f"an encoder layer of {width} columns and {heads} heads, by the length",
            "tokens",
            lengths,
            lambda n: (Layer(width, heads, True).eval(), (torch.randn(1, n, width),)),
        ),
        Series(
            "attention",
            f"attention of {heads} heads of 64, by the length",
            "tokens",
            lengths,
            lambda n: (Of(attend), tuple(torch.randn(1, heads, n, 64) for _ in range(3))),
        ),
        Series(
            "batch",
            f"{about}, images of {side} x {side}, by the batch",
            "images",
            powers(1, 256),
            lambda n: (network(), (torch.randn(n, 3, side, side),)),
        ),
        Series(
            "side",
            f"{about}, one image, by its side",
            "pixels",
            powers(64, 2048),
            lambda n: (network(), (torch.randn(1, 3, n, n),)),
        ),
    ]


NODES = (10, 100, 1000, 5000, 20_000)
RECORDINGS = (1, 4, 16, 64, 256)


# -- calls ---------------------------------------------------------------------------------------
def device_bytes(context: Any) -> int:
    """The memory of the device itself, or all that it reaches."""
    heaps = context.device.physical.heaps
    return sum(h.size for h in heaps if h.device_local) or sum(h.size for h in heaps)


def measure_point(point: Point, series: Series, dtype: torch.dtype, seconds: float) -> None:
    """Fills in a point."""
    import purevk
    from purevk.graph.context import default_context

    torch.manual_seed(0)
    module, inputs = series.build(point.size)
    module, inputs = module.to(dtype).requires_grad_(False), tuple(x.to(dtype) for x in inputs)
    with torch.no_grad():
        exported = torch.export.export(module, inputs, strict=False)
    report = purevk.plan(exported).report()
    memory = report["memory"]
    point.nbytes = sum(memory[name] for name in ("planned", "inputs", "outputs", "weights"))
    point.flops = report["flops"]
    most = _MEMORY * device_bytes(default_context())
    if point.nbytes > most:
        point.why = f"it takes {point.nbytes / 2**30:.1f} GiB of the device's memory"
        return
    samplers: dict[str, Sampler] = {}
    if torch.cuda.is_available():
        from bench import torch_cuda

        call, result = torch_cuda.prepare(torch_cuda.Form("graph"), module, inputs)
        call()
        torch.cuda.synchronize()
        expected = in_float32(module, inputs)
        theirs = error_of(result.double().cpu().numpy(), expected)
        samplers["torch"] = of_events(call)
    else:

        def eager() -> torch.Tensor:
            with torch.inference_mode():
                return module(*inputs)

        expected, theirs = eager().double().numpy(), 0.0
        samplers["torch"] = of_wall(eager, 1)
    with purevk.compile(exported) as program:
        arrays = [each.numpy() for each in inputs]
        point.error = error_of(program.forward(*arrays), expected)
        if not point.error <= max(LIMIT[dtype], _TIMES * theirs):
            point.why = f"the result of purevk is wrong: {point.error:.1e}"
            return
        samplers["purevk"] = of_timestamps(program.method("forward").executable, arrays)
        times = interleave(samplers, seconds, settle=seconds / 2, rounds=4)
        point.purevk, point.torch = (statistics.median(times[n]) for n in ("purevk", "torch"))


def in_float32(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
    """What eager torch computes in float32 on the GPU, with the same weights."""
    exact = copy.deepcopy(module).float().cuda()
    with torch.inference_mode():
        return exact(*(each.float().cuda() for each in inputs)).double().cpu().numpy()


def measure_series(
    series: Series, dtype: torch.dtype, budget: Budget, seconds: float
) -> list[Point]:
    """The points of a series, as far as the seconds of the budget go."""
    points = [Point(size) for size in series.sizes]
    last = growth = 0.0
    for point in points:
        expected = last * growth * _CALLS  # seconds of the calls
        if expected > budget.left or budget.left <= 0:
            point.why = "no time was left"
            if last:
                last *= growth
                point.why += f" (one call of each takes {last:.1f} s, about)"
            continue
        try:
            measure_point(point, series, dtype, seconds)
        except Exception as error:  # the table says why, and the other sizes go on
            point.why = reason_of(error)
        if point.purevk is not None and point.torch is not None:
            now = 1e-3 * (point.purevk + point.torch)
            growth = max(2.0, now / last if last else 2.0)
            last = now
        shown = "-" if point.purevk is None else f"{point.purevk:.3f} ms"
        print(f"{series.name} {point.size}: {shown} {point.why}", file=sys.stderr, flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return points


# -- host ----------------------------------------------------------------------------------------
def resident_bytes() -> int | None:
    """Memory of this process that is resident; None where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_recordings(counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One row for each number of recordings: what they take, and the time of a call."""
    import purevk
    from bench.signatures import Chain, host_seconds, inputs_of
    from purevk.graph import compute_graph

    most = max(counts) + 2
    length = torch.export.Dim("length", min=3, max=most)
    with mock.patch.object(compute_graph, "RECORDINGS", max(counts)):
        torch.manual_seed(0)
        with purevk.compile(
            Chain(25), (torch.randn(1, min(24, most), 16),), dynamic_shapes=({1: length},)
        ) as program:
            graph = program.method("forward").executable.graph
            program.forward(*inputs_of(program, 3))
            gc.collect()
            start, kept = resident_bytes(), 1
            for count in counts:
                for number in range(3 + kept, 3 + count):
                    program.forward(*inputs_of(program, number))
                kept = max(kept, count)
                recorded = graph.recorded
                now = resident_bytes()
                order = [3 + n % count for n in range(max(2 * count, 50))]
                row: dict[str, Any] = {
                    "recordings": count,
                    "dispatches": len(graph.dispatches),
                    "call": 1e6 * host_seconds(program, order),
                    "recorded_again": graph.recorded - recorded,
                }
                if start is not None and now is not None and count > 1:
                    row["bytes_each"] = max(now - start, 0) / (count - 1)
                yield row


def measure_nodes(counts: Sequence[int], budget: Budget, results: Results) -> None:
    """Adds a row for each number of nodes."""
    from bench import nodes

    nodes.measure(50)  # opens the device, and fills the cache
    each = 0.0
    for count in counts:
        if count * each > budget.left or budget.left <= 0:
            results.why[f"nodes {count}"] = "no time was left"
            continue
        start = time.perf_counter()
        results.nodes.append(nodes.measure(count))
        each = (time.perf_counter() - start) / count
        print(f"nodes {count}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, command: str) -> Results:
    """All that the options ask for."""
    from purevk.graph.context import default_context

    budget = Budget(options.budget)
    results = Results(machine(), command)
    software = default_context().device.kind == "cpu"
    dtype = torch.float32 if software or not torch.cuda.is_available() else torch.float16
    results.machine |= {"dtype": str(dtype).removeprefix("torch."), "software": software}
    if not torch.cuda.is_available():
        torch.set_num_threads(os.cpu_count() or 1)
        results.machine["threads"] = torch.get_num_threads()
    exact_float32()
    names = options.names or [series.name for series in all_series(software)] + list(HOST)
    if "nodes" in names:
        counts = [count for count in NODES if count <= options.largest]
        measure_nodes(counts, Budget(budget.left / len(names)), results)
    if "recordings" in names:
        results.recordings += measure_recordings([n for n in RECORDINGS if n <= options.largest])
    chosen = [series for series in all_series(software) if series.name in names]
    for number, series in enumerate(chosen):
        share = Budget(budget.left / (len(chosen) - number))
        sizes = tuple(size for size in series.sizes if size <= options.largest)
        limited = Series(series.name, series.about, series.axis, sizes, series.build)
        points = measure_series(limited, dtype, share, options.seconds)
        results.series.append(
            {
                "name": series.name,
                "about": series.about,
                "axis": series.axis,
                "points": [{**asdict(point), "ratio": point.ratio} for point in points],
            }
        )
    return results


HOST = ("nodes", "recordings")


def main(arguments: list[str] | None = None) -> int:
    """Measures, and writes the page."""
    known = [series.name for series in all_series(True)] + list(HOST)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="SERIES", help=f"of {', '.join(known)}")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of the whole run")
    parser.add_argument("--seconds", type=float, default=1.0, help="of sampling each size")
    parser.add_argument("--largest", type=int, default=1 << 20, help="the largest size")
    parser.add_argument("--out", type=Path, help="write all figures there, as JSON")
    parser.add_argument("--from", dest="source", type=Path, help="figures that were written before")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(__file__).resolve().parent,
        help="of RESULTS.md and plots/; default: bench",
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no such series: {', '.join(unknown)}; there are {', '.join(known)}")
    os.environ.setdefault("PUREVK_PROGRESS", "0")
    from bench.growth_page import write_page

    if options.source:
        results = Results(**json.loads(options.source.read_text(encoding="utf-8")))
    else:
        given = ["python -m bench.growth", *options.names]
        for name in ("budget", "seconds", "largest"):
            if getattr(options, name) != parser.get_default(name):
                given.append(f"--{name} {getattr(options, name):g}")
        results = measure(options, " ".join(given))
    if options.out:
        options.out.write_text(json.dumps(asdict(results), indent=1), encoding="utf-8")
    written = write_page(asdict(results), options.folder)
    for path in written:
        print(f"wrote {path}")
    if len(written) == 1:
        print("no plot, and none on the page: matplotlib is not installed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

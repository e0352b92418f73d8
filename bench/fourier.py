"""Fourier transforms beside cuFFT on a GPU: `python bench/fourier.py --out FILE.json`.

For each case of the family "fourier" of `bench/operators.py`: the time of purevk's dispatches on the
device, the time of torch.fft under CUDA (events around many calls), and the rate of each as a share
of the rate of a copy, with arguments and results moved once. The result of purevk is compared with
torch's in float64.

Without CUDA, only purevk is timed. Run it where the checkout can be imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.timing import cuda_seconds


def inputs_of(case: Any) -> list[numpy.ndarray]:
    """The tensors of a case, with numbers of a normal distribution."""
    from bench.operator_cases import Tensor

    random, found = numpy.random.default_rng(0), []
    for tensor in (arg for arg in case.args if isinstance(arg, Tensor)):
        made = random.standard_normal((*tensor.dims, 2), numpy.float32)
        found.append(
            made.view(numpy.complex64)[..., 0] if tensor.dtype.is_complex else made[..., 0].copy()
        )
    return found


def error_of(made: Any, case: Any, given: numpy.ndarray) -> float:
    """The relative rms error of one row, or of one image, of the result."""
    import torch

    wide = numpy.complex128 if given.dtype.kind == "c" else numpy.float64
    first = torch.from_numpy(given[:1].astype(wide))
    operator = getattr(torch.ops.aten, case.op.split(".")[1]).default
    wanted = operator(first, *case.args[1:]).numpy()
    difference = numpy.abs(numpy.asarray(made)[:1] - wanted)
    return float(numpy.sqrt((difference**2).mean()) / numpy.sqrt((numpy.abs(wanted) ** 2).mean()))


def time_purevk(context: Any, case: Any, given: list[numpy.ndarray]) -> tuple[float, int, float]:
    """Seconds on the device, dispatches, and the error."""
    from bench.operators import build
    from purevk.program import Program
    from purevk.report.timings import time_dispatches

    graph, _ = build(case)
    with Program(case.op, {"forward": lambda sizes: graph}, context) as program:
        error = error_of(program.forward(*given), case, given[0])
        timings = time_dispatches(program.method("forward").executable, given, 3, settle=0.2)
    return sum(timing.seconds for timing in timings), len(timings), error


def time_cuda(case: Any, given: list[numpy.ndarray], seconds: float) -> float | None:
    """The median of the seconds of a call of torch under CUDA; None without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return None
    operator = getattr(torch.ops.aten, case.op.split(".")[1]).default
    x = torch.from_numpy(given[0]).cuda()
    return cuda_seconds(lambda: operator(x, *case.args[1:]), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=64.0, help="size of the main tensor")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each case of torch")
    parser.add_argument("--only", default="", help="part of the form of the cases, such as 1024")
    parser.add_argument("--out", help="file for the figures, as JSON")
    args = parser.parse_args()
    from bench.operator_cases import operator_cases
    from bench.operators import build
    from purevk.graph.context import default_context
    from purevk.graph.limits import device_limits, warm_up

    context = default_context()
    limits = device_limits(context, False)
    if context.device.kind != "cpu":
        warm_up(context, 2.0)
    rows = []
    print(f"{context.device.name}: a copy moves {limits.bytes_per_second / 1e9:.0f} GB/s")
    print(
        "operator              form                       us   of copy   cuFFT us   of copy  error"
    )
    for case in operator_cases(int(args.mib * 2**20)):
        if case.family != "fourier" or args.only not in case.form:
            continue
        _, nbytes = build(case)
        given = inputs_of(case)
        ours, dispatches, error = time_purevk(context, case, given)
        theirs = time_cuda(case, given, args.seconds)
        least = nbytes / limits.bytes_per_second
        rows.append(
            {
                "operator": case.op,
                "form": case.form,
                "bytes": nbytes,
                "seconds": ours,
                "dispatches": dispatches,
                "share": least / ours,
                "error": error,
                "cufft_seconds": theirs,
                "cufft_share": None if theirs is None else least / theirs,
            }
        )
        cufft = "-" if theirs is None else f"{1e6 * theirs:.0f}"
        share = "-" if theirs is None else f"{100 * least / theirs:.0f} %"
        print(
            f"{case.op:21} {case.form:22} {1e6 * ours:8.0f} {100 * least / ours:7.0f} %"
            f" {cufft:>10} {share:>9}  {error:.1e}",
            flush=True,
        )
    if args.out:
        Path(args.out).write_text(
            json.dumps({"device": context.device.name, "rows": rows}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()

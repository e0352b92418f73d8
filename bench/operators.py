"""Times single operators on a device, beside the limits of the device.

    python bench/operators.py [PATTERN] [--mib N ...] [--remeasure] [--device NAME] [--json]

Contents are random. PATTERN selects operators by name or family, such as `softmax` or `quantized`.
Without it, all operators are timed, which takes a few minutes. Sizes of the main tensors are 1/16 and
64 MiB, on a CPU 1/16 and 16 MiB, or those of --mib.

*of limit* is the shortest time that the device's limits allow, with each argument and result moved
once, divided by the time taken.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.operator_cases import Case, Tensor, operator_cases
from purevk import progress
from purevk.cli.machine import device_data, device_line, open_context
from purevk.cli.output import Output, count, duration
from purevk.dtypes import DType
from purevk.errors import InputError, PurevkError
from purevk.frontends.importer import Importer
from purevk.graph.limits import DeviceLimits, device_limits, warm_up
from purevk.ir import Graph, TensorType, Value, values_in
from purevk.plain_text import json_text
from purevk.program import Program
from purevk.report.timings import time_dispatches

if TYPE_CHECKING:
    from purevk.graph.context import Context

_MIB = 1 << 20
_WARM_UP_SECONDS, _SETTLE_SECONDS, _LONG_SECONDS = 2.0, 0.15, 0.3


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Times the operators whose names fit `args.pattern`.

    Returns:
        "device", "limits", and "rows": for each operator and size "family", "operator", "form",
        "mib", "seconds", "dispatches", "bytes" (of arguments and results, each once), "flops",
        "bytes_per_second", "flops_per_second", "limit_share", "bound"; or "error" where it could
        not be timed.
    """
    with open_context(args) as context:
        limits = device_limits(context, args.remeasure)
        sizes = args.mib or ([1 / 16, 16.0] if context.device.kind == "cpu" else [1 / 16, 64.0])
        rows = []
        if context.device.kind != "cpu":
            warm_up(context, _WARM_UP_SECONDS)
        for mib in sizes:
            chosen = [case for case in operator_cases(int(mib * _MIB)) if _fits(case, args.pattern)]
            if not chosen:
                raise InputError(
                    f"no operator fits {args.pattern!r}", next="`purevk ops` lists the operators"
                )
            rows += [
                {"mib": mib, **_time(context, limits, case)} for case in _reported(chosen, mib)
            ]
        return {
            "device": device_data(context.device),
            "limits": {
                "bytes_per_second": limits.bytes_per_second,
                "flops_per_second": limits.flops_per_second,
            },
            "rows": rows,
        }


def _fits(case: Case, pattern: str) -> bool:
    wanted = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    return fnmatch.fnmatchcase(case.op, wanted) or fnmatch.fnmatchcase(case.family, wanted)


def _reported(cases: Sequence[Case], mib: float) -> Iterable[Case]:
    bar = progress.default()
    with progress.closing(bar):
        for number, case in enumerate(cases):
            if bar is not None:
                bar(f"timing operators of {_size(mib)}", number, len(cases))
            yield case


def _time(context: Context, limits: DeviceLimits, case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {"family": case.family, "operator": case.op, "form": case.form}
    try:
        graph, nbytes = build(case)
        inputs = [
            _random(tensor, n) for n, tensor in enumerate(_tensors(case)) if not tensor.constant
        ]
        started = time.perf_counter()
        with Program(case.op, {"forward": lambda sizes: graph}, context) as program:
            executable = program.method("forward").executable
            if context.device.kind != "cpu" and time.perf_counter() - started > _LONG_SECONDS:
                warm_up(
                    context, _LONG_SECONDS
                )  # while the driver compiled, the clocks have fallen far
            timings = time_dispatches(executable, inputs, 3, settle=_SETTLE_SECONDS)
    except PurevkError as error:
        return {**row, "error": f"{error.what}: {error.why}" if error.why else error.what}
    seconds, flops = (
        sum(timing.seconds for timing in timings),
        sum(timing.flops for timing in timings),
    )
    memory, arithmetic = nbytes / limits.bytes_per_second, flops / limits.flops_per_second
    return {
        **row,
        "dispatches": len(timings),
        "seconds": seconds,
        "bytes": nbytes,
        "flops": flops,
        "bytes_per_second": nbytes / seconds if seconds else None,
        "flops_per_second": flops / seconds if seconds and flops else None,
        "limit_share": max(memory, arithmetic) / seconds if seconds else None,
        "bound": "memory" if memory >= arithmetic else "arithmetic",
    }


# -- the graph of one operator -------------------------------------------------------------------
def _tensors(case: Case) -> list[Tensor]:
    """The tensors among the arguments, each once. Equal arguments are one input."""
    found: dict[int, Tensor] = {}

    def visit(arg: Any) -> None:
        if isinstance(arg, Tensor):
            found.setdefault(id(arg), arg)
        elif isinstance(arg, tuple):
            for item in arg:
                visit(item)

    visit(case.args)
    return list(found.values())


def build(case: Case) -> tuple[Graph, int]:
    """A graph with one operator, and the bytes that it must move: each argument and result once."""
    importer = Importer(case.op, case.op)
    values: dict[int, Value] = {}
    for tensor in _tensors(case):
        if tensor.constant:
            data = _random(tensor).reshape(-1).view(np.uint8).data
            values[id(tensor)] = importer.constant(data, TensorType(tensor.dtype, tensor.dims))
        else:
            values[id(tensor)] = importer.input(tensor.dtype, tensor.dims, False)

    def filled(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(filled(item) for item in arg)
        return values[id(arg)] if isinstance(arg, Tensor) else arg

    results = importer.emit(case.op, filled(case.args), [], [], case.op)
    written = sum(value.type.nbytes for value in results)
    read = sum(
        min(tensor.nbytes, int(written * tensor.sparse) or tensor.nbytes)
        for tensor in _tensors(case)
    )
    return importer.finish(list(values_in(results))), read + written


def _random(tensor: Tensor, number: int = 0) -> np.ndarray:
    random = np.random.default_rng((len(tensor.dims), number))
    if tensor.dtype.is_complex:
        parts = _random(Tensor((*tensor.dims, 2), tensor.dtype.component), number)
        return parts.view(tensor.dtype.numpy)[..., 0]
    if tensor.dtype.is_float:
        # A short period: making gigabytes of random numbers would take longer than all the kernels.
        some = random.random(min(math.prod(tensor.dims), 1 << 16), np.float32).astype(
            tensor.dtype.numpy
        )
        return np.resize(some, tensor.dims)
    if tensor.dtype is DType.bool:
        return random.integers(0, 2, tensor.dims, np.uint8).astype(bool)
    return random.integers(0, tensor.high, tensor.dims, tensor.dtype.numpy)


# -- for people ----------------------------------------------------------------------------------
def show(data: dict[str, Any], out: Output) -> None:
    out.pairs([("device", device_line(data["device"]))], indent=0)
    sizes = list(dict.fromkeys(row["mib"] for row in data["rows"]))
    for family in dict.fromkeys(row["family"] for row in data["rows"]):
        by_case: dict[tuple[str, str], dict[float, dict[str, Any]]] = {}
        for row in data["rows"]:
            if row["family"] == family:
                name = row["operator"].removeprefix("aten.")
                by_case.setdefault((name, row["form"]), {})[row["mib"]] = row
        columns = [("time", "r"), ("GB/s", "r"), ("GFLOP/s", "r"), ("of limit", "r")]
        names: list[Any] = [("operator", "c"), ""]
        for mib in sizes:
            names += [(f"{_size(mib)}: time", "r"), *columns[1:]]
        out.table(
            names,
            [
                [*case, *[cell for mib in sizes for cell in _cells(found.get(mib))]]
                for case, found in by_case.items()
            ],
            title=family,
        )
    failed = [row for row in data["rows"] if "error" in row]
    for row in failed:
        out.line(f"{row['operator']} of {_size(row['mib'])}: {row['error']}", "yellow")
    limits = data["limits"]
    out.line(
        f"{count(len(data['rows']), 'measurement')}. Limits measured on this device:"
        f" {limits['bytes_per_second'] / 1e9:.1f}"
        f" GB/s, {limits['flops_per_second'] / 1e9:.0f} GFLOP/s (float32, without matrix cores)."
        " of limit: the shortest time that the limits allow, with arguments and results moved once,"
        " divided by the time taken (above 100%: from caches, or with matrix cores);"
        " m: memory-bound, a: compute-bound",
        "dim",
    )


def _size(mib: float) -> str:
    return f"{mib:g} MiB" if mib >= 1 else f"{mib * 1024:g} KiB"


def _cells(row: dict[str, Any] | None) -> list[str | None]:
    if row is None or "error" in row:
        return [None, None, None, None]
    rates = [
        None if rate is None else f"{rate / 1e9:.{1 if rate < 1e11 else 0}f}"
        for rate in (row["bytes_per_second"], row["flops_per_second"])
    ]
    share = (
        None if row["limit_share"] is None else f"{100 * row['limit_share']:.0f}% {row['bound'][0]}"
    )
    return [duration(row["seconds"]), *rates, share]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default="*", help="of names")
    parser.add_argument(
        "--mib", type=float, nargs="+", metavar="N", help="sizes of the main tensors in MiB"
    )
    parser.add_argument(
        "--remeasure", action="store_true", help="measure the limits of the device again"
    )
    parser.add_argument("--device", metavar="NAME", help="index, name or part of one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if any(mib <= 0 for mib in args.mib or ()):
        parser.error("--mib takes sizes above 0")
    try:
        data = collect(args)
    except PurevkError as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json_text(data, 2))
    else:
        show(data, Output())
    return 0


if __name__ == "__main__":
    sys.exit(main())

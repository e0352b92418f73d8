"""Times single dispatches, adds them up by operator, and compares them with the device's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from purevk.graph.context import Context
from purevk.graph.executable import Executable
from purevk.graph.limits import DeviceLimits, device_limits
from purevk.ir import Value
from purevk.ir import dims as _dims
from purevk.ir.binding import bind_symbols, input_symbols
from purevk.report.lowered import label_operator

_MOST_RUNS, _MOST_ROUNDS = 4000, 20


@dataclass(frozen=True)
class Timing:
    """One dispatch: its label, template, seconds, bytes moved, arithmetic operations, and the number
    of its segment."""

    label: str
    template: str
    seconds: float
    nbytes: int
    flops: int
    segment: int = 0


def time_dispatches(
    executable: Executable, inputs: Sequence[Any], runs: int = 5, settle: float = 0.0
) -> list[Timing]:
    """Times every dispatch of a call. Each waits for the one before, so that none overlap.

    Args:
        executable: what runs the method within the exported bounds.
        inputs: of a call, as numpy arrays and integers.
        runs: the median of so many is taken.
        settle: seconds of work before what counts, so that a GPU leaves its idle clocks, and a
            third of it for what counts, until times do not fall any more.

    Raises:
        DeviceError: the device has no timestamps.
    """
    graph = executable.plan.assignment.graph
    env = bind_symbols(input_symbols(graph), inputs)
    tensors = {
        value: array for value, array in zip(graph.inputs, inputs) if isinstance(value, Value)
    }
    executable.run({value: np.ascontiguousarray(array) for value, array in tensors.items()}, env)
    timings: list[Timing] = []
    for number, cut in enumerate(executable.graph.cuts):
        dispatches = executable.graph.dispatches[cut.first : cut.last]
        if not dispatches:
            continue
        times = executable.graph.profile(number, env, runs)
        more = min(int(settle * 1e9 / max(sum(times), 1e3)), _MOST_RUNS)
        if more > runs:
            executable.graph.profile(number, env, more)
            # A GPU that was idle takes its time to raise its clocks: nothing counts until times
            # have stopped falling.
            steady, rounds, most = (
                0,
                0,
                1 if executable.context.device.kind == "cpu" else _MOST_ROUNDS,
            )
            while steady < 2 and rounds < most:
                before, times = (
                    sum(times),
                    executable.graph.profile(number, env, max(more // 3, runs)),
                )
                more = min(int(settle * 1e9 / max(sum(times), 1e3)), _MOST_RUNS)
                steady, rounds = (steady + 1 if sum(times) > 0.98 * before else 0), rounds + 1
        for dispatch, nanoseconds in zip(dispatches, times):
            timings.append(
                Timing(
                    dispatch.label,
                    dispatch.kernel.template,
                    nanoseconds / 1e9,
                    _dims.evaluate(dispatch.nbytes, env),
                    _dims.evaluate(dispatch.flops, env),
                    number,
                )
            )
    return timings


def limits_for(context: Context, timings: Sequence[Timing], again: bool = False) -> DeviceLimits:
    """The limits of a device, to compare timings with.

    Args:
        again: measure them also if they are known.
    """
    limits = device_limits(context, again)
    above = any((row["limit_share"] or 0.0) > 1.0 for row in table(timings, "operator", limits))
    if above and not again and context.device.kind == "cpu":
        # The limits may be those of a machine that had other work. On a GPU, caches and matrix cores
        # explain it.
        limits = device_limits(context, again=True)
    return limits


def table(timings: Sequence[Timing], by: str, limits: DeviceLimits) -> list[dict[str, Any]]:
    """Sums timings, the longest first.

    Args:
        timings: of `time_dispatches`.
        by: "operator", "template" or "dispatch" (no sums).
        limits: of the device.

    Returns:
        For each: "label", "calls", "seconds", "share" (of all), "bytes_per_second",
        "flops_per_second" (None where unknown), "limit_share": the least time that the limits allow
        over the time taken, and "bound": "memory" or "arithmetic", whichever asks for more of it.
    """
    keys: Callable[[int, Timing], Any] = {
        "operator": lambda at, t: label_operator(t.label),
        "template": lambda at, t: t.template,
        "dispatch": lambda at, t: (at, t.label),
    }[by]
    groups: dict[Any, list[Timing]] = {}
    for at, timing in enumerate(timings):
        groups.setdefault(keys(at, timing), []).append(timing)
    total = sum(timing.seconds for timing in timings)
    rows = []
    for key, group in groups.items():
        label = key[1] if isinstance(key, tuple) else key
        rows.append(_row(label, group, total, limits))
    return sorted(rows, key=lambda row: -row["seconds"])


def _row(label: str, group: Sequence[Timing], total: float, limits: DeviceLimits) -> dict[str, Any]:
    seconds = sum(timing.seconds for timing in group)
    nbytes, flops = sum(timing.nbytes for timing in group), sum(timing.flops for timing in group)
    memory, arithmetic = nbytes / limits.bytes_per_second, flops / limits.flops_per_second
    # Each dispatch is either memory-bound or compute-bound.
    least = sum(
        max(t.nbytes / limits.bytes_per_second, t.flops / limits.flops_per_second) for t in group
    )
    return {
        "label": label,
        "calls": len(group),
        "seconds": seconds,
        "share": seconds / total if total else 0.0,
        "bytes_per_second": nbytes / seconds if seconds and nbytes else None,
        "flops_per_second": flops / seconds if seconds and flops else None,
        "limit_share": least / seconds if seconds and least else None,
        "bound": None if not least else "memory" if memory >= arithmetic else "arithmetic",
    }


def least_seconds(timings: Sequence[Timing], limits: DeviceLimits) -> Mapping[str, float]:
    """ "roofline": the least time that the limits allow, summed over the dispatches."""
    return {
        "measured": sum(t.seconds for t in timings),
        "roofline": sum(
            max(t.nbytes / limits.bytes_per_second, t.flops / limits.flops_per_second)
            for t in timings
        ),
    }

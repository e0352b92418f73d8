"""Times single dispatches, adds them up by operator, and compares them with the device's limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from purevk.graph.call import Call
from purevk.graph.context import Context
from purevk.graph.executable import Executable, Observation
from purevk.graph.limits import DeviceLimits, device_limits, faster
from purevk.ir import Node, Symbol, Value
from purevk.ir import dims as _dims
from purevk.ir.binding import bind_symbols, input_symbols
from purevk.lower.lowering import Dispatch
from purevk.progress import Progress
from purevk.report.lowered import label_operator, user_operators

_MOST_RUNS, _MOST_ROUNDS = 4000, 20
_CPU_CACHES, _GPU_CACHES = 32 << 20, 256 << 20  # bytes that caches hold, about


@dataclass(frozen=True)
class Timing:
    """One dispatch of a method or of a sub-graph.

    Attributes:
        label, template: of the dispatch.
        seconds, nbytes, flops: of one run: its time, bytes moved, arithmetic operations.
        segment: its number in the call.
        runs: how often it ran in the call; that of a loop's body several times.
        node: whose dispatch it is.
        dispatch: as it is in the plan.
    """

    label: str
    template: str
    seconds: float
    nbytes: int
    flops: int
    segment: int = 0
    runs: int = 1
    node: Node | None = None
    dispatch: Dispatch | None = None

    @property
    def total(self) -> float:
        """Seconds of all runs."""
        return self.seconds * self.runs


class CallTimings(NamedTuple):
    """What a call takes.

    Attributes:
        dispatches: of all segments that ran, those of a segment in order.
        order: the numbers of the segments, as they were submitted.
        on_cpu: the nodes on the CPU in order, with their seconds.
    """

    dispatches: list[Timing]
    order: list[int]
    on_cpu: list[tuple[Node, float]]


def time_dispatches(
    executable: Executable,
    inputs: Sequence[Any],
    runs: int = 5,
    settle: float = 0.0,
    progress: Progress | None = None,
) -> list[Timing]:
    """The dispatches of `time_call`."""
    return time_call(executable, inputs, runs, settle, progress).dispatches


def time_call(
    executable: Executable,
    inputs: Sequence[Any],
    runs: int = 5,
    settle: float = 0.0,
    progress: Progress | None = None,
) -> CallTimings:
    """Times every dispatch of a call. Each waits for the one before, so that none overlap.

    Runs two calls, and then each segment that took part in the second. A segment that ran with
    several sizes, in a loop, is timed with the last ones.

    Args:
        executable: what runs the method within the exported bounds.
        inputs: of a call, as numpy arrays and integers.
        runs: the median of so many is taken.
        settle: seconds of work before what counts, so that a GPU leaves its idle clocks, and a
            third of it for what counts, until times do not fall any more.
        progress: called with the dispatches that were timed.

    Raises:
        DeviceError: the device has no timestamps.
    """
    graph = executable.plan.assignment.graph
    env = bind_symbols(input_symbols(graph), inputs)
    tensors = {
        value: array for value, array in zip(graph.inputs, inputs) if isinstance(value, Value)
    }
    observation = Observation()
    arrays = {value: np.ascontiguousarray(array) for value, array in tensors.items()}
    executable.run(Call(arrays, dict(env)))  # with all that only a first call does
    executable.observe(observation)
    try:
        executable.run(Call(arrays, dict(env)))
    finally:
        executable.observe(None)
    sizes = {(one, number): inside for one, number, inside in observation.submissions}
    numbers = {key: at for at, key in enumerate(sizes)}
    order = [numbers[one, number] for one, number, _ in observation.submissions]
    count = Counter(order)
    cuts = [one.graph.cuts[number] for one, number in numbers]
    total = sum(cut.last - cut.first for cut in cuts)
    timings: list[Timing] = []
    for ((one, number), at), cut in zip(numbers.items(), cuts):
        if progress is not None:
            progress("timing dispatches", len(timings), total)
        env = sizes[one, number]
        times = _segment_times(one, number, env, runs, settle)
        # Results may have sizes that became known after the segment.
        known = {**observation.values[one], **env}
        for position, nanoseconds in zip(range(cut.first, cut.last), times, strict=True):
            dispatch = one.plan.dispatches[position]
            timings.append(
                Timing(
                    dispatch.label,
                    dispatch.kernel.template,
                    nanoseconds / 1e9,
                    _dims.evaluate(dispatch.nbytes, known),
                    _dims.evaluate(dispatch.flops, known),
                    at,
                    count[at],
                    one.plan.nodes_of[position],
                    dispatch,
                )
            )
    if progress is not None:
        progress("timing dispatches", total, total)
    return CallTimings(timings, order, observation.on_cpu)


def _segment_times(
    executable: Executable, number: int, env: Mapping[Symbol, int], runs: int, settle: float
) -> list[float]:
    """Nanoseconds of each dispatch of a segment; `runs` and `settle` as for `time_call`."""
    times = executable.graph.profile(number, env, runs)
    more = min(int(settle * 1e9 / max(sum(times), 1e3)), _MOST_RUNS)
    if more > runs:
        executable.graph.profile(number, env, more)
        # A GPU that was idle takes its time to raise its clocks: nothing counts until times have
        # stopped falling.
        steady, rounds = 0, 0
        most = 1 if executable.context.device.kind == "cpu" else _MOST_ROUNDS
        while steady < 2 and rounds < most:
            before = sum(times)
            times = executable.graph.profile(number, env, max(more // 3, runs))
            more = min(int(settle * 1e9 / max(sum(times), 1e3)), _MOST_RUNS)
            steady, rounds = (steady + 1 if sum(times) > 0.98 * before else 0), rounds + 1
    return times


def limits_for(context: Context, timings: Sequence[Timing], again: bool = False) -> DeviceLimits:
    """The limits of a device, to compare timings with.

    Args:
        again: measure them also if they are known.
    """
    limits = device_limits(context, again)
    on_cpu = context.device.kind == "cpu"
    caches = _CPU_CACHES if on_cpu else _GPU_CACHES
    large = [timing for timing in timings if timing.nbytes >= caches and timing.seconds]
    reached = DeviceLimits(
        max((each.nbytes / each.seconds for each in large), default=0.0),
        max((timing.flops / timing.seconds for timing in timings if timing.seconds), default=0.0),
    )
    above = reached.bytes_per_second > limits.bytes_per_second
    if on_cpu:
        rows = table(timings, "operator", limits)
        above = above or reached.flops_per_second > limits.flops_per_second
        above = above or any((row["limit_share"] or 0.0) > 1.0 for row in rows)
    if not above:
        return limits  # on a GPU, caches and matrix cores explain what is above
    # The limits may be those of a machine that had other work.
    if not again:
        limits = device_limits(context, again=True)
    # What a kernel of a CPU reached is possible: operations in any case, bytes if they are more than
    # caches have. It is not kept, because a kernel states how many operations it does, and may do
    # fewer.
    return faster(limits, reached) if on_cpu else limits


def table(timings: Sequence[Timing], by: str, limits: DeviceLimits) -> list[dict[str, Any]]:
    """Sums timings, the longest first.

    Args:
        timings: of `time_dispatches`.
        by: "operator", "template" or "dispatch" (no sums).
        limits: of the device.

    Returns:
        For each: "label", "operators" (those of the user's program), "calls", "seconds", "share" (of
        all), "bytes_per_second", "flops_per_second" (None where unknown), "limit_share": the least
        time that the limits allow over the time taken, and "bound": "memory" or "arithmetic",
        whichever asks for more of it.
    """
    keys: Callable[[int, Timing], Any] = {
        "operator": lambda at, t: label_operator(t.label),
        "template": lambda at, t: t.template,
        "dispatch": lambda at, t: (at, t.label),
    }[by]
    groups: dict[Any, list[Timing]] = {}
    for at, timing in enumerate(timings):
        groups.setdefault(keys(at, timing), []).append(timing)
    total = sum(timing.total for timing in timings)
    rows = []
    for key, group in groups.items():
        label = key[1] if isinstance(key, tuple) else key
        rows.append(_row(label, group, total, limits))
    return sorted(rows, key=lambda row: -row["seconds"])


def _row(label: str, group: Sequence[Timing], total: float, limits: DeviceLimits) -> dict[str, Any]:
    seconds = sum(timing.total for timing in group)
    nbytes = sum(timing.nbytes * timing.runs for timing in group)
    flops = sum(timing.flops * timing.runs for timing in group)
    memory, arithmetic = nbytes / limits.bytes_per_second, flops / limits.flops_per_second
    # Each dispatch is either memory-bound or compute-bound.
    least = sum(_least(timing, limits) for timing in group)
    operators = dict.fromkeys(name for timing in group for name in user_operators(timing.label))
    return {
        "label": label,
        "operators": list(operators),
        "calls": sum(timing.runs for timing in group),
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
        "measured": sum(timing.total for timing in timings),
        "roofline": sum(_least(timing, limits) for timing in timings),
    }


def _least(timing: Timing, limits: DeviceLimits) -> float:
    """The least seconds that the limits allow for all runs."""
    memory, arithmetic = limits.bytes_per_second, limits.flops_per_second
    return timing.runs * max(timing.nbytes / memory, timing.flops / arithmetic)


def host_table(on_cpu: Sequence[tuple[Node, float]]) -> list[dict[str, Any]]:
    """Operators on the CPU: "label", "calls", "seconds", the longest first.

    Args:
        on_cpu: of `time_call`.
    """
    groups: dict[str, list[float]] = {}
    for node, seconds in on_cpu:
        groups.setdefault(str(node.args[0]), []).append(seconds)
    rows = [
        {"label": name, "calls": len(found), "seconds": sum(found)}
        for name, found in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])

"""Runs what depends on constants alone, such as packing weights, when a program is loaded.

Constants that only these dispatches read go to the device batch by batch, into the same memory.
Otherwise the device would hold most weights twice at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from purevk.graph.call_memory import Cut
from purevk.graph.compute_graph import ComputeGraph
from purevk.graph.context import Context
from purevk.graph.memory import DeviceStore, Staging
from purevk.ir import Value
from purevk.lower.lowering import BufferWindow, Dispatch
from purevk.schedule.plan import Plan

BATCH = 32 << 20  # bytes of constants


class Batch(NamedTuple):
    """The dispatches [first, last), and the constants that these alone read."""

    first: int
    last: int
    constants: tuple[Value, ...]


def batches(
    dispatches: Sequence[Dispatch],
    sizes: Mapping[Value, int],
    windows: Mapping[Value, BufferWindow],
    limit: int,
) -> list[Batch]:
    """Splits dispatches, so that those of a batch read at most `limit` bytes of constants if they
    are several.

    Args:
        sizes: the constants, with their bytes.
        windows: storages that are parts of others.
    """
    reads = [
        {
            storage
            for binding in dispatch.bindings
            for storage in [_whole(binding.storage, windows)]
            if storage in sizes
        }
        for dispatch in dispatches
    ]
    starts: list[int] = []
    held: set[Value] = set()
    total = 0
    for number, mine in enumerate(reads):
        total += sum(sizes[value] for value in mine - held)
        fits = mine <= held or total <= limit
        if not starts or not fits:
            starts.append(number)
            held, total = set(), sum(sizes[value] for value in mine)
        held |= mine
    spans = list(zip(starts, [*starts[1:], len(reads)]))
    users: dict[Value, set[int]] = {}
    for batch, (first, last) in enumerate(spans):
        for value in set().union(*reads[first:last]):
            users.setdefault(value, set()).add(batch)
    return [
        Batch(first, last, tuple(value for value in sizes if users.get(value) == {batch}))
        for batch, (first, last) in enumerate(spans)
    ]


def _whole(storage: Value, windows: Mapping[Value, BufferWindow]) -> Value:
    return windows[storage].storage if storage in windows else storage


def run_load_time(context: Context, plan: Plan, weights: DeviceStore) -> None:
    """Runs the load-time dispatches of a plan. The weights have memory for the results."""
    sizes = {
        value: plan.sizes[value] for value in plan.once_constants if value not in weights.ranges
    }
    parts = batches(plan.once, sizes, plan.windows, BATCH)
    staging = Staging(context.device)
    raw = DeviceStore(context.device, "constants", staging)
    try:
        raw.reserve_in_turn([[(value, sizes[value]) for value in part.constants] for part in parts])
        shared = [value for value in sizes if value not in raw.ranges]
        raw.add([(value, sizes[value], content_of(plan, value)) for value in shared])
        cuts = [Cut(part.first, part.last, (), ()) for part in parts]
        graph = ComputeGraph(context, plan.once, cuts, [weights, raw], plan.sizes, plan.windows)
        try:
            for number, part in enumerate(parts):
                raw.upload([(value, content_of(plan, value)) for value in part.constants])
                graph.submit(number, {}).wait()
        finally:
            graph.close()
    finally:
        raw.close()
        staging.close()


def content_of(plan: Plan, value: Value) -> Callable[[], memoryview]:
    """Gives the bytes of a constant."""
    return lambda: plan.graph.constants[value].data[: value.type.nbytes]

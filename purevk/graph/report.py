"""What a plan needs, without a device: kernels, memory, bytes moved, operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from purevk.graph.limits import DeviceLimits
from purevk.ir import Node, Symbol, Value
from purevk.ir import dims as _dims
from purevk.memory_planner import ALIGNMENT, Block, MemoryPlan
from purevk.memory_planner import plan as plan_memory
from purevk.schedule.plan import Plan


def kernels_data(plan: Plan) -> list[dict[str, Any]]:
    """For each template: dispatches of a call, dispatches at load, pipelines, and their SPIR-V
    modules."""
    calls = Counter(
        dispatch.kernel.template for each in plan.nested() for dispatch in each.dispatches
    )
    once = Counter(dispatch.kernel.template for each in plan.nested() for dispatch in each.once)
    pipelines = Counter(spec.template for spec in plan.kernels)
    modules = Counter(
        template for template, _ in {(spec.template, spec.macros) for spec in plan.kernels}
    )
    return [
        {
            "template": name,
            "dispatches": calls[name],
            "at_load": once[name],
            "pipelines": pipelines[name],
            "modules": modules[name],
        }
        for name in sorted(pipelines, key=lambda name: (-calls[name], name))
    ]


def memory_data(plan: Plan, unified: bool, max_arena: int | None = None) -> dict[str, int]:
    """Bytes on the device, as `Program.memory` reports them once the method is loaded: "planned",
    "naive", "lower_bound" of intermediate tensors, "inputs", "outputs", "weights", "state".

    Args:
        plan: the method.
        unified: whether the host reads the device's memory at full speed.
        max_arena: the most bytes of one allocation; None: no limit.
    """
    if plan.inner:
        return _nested_memory(plan, unified, max_arena)
    weights = resident_weights(plan)
    states = dict.fromkeys(plan.assignment.graph.states)
    buffers = call_buffers(plan, unified, max_arena)
    planned = buffers.temporaries
    return {
        "planned": planned.planned,
        "naive": planned.naive,
        "lower_bound": planned.lower_bound,
        "inputs": sum(_aligned(plan.sizes[v]) for v in buffers.uploads),
        "outputs": sum(_aligned(plan.sizes[v]) for v in buffers.downloads),
        "weights": sum(_aligned(plan.sizes[v]) for v in weights),
        "state": sum(_aligned(v.type.nbytes) for v in states),
    }


def resident_weights(plan: Plan) -> list[Value]:
    """The constants of a plan that stay on the device, folded ones included. Those of its sub-graphs
    are not among them."""
    return list(dict.fromkeys((*plan.constants, *(plan.once_kept if plan.once else ()))))


@dataclass(frozen=True)
class CallBuffers:
    """The buffers of a plan's calls. Those of its sub-graphs are not among them.

    Attributes:
        blocks: the intermediate tensors, with the first and the last dispatch that needs each.
        temporaries: where they lie.
        uploads, downloads: what the host writes and reads, in buffers of their own.
    """

    blocks: tuple[Block, ...]
    temporaries: MemoryPlan
    uploads: tuple[Value, ...]
    downloads: tuple[Value, ...]


def call_buffers(plan: Plan, unified: bool, max_arena: int | None = None) -> CallBuffers:
    """Where the tensors of a call lie.

    Args:
        plan, unified, max_arena: as for `memory_data`.
    """
    resident = {*resident_weights(plan), *plan.assignment.graph.states, *plan.checks}
    uploads = dict.fromkeys(
        value for values in plan.uploads for value in values if value not in resident
    )
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    read: set[Value] = set()
    for step, dispatch in enumerate(plan.dispatches):
        for binding in dispatch.bindings:
            if binding.storage in resident or binding.storage in uploads:
                continue
            first.setdefault(binding.storage, step)
            last[binding.storage] = step
            if not binding.write:
                read.add(binding.storage)
    downloads: dict[Value, int] = {}
    for (_, end), values in zip(plan.ranges, plan.downloads):
        for value in values:
            downloads.setdefault(value, end)
    direct = [
        v
        for v in downloads
        if v not in resident and v not in uploads and (unified or v not in read)
    ]
    copied = [
        v
        for v in downloads
        if v not in direct and v not in uploads and not (unified and v in resident)
    ]
    for value in copied:
        if value in first:
            last[value] = max(last[value], downloads[value])
    blocks = [Block(v, plan.sizes[v], first[v], last[v]) for v in first if v not in direct]
    return CallBuffers(
        tuple(blocks),
        plan_memory(blocks, max_arena=max_arena),
        tuple(uploads),
        (*direct, *copied),
    )


def _nested_memory(plan: Plan, unified: bool, max_arena: int | None) -> dict[str, int]:
    """The sum over a plan and its sub-graphs, which share weights and states."""
    parts = [memory_data(replace(each, inner={}), unified, max_arena) for each in plan.nested()]
    total = {key: sum(part[key] for part in parts) for key in parts[0]}
    plans = list(plan.nested())
    weights = {value for each in plans for value in resident_weights(each)}
    states = {value for each in plans for value in each.assignment.graph.states}
    total["weights"] = sum(_aligned(value.type.nbytes) for value in weights)
    total["state"] = sum(_aligned(value.type.nbytes) for value in states)
    return total


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 4) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class NodeCost:
    """What one node of a call costs, as its kernels state it.

    Attributes:
        operator, source: the node.
        nbytes: bytes that its dispatches read and write.
        flops: operations, counting a multiply-add as two.
        dispatches: how many.
        seconds: the least time that a device's limits allow, summed over the dispatches; None
            without limits.
    """

    operator: str
    source: str
    nbytes: int
    flops: int
    dispatches: int
    seconds: float | None


def node_costs(
    plan: Plan, limits: DeviceLimits | None = None, sizes: Mapping[str, int] | None = None
) -> list[NodeCost]:
    """The cost of each node of a call that runs on the device, in order. Sub-graphs of control flow
    count once.

    Args:
        limits: of the device, for `seconds`.
        sizes: values of dynamic sizes, by name; the others are at their upper bounds.
    """
    chosen = sizes or {}
    found: list[NodeCost] = []
    for each in plan.nested():
        made: dict[Node, list[tuple[int, int]]] = {}
        for node, dispatch in zip(each.nodes_of, each.dispatches):
            made.setdefault(node, []).append(
                (_value(dispatch.nbytes, chosen), _value(dispatch.flops, chosen))
            )
        for node, parts in made.items():
            seconds = None
            if limits is not None:
                seconds = sum(
                    max(b / limits.bytes_per_second, f / limits.flops_per_second) for b, f in parts
                )
            totals = (sum(b for b, _ in parts), sum(f for _, f in parts))
            found.append(NodeCost(node.op, node.source, *totals, len(parts), seconds))
    return found


class _Values(dict[Symbol, int]):
    def __init__(self, chosen: Mapping[str, int]) -> None:
        super().__init__()
        self.chosen = chosen

    def __missing__(self, symbol: Symbol) -> int:
        return self.chosen.get(symbol.name, symbol.upper)


def _value(size: Any, chosen: Mapping[str, int]) -> int:
    return _dims.evaluate(size, _Values(chosen))

"""A program as text, for people: methods, inputs and outputs, operators, delegates."""

from __future__ import annotations

from collections import Counter

from purevk.plain_text import printable
from purevk.pte.program import Program
from purevk.pte.types import (
    VULKAN_BACKEND,
    Delegate,
    DelegateCall,
    ExecutionPlan,
    KernelCall,
    ShapeDynamism,
    Tensor,
)
from purevk.pte.vkgraph import VkGraph, VkTensor

_MARK = {
    ShapeDynamism.STATIC: "",
    ShapeDynamism.BOUNDED: " (bounds)",
    ShapeDynamism.UNBOUNDED: " (no bounds)",
}


def describe(program: Program) -> str:
    """Several lines about a program: each method with its inputs and outputs (dtype, sizes, whether
    these are bounds), how many operators run on the CPU and in each delegate, and which; the named
    data and the data files.

    Raises:
        FileFormatError: the blob of a Vulkan delegate is damaged.
    """
    lines = [f"{program.name}: {program.source.size} bytes, {_count(len(program.plans), 'method')}"]
    for plan in program.plans:
        lines += _plan(program, plan)
    if program.named:
        size = sum(program.segments[index].size for index in set(program.named.values()))
        lines.append(f"named data: {_count(len(program.named), 'key')}, {size} bytes")
    for file in program.data_files:
        size = sum(entry.size for entry in file.entries.values())
        lines.append(f"data file {file.name}: {_count(len(file.entries), 'key')}, {size} bytes")
    return printable("\n".join(lines))


def _plan(program: Program, plan: ExecutionPlan) -> list[str]:
    calls = [call for chain in plan.chains for call in chain.instructions]
    kernels = Counter(
        str(plan.operators[call.op_index]) for call in calls if isinstance(call, KernelCall)
    )
    delegated = sum(isinstance(call, DelegateCall) for call in calls)
    constants = sum(isinstance(value, Tensor) and value.is_constant for value in plan.values)
    lines = [
        f"method {plan.name!r}: {len(plan.values)} values, {_count(constants, 'constant')}, "
        f"{_count(len(calls), 'instruction')} ({_count(kernels.total(), 'CPU operator')}, "
        f"{_count(delegated, 'delegate call')}), arenas of {list(plan.arena_sizes[1:])} bytes"
    ]
    for label, indices in (("input", plan.inputs), ("output", plan.outputs)):
        lines += [
            f"  {label} {number}: {_value(plan.values[index])}"
            for number, index in enumerate(indices)
        ]
    if kernels:
        lines.append(f"  on the CPU: {_tally(kernels)}")
    for number, delegate in enumerate(plan.delegates):
        lines += _delegate(program, number, delegate)
    return lines


def _delegate(program: Program, number: int, delegate: Delegate) -> list[str]:
    blob = program.delegate_data(delegate)
    head = f"  delegate {number}: {delegate.id}, {len(blob)} bytes"
    if delegate.id != VULKAN_BACKEND:
        return [head]
    graph = program.vulkan_graph(delegate)
    size = sum(constant.length for constant in graph.constants)
    return [
        f"{head}, {_count(len(graph.chain), 'operator')}, {_count(len(graph.constants), 'constant')} of {size} bytes",
        *_ends(graph),
        f"    operators: {_tally(Counter(call.name for call in graph.chain))}",
    ]


def _ends(graph: VkGraph) -> list[str]:
    return [
        f"    {label}: {', '.join(_value(graph.values[index]) for index in ids) or 'none'}"
        for label, ids in (("inputs", graph.input_ids), ("outputs", graph.output_ids))
    ]


def _value(value: object) -> str:
    if isinstance(value, Tensor):
        order = (
            ""
            if value.dim_order == tuple(range(len(value.sizes)))
            else f" dim order {list(value.dim_order)}"
        )
        return f"{value.dtype_name}{list(value.sizes)}{order}{_MARK[value.dynamism]}"
    if isinstance(value, VkTensor):
        return f"{value.dtype.name if value.dtype else 'unset'}{list(value.dims)}"
    return repr(value)


def _tally(names: Counter[str]) -> str:
    return (
        ", ".join(
            f"{name} x{count}" if count > 1 else name for name, count in sorted(names.items())
        )
        or "none"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

"""Which of an instruction's arguments it reads, and which it writes."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.frontends.executorch.names import is_out_variant
from purevk.pte import types as P


def kernel_outputs(plan: P.ExecutionPlan, args: Sequence[int]) -> list[int]:
    """The values that a kernel writes: its out arguments. If there are several, the plan repeats
    them as a list at the end."""
    last = plan.values[args[-1]]
    if isinstance(last, P.TensorList):
        return list(last.items)
    return [args[-1]]


def kernel_inputs(
    plan: P.ExecutionPlan, operator: P.Operator, args: Sequence[int]
) -> Sequence[int]:
    """The arguments of a kernel without its outputs at the end, which may be given twice."""
    return args[: len(args) - _trailing(plan, operator, args)]


def _trailing(plan: P.ExecutionPlan, operator: P.Operator, args: Sequence[int]) -> int:
    """How many arguments at the end are not inputs."""
    last, outputs = plan.values[args[-1]], kernel_outputs(plan, args)
    out = is_out_variant(operator.name, operator.overload)
    if isinstance(last, P.TensorList):
        own = 0
        while own < len(outputs) and args[len(args) - 2 - own] == outputs[len(outputs) - 1 - own]:
            own += 1
        # An out argument that is itself a list (split, unbind) is given twice.
        repeated = int(own == 0 and len(args) > 1 and args[-2] == args[-1])
        return 1 + own + repeated
    count = 1
    while out and len(args) > count and args[-1 - count] == args[-1]:
        count += 1
    return count


def kernel_writes(plan: P.ExecutionPlan, instruction: P.Instruction) -> Sequence[int]:
    """The values that an instruction writes. Of delegate calls: see `DelegateCalls`."""
    match instruction:
        case P.KernelCall(op_index, args):
            operator = plan.operators[op_index]
            if operator.name == "executorch_prim::et_copy_index":
                return args[:1]
            return kernel_outputs(plan, args)
        case P.MoveCall(_, target):
            return (target,)
    return ()


def read_numbers(plan: P.ExecutionPlan) -> set[int]:
    """The values that something reads. The exporter made an integer input part of the graph if
    nothing reads it."""
    written = set(plan.outputs)
    for chain in plan.chains:
        for call in chain.instructions:
            match call:
                case P.KernelCall(_, args) | P.DelegateCall(_, args):
                    written |= set(args)
                case P.MoveCall(source, _):
                    written.add(source)
                case P.JumpFalse(condition, _):
                    written.add(condition)
    for value in plan.values:
        if isinstance(value, P.BoxedIntList):
            written |= set(value.items)
    return written

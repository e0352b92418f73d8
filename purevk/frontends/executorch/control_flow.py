"""The jumps in a method's instructions, as the choices and loops that an exporter wrote them
for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from purevk.errors import UnsupportedProgramError
from purevk.pte import program as P
from purevk.pte import values as V


@dataclass(frozen=True)
class Choice:
    """Steps that run if value `condition` is true, and others that run if not. `first` to `last`
    are its instructions."""

    condition: int
    true: tuple[Step, ...]
    false: tuple[Step, ...]
    first: int
    last: int


@dataclass(frozen=True)
class Loop:
    """Steps that run for each index along dim 0 of tensors: `counter` counts them, `length` says
    how many there are."""

    steps: tuple[Step, ...]
    counter: int
    length: int
    first: int
    last: int


Step = int | Choice | Loop  # a number is that of an instruction


def structure(plan: P.ExecutionPlan, where: str) -> tuple[Step, ...]:
    """The instructions of a method's chain without its jumps.

    Raises:
        UnsupportedProgramError: a jump that is neither a choice nor a loop with a counter.
    """
    return _Structure(plan, where).steps(0, len(plan.chains[0].instructions))


def instructions_of(steps: Sequence[Step]) -> Iterator[int]:
    """The numbers of all instructions in steps, those that read a choice's condition included."""
    for step in steps:
        if isinstance(step, int):
            yield step
        elif isinstance(step, Choice):
            yield step.first
            yield from instructions_of((*step.true, *step.false))
        else:
            yield from instructions_of(step.steps)


class _Structure:
    def __init__(self, plan: P.ExecutionPlan, where: str) -> None:
        self.plan, self.where = plan, where
        self.instructions = plan.chains[0].instructions

    def steps(self, first: int, last: int) -> tuple[Step, ...]:
        found: list[Step] = []
        at = first
        while at < last:
            end = self._end_of_loop(at, last)
            if end is not None:
                found.append(self._loop(at, end))
                at = end + 1
            elif isinstance(self.instructions[at], P.JumpFalse):
                choice = self._choice(at, last)
                found.append(choice)
                at = choice.last + 1
            else:
                found.append(at)
                at += 1
        return tuple(found)

    def _end_of_loop(self, first: int, last: int) -> int | None:
        """The jump back to an instruction, the last one if there are several."""
        for at in range(last - 1, first, -1):
            jump = self.instructions[at]
            if isinstance(jump, P.JumpFalse) and jump.destination == first:
                return at
        return None

    def _loop(self, first: int, last: int) -> Loop:
        """What an exporter writes: ...; counter += 1; done = counter == length; jump back unless
        done."""
        add, compare = (self._kernel(at) for at in (last - 2, last - 1))
        done = self.instructions[last].condition
        if add is None or compare is None or last - 2 < first:
            self._refuse(last)
        counter, step, target = add[1][:3] if len(add[1]) == 3 else (-1, -1, -2)
        by_one = isinstance(self.plan.values[step], V.Int) and self.plan.values[step].value == 1
        if add[0] != "executorch_prim::add" or counter != target or not by_one:
            self._refuse(last)
        if compare[0] != "executorch_prim::eq" or compare[1][0] != counter or compare[1][2] != done:
            self._refuse(last)
        return Loop(self.steps(first, last - 2), counter, compare[1][1], first, last)

    def _choice(self, at: int, last: int) -> Choice:
        """Jump to the other steps unless the condition is true; the first ones end with a jump over
        the others, if there are others."""
        jump = self.instructions[at]
        middle = jump.destination
        if not at < middle <= last:
            self._refuse(at)
        leave = self.instructions[middle - 1]
        if middle - 1 > at and isinstance(leave, P.JumpFalse) and self._is_false(leave.condition):
            end = leave.destination
            if not middle <= end <= last:
                self._refuse(middle - 1)
            return Choice(
                jump.condition, self.steps(at + 1, middle - 1), self.steps(middle, end), at, end - 1
            )
        return Choice(jump.condition, self.steps(at + 1, middle), (), at, middle - 1)

    def _is_false(self, number: int) -> bool:
        value = self.plan.values[number]
        return isinstance(value, V.Bool) and not value.value

    def _kernel(self, at: int) -> tuple[str, tuple[int, ...]] | None:
        call = self.instructions[at]
        return (
            (self.plan.operators[call.op_index].name, call.args)
            if isinstance(call, P.KernelCall)
            else None
        )

    def _refuse(self, at: int) -> None:
        raise UnsupportedProgramError(
            "control flow cannot be run",
            where=self.where,
            why=f"instruction {at} is a jump of a form that no exporter writes",
            next="export the model again, with ExecuTorch 1.5 or later",
        )


class Uses:
    """Which values instructions read and write.

    Args:
        plan: the method.
        outputs_of: gives the numbers of the values that an instruction writes.
    """

    def __init__(self, plan: P.ExecutionPlan, outputs_of: Callable[[Any], Sequence[int]]) -> None:
        self.plan = plan
        self.touched: list[frozenset[int]] = []
        self.written: list[frozenset[int]] = []
        for instruction in plan.chains[0].instructions:
            match instruction:
                case P.KernelCall() | P.DelegateCall():
                    args: Sequence[int] = instruction.args
                case P.MoveCall():
                    args = (instruction.source, instruction.target)
                case P.JumpFalse():
                    args = (instruction.condition,)
                case _:
                    args = ()
            self.touched.append(frozenset(self._flat(args)))
            self.written.append(frozenset(outputs_of(instruction)))
        self.ever_written = frozenset().union(*self.written)

    def _flat(self, numbers: Sequence[int]) -> Iterator[int]:
        for number in numbers:
            yield number
            value = self.plan.values[number] if number >= 0 else None
            if isinstance(value, (P.TensorList, P.OptionalTensorList, P.BoxedIntList)):
                yield from self._flat(value.items)

    def touched_by(self, instructions: Sequence[int]) -> set[int]:
        return set().union(*(self.touched[at] for at in instructions))

    def written_by(self, instructions: Sequence[int]) -> set[int]:
        return set().union(*(self.written[at] for at in instructions))

    def wanted_outside(self, first: int, last: int) -> set[int]:
        """The values that instructions other than `first` to `last` touch, or that the method
        returns; also by the addresses of those that nobody writes."""
        others = [at for at in range(len(self.touched)) if not first <= at <= last]
        wanted = self.touched_by(others) | set(self._flat(self.plan.outputs))
        addresses = {
            address_of(self.plan.values[n]) for n in wanted if n >= 0 and n not in self.ever_written
        } - {None}
        if addresses:
            wanted |= {n for n in self.ever_written if address_of(self.plan.values[n]) in addresses}
        return wanted


def address_of(value: Any) -> tuple[int, int] | None:
    """Where in the arenas a tensor lies."""
    if isinstance(value, P.Tensor) and value.allocation is not None:
        return value.allocation.memory_id, value.allocation.offset
    return None

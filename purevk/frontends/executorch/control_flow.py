"""Turns the jump instructions of a method back into choices and loops."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from purevk.errors import UnsupportedProgramError
from purevk.pte import types as P
from purevk.pte import values as V


class Choice(NamedTuple):
    """Steps that run if the value `condition` is true, and steps that run if it is false.

    Attributes:
        first, last: its first and its last instruction.
    """

    condition: int
    true: tuple[Step, ...]
    false: tuple[Step, ...]
    first: int
    last: int


class Loop(NamedTuple):
    """Steps that run once for each index along dim 0 of tensors.

    Attributes:
        counter: the value that holds the index.
        length: the value that holds the number of iterations.
        first, last: its first and its last instruction.
    """

    steps: tuple[Step, ...]
    counter: int
    length: int
    first: int
    last: int


Step = int | Choice | Loop  # an integer is the number of an instruction


def structure(plan: P.ExecutionPlan, where: str) -> tuple[Step, ...]:
    """The instructions of a method, with choices and loops instead of jumps.

    Raises:
        UnsupportedProgramError: a jump belongs neither to a choice nor to a loop with a counter.
    """
    return _Structure(plan, where).steps(0, len(plan.chains[0].instructions))


def instructions_of(steps: Sequence[Step]) -> Iterator[int]:
    """The numbers of all instructions in steps, and of the jumps that read conditions."""
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
        self.jumps: dict[int, list[int]] = {}  # to an instruction, in their order
        for at, instruction in enumerate(self.instructions):
            if isinstance(instruction, P.JumpFalse):
                self.jumps.setdefault(instruction.destination, []).append(at)

    def steps(self, first: int, last: int) -> tuple[Step, ...]:
        found: list[Step] = []
        at = first
        while at < last:
            end = self._end_of_loop(at, last)
            if end is not None:
                found.append(self._loop(at, end))
                at = end + 1
            elif isinstance(jump := self.instructions[at], P.JumpFalse):
                choice = self._choice(jump, at, last)
                found.append(choice)
                at = choice.last + 1
            else:
                found.append(at)
                at += 1
        return tuple(found)

    def _end_of_loop(self, first: int, last: int) -> int | None:
        """The jump back to an instruction, the last one if there are several."""
        jumps = self.jumps.get(first, ())
        before = bisect.bisect_left(jumps, last)
        return jumps[before - 1] if before and jumps[before - 1] > first else None

    def _loop(self, first: int, last: int) -> Loop:
        """Exporters end a loop with: counter += 1; done = counter == length; jump back unless
        done."""
        add = self._arguments(last - 2, "executorch_prim::add")
        compare = self._arguments(last - 1, "executorch_prim::eq")
        jump = self.instructions[last]
        if last - 2 < first or len(add) != 3 or len(compare) != 3:
            self._refuse(last)
        if not isinstance(jump, P.JumpFalse):
            self._refuse(last)
        counter, step, target = add
        left, length, done = compare
        increment = self.plan.values[step]
        if not isinstance(increment, V.Int) or increment.value != 1 or counter != target:
            self._refuse(last)
        if left != counter or done != jump.condition:
            self._refuse(last)
        return Loop(self.steps(first, last - 2), counter, length, first, last)

    def _choice(self, jump: P.JumpFalse, at: int, last: int) -> Choice:
        """Exporters begin a choice with a jump to the steps for false. If there are any, the steps
        for true end with a jump over them."""
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

    def _arguments(self, at: int, operator: str) -> tuple[int, ...]:
        """The arguments of an instruction that calls an operator; empty if it does not."""
        call = self.instructions[at]
        if isinstance(call, P.KernelCall) and self.plan.operators[call.op_index].name == operator:
            return call.args
        return ()

    def _refuse(self, at: int) -> NoReturn:
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

    def __init__(
        self, plan: P.ExecutionPlan, outputs_of: Callable[[P.Instruction], Sequence[int]]
    ) -> None:
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
        self.ever_written = {number for numbers in self.written for number in numbers}
        self._count = Counter(self._marks([*self.touched, set(self._flat(plan.outputs))]))

    def _flat(self, numbers: Sequence[int]) -> Iterator[int]:
        for number in numbers:
            yield number
            value = self.plan.values[number] if number >= 0 else None
            if isinstance(value, (P.TensorList, P.OptionalTensorList, P.BoxedIntList)):
                yield from self._flat(value.items)

    def touched_by(self, instructions: Sequence[int]) -> set[int]:
        return {number for at in instructions for number in self.touched[at]}

    def written_by(self, instructions: Sequence[int]) -> set[int]:
        return {number for at in instructions for number in self.written[at]}

    def wanted_outside(self, numbers: Collection[int], first: int, last: int) -> list[int]:
        """Those of the values that other instructions than `first` to `last` touch, or that the
        method returns. A value that nobody writes also counts for those at its address."""
        inside = Counter(self._marks(self.touched[first : last + 1]))
        return [
            number
            for number in numbers
            if self._count[number] > inside[number]
            or any(self._count[mark] > inside[mark] for mark in self._address(number))
        ]

    def _address(self, number: int) -> tuple[tuple[int, int], ...]:
        address = address_of(self.plan.values[number]) if number >= 0 else None
        return () if address is None else (address,)

    def _marks(self, touched: Iterable[Collection[int]]) -> Iterator[int | tuple[int, int]]:
        """What instructions touch: values, and the addresses of those that nobody writes."""
        for numbers in touched:
            yield from numbers
            for number in numbers:
                if number not in self.ever_written:
                    yield from self._address(number)


def address_of(value: P.EValue) -> tuple[int, int] | None:
    """The arena of a tensor and the offset in it; None for what has no address."""
    if isinstance(value, P.Tensor) and value.allocation is not None:
        return value.allocation.memory_id, value.allocation.offset
    return None

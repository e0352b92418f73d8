"""int64 of functions of scores and masks as int32, where ranges of the positions say that it fits.

Eager torch has positions of int64, so that no product or sum of them wraps around.
"""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Arg
from purevk.ops.attention.functions import FULL, GATHER, KEY, Functions, FunctionStep, Operand

_Range = tuple[int, int]
_INT32 = (-(2**31), 2**31 - 1)
_TYPES: dict[DType, _Range] = {
    DType.bool: (0, 1),
    DType.uint8: (0, 255),
    DType.int8: (-128, 127),
    DType.int16: (-(2**15), 2**15 - 1),
    DType.int32: _INT32,
    DType.int64: (-(2**63), 2**63 - 1),
}

_BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")


def narrowed(functions: Functions, limits: Sequence[int]) -> Functions:
    """The functions with int32 in place of int64 wherever it has the same values.

    Args:
        limits: the largest batch, head, query and key.
    """
    return _Narrower(functions, limits).run()


def _fits(range: _Range) -> bool:
    return _INT32[0] <= range[0] and range[1] <= _INT32[1]


class _Narrower:
    def __init__(self, functions: Functions, limits: Sequence[int]) -> None:
        self.functions = functions
        self.steps: list[FunctionStep] = []
        self.made = list(range(KEY + 1))  # the new number of each operand
        self.ranges: list[_Range] = [_INT32, *((0, max(limit, 0)) for limit in limits)]
        self._wide: dict[int, int] = {}

    def run(self) -> Functions:
        for step in self.functions.steps:
            found = self._range(step) if step.dtype in _TYPES else _INT32
            narrow = step.dtype is DType.int64 and _fits(found) and step.op != GATHER
            # In int32 an operator computes from numbers that fit.
            keeps = (narrow or step.dtype is not DType.int64) and all(
                _fits((arg, arg)) for arg in step.args if isinstance(arg, int)
            )
            args = tuple(self._argument(arg, keeps) for arg in step.args)
            dtype = DType.int32 if narrow else step.dtype
            if narrow:
                args = tuple(DType.int32 if arg is DType.int64 else arg for arg in args)
            self.ranges.append(found)
            self.made.append(self._append(FunctionStep(step.op, dtype, args)))
        score, mask = (
            None if each is None else self.made[each]
            for each in (self.functions.score, self.functions.mask)
        )
        return Functions(tuple(self.steps), score, mask, DType.int32)

    def _append(self, step: FunctionStep) -> int:
        self.steps.append(step)
        return KEY + len(self.steps)

    def _argument(self, arg: Arg | Operand, keeps: bool) -> Arg | Operand:
        if not isinstance(arg, Operand):
            return arg
        number = self.made[arg.number]
        declared = self.functions.dtype(arg.number)
        now = DType.int32 if number <= KEY else self.steps[number - KEY - 1].dtype
        if keeps or declared is not DType.int64 or now is DType.int64:
            return Operand(number)
        if number not in self._wide:
            cast = (Operand(number), DType.int64, None, None, None, False, None)
            step = FunctionStep("aten._to_copy.default", DType.int64, cast)
            self._wide[number] = self._append(step)
        return Operand(self._wide[number])

    def _of(self, arg: Arg | Operand) -> _Range | None:
        """The range of an integer argument."""
        if isinstance(arg, Operand):
            whole = self.functions.dtype(arg.number) in _TYPES
            return self.ranges[arg.number] if whole else None
        return (int(arg), int(arg)) if isinstance(arg, int) else None

    def _range(self, step: FunctionStep) -> _Range:
        """Of the integers that a step gives."""
        whole = _TYPES[step.dtype]
        found = self._computed(step)
        return found if found and whole[0] <= found[0] and found[1] <= whole[1] else whole

    def _computed(self, step: FunctionStep) -> _Range | None:
        if step.op == FULL:
            return self._of(step.args[0])
        if "." not in step.op:
            return None
        name = step.op.split(".")[1]
        ranges = [self._of(arg) for arg in step.args]
        if name == "where":
            ranges = ranges[1:]
        one, other = (*ranges, None, None)[:2]
        if one is None:
            return None
        if name == "_to_copy":
            return one
        if name == "neg":
            return -one[1], -one[0]
        if name == "abs":
            ends = (abs(one[0]), abs(one[1]))
            return (0 if one[0] <= 0 <= one[1] else min(ends)), max(ends)
        if name in _BITWISE and all(_fits(each) for each in (one, other or one)):
            return _INT32
        if other is None:
            return None
        if name in ("add", "sub") and step.args[2] == 1:
            low, high = other if name == "add" else (-other[1], -other[0])
            return one[0] + low, one[1] + high
        if name == "mul":
            ends4 = [a * b for a in one for b in other]
            return min(ends4), max(ends4)
        if name == "minimum":
            return min(one[0], other[0]), min(one[1], other[1])
        if name == "maximum":
            return max(one[0], other[0]), max(one[1], other[1])
        if name == "where":
            return min(one[0], other[0]), max(one[1], other[1])
        rounds = name == "floor_divide" or (name == "div" and step.args[2] is not None)
        shifts = name == "bitwise_right_shift" and other[0] >= 0
        if shifts or (rounds and other[0] > 0):
            return min(one[0], 0), max(one[1], 0)
        if name == "remainder" and other[0] > 0:
            return 0, other[1] - 1
        return None

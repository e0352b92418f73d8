"""Ranges of queries and keys, followed through a mask: intervals of the integers in it, and whether its
conditions may and must hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from purevk.dtypes import DType
from purevk.ir import Arg, TensorType, Value
from purevk.lower.expression import Expression, ExpressionBuilder, Term, convert, literal
from purevk.ops.attention.functions import (
    FULL,
    INDICES,
    INPUTS,
    KEY,
    QUERY,
    SCORE,
    Functions,
    Operand,
)

_Truth = Term | bool
_COMPARISONS = ("ge", "gt", "le", "lt", "eq", "ne")
# Sums of so many coordinates have a range below 2**31, since a tensor has less than 2**28 rows.
_MOST_COORDINATES = 8


@dataclass(frozen=True)
class _Interval:
    """Bounds of an integer, and how many coordinates it is a sum of."""

    low: Term
    high: Term
    dtype: DType
    coordinates: int


class MaskRanges:
    """Follows ranges of queries and keys through functions."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self.builder = ExpressionBuilder()
        self.exact = True
        names = ("first_query", "last_query", "first_key", "last_key")
        self._corners = [
            self.builder.input(Value(name, TensorType(DType.int32, ())), DType.int32)
            for name in names
        ]
        self._uniforms: dict[int, Term] = {}
        # A step may read one step twice, which may do so too.
        self._truths: dict[int, tuple[_Truth, _Truth]] = {}
        self._intervals: dict[int, _Interval | None] = {}
        self._sure: _Truth = True
        self._varies = [number in (SCORE, QUERY, KEY) for number in range(len(INPUTS))]
        for step in functions.steps:
            read = [arg.number for arg in step.args if isinstance(arg, Operand)]
            self._varies.append(any(self._varies[number] for number in read))

    def bounds(self) -> tuple[Expression | None, list[int]]:
        """See `ScoreProgram.bounds`, and the operands that it reads."""
        if self.functions.mask is None:
            return None, []
        may, _ = self._truth(self.functions.mask)
        may = self._or(may, self._not(self._sure))
        if isinstance(may, bool):
            return None, []
        return self.builder.build([may]), list(self._uniforms)

    def _step(self, glsl: str, *operands: Term, dtype: DType = DType.bool) -> Term:
        return self.builder.step(glsl, operands, dtype)

    def _and(self, one: _Truth, other: _Truth) -> _Truth:
        if isinstance(one, bool):
            return other if one else False
        if isinstance(other, bool):
            return one if other else False
        return self._step("($0 && $1)", one, other)

    def _or(self, one: _Truth, other: _Truth) -> _Truth:
        return self._not(self._and(self._not(one), self._not(other)))

    def _not(self, one: _Truth) -> _Truth:
        return not one if isinstance(one, bool) else self._step("(!$0)", one)

    def _uniform(self, number: int) -> Term:
        if number not in self._uniforms:
            dtype = self.functions.dtype(number)
            value = Value(f"uniform{len(self._uniforms)}", TensorType(dtype, ()))
            self._uniforms[number] = self.builder.input(value, dtype)
        return self._uniforms[number]

    def _truth(self, number: int) -> tuple[_Truth, _Truth]:
        """Whether a condition may hold, and whether it must hold."""
        if number not in self._truths:
            self._truths[number] = self._follow_truth(number)
        return self._truths[number]

    def _follow_truth(self, number: int) -> tuple[_Truth, _Truth]:
        step = self.functions.step(number)
        if self.functions.dtype(number) is DType.bool and step is not None:
            name = step.op.split(".")[1] if "." in step.op else step.op
            if step.op == FULL:
                return bool(step.args[0]), bool(step.args[0])
            if not self._varies[number]:
                return self._uniform(number), self._uniform(number)
            operands = [arg.number for arg in step.args if isinstance(arg, Operand)]
            if name in ("bitwise_and", "logical_and", "bitwise_or", "logical_or") and all(
                self.functions.dtype(operand) is DType.bool for operand in operands
            ):
                join = self._and if name.endswith("and") else self._or
                if len(operands) == 2:
                    (may, must), (other_may, other_must) = map(self._truth, operands)
                    return join(may, other_may), join(must, other_must)
            if name in ("bitwise_not", "logical_not") and (
                self.functions.dtype(operands[0]) is DType.bool
            ):
                may, must = self._truth(operands[0])
                return self._not(must), self._not(may)
            if name in _COMPARISONS:
                ranges = [self._interval(arg) for arg in step.args[:2]]
                if ranges[0] is not None and ranges[1] is not None:
                    return self._compared(name, ranges[0], ranges[1])
        self.exact = False
        return True, False

    def _compared(self, name: str, one: _Interval, other: _Interval) -> tuple[_Truth, _Truth]:
        if name == "ne":
            may, must = self._compared("eq", one, other)
            return self._not(must), self._not(may)
        dtype = DType.int64 if DType.int64 in (one.dtype, other.dtype) else DType.int32
        low, high = self._wide(one.low, one.dtype, dtype), self._wide(one.high, one.dtype, dtype)
        first, last = (self._wide(each, other.dtype, dtype) for each in (other.low, other.high))
        if name == "eq":
            return (
                self._step("($0 <= $3 && $2 <= $1)", low, high, first, last),
                self._step("($0 == $1 && $2 == $3 && $0 == $2)", low, high, first, last),
            )
        sign = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}[name]
        text = f"($0 {sign} $1)"
        if sign[0] == ">":
            return self._step(text, high, first), self._step(text, low, last)
        return self._step(text, low, last), self._step(text, high, first)

    def _wide(self, term: Term, source: DType, target: DType) -> Term:
        text = convert("$0", source, target)
        return term if text == "$0" else self._step(text, term, dtype=target)

    def _interval(self, arg: Arg | Operand) -> _Interval | None:
        """Bounds of an integer; None if they are not known."""
        if isinstance(arg, int) and not isinstance(arg, bool):
            dtype = DType.int32 if -(2**31) < arg < 2**31 else DType.int64
            term = self._step(literal(arg, dtype), dtype=dtype)
            return _Interval(term, term, dtype, 0)
        if not isinstance(arg, Operand):
            return None
        if arg.number not in self._intervals:
            self._intervals[arg.number] = self._follow_interval(arg.number)
        return self._intervals[arg.number]

    def _follow_interval(self, number: int) -> _Interval | None:
        dtype = self.functions.dtype(number)
        if dtype not in INDICES:
            return None
        if not self._varies[number]:
            term = self._uniform(number)
            return _Interval(term, term, dtype, 0)
        if number in (QUERY, KEY):
            at = 2 * (number - QUERY)
            return _Interval(self._corners[at], self._corners[at + 1], dtype, 1)
        step = self.functions.step(number)
        if step is None or "." not in step.op:
            return None
        name = step.op.split(".")[1]
        ranges = [self._interval(arg) for arg in step.args[:2]]
        if not ranges or ranges[0] is None:
            return None
        if name == "_to_copy":
            low, high = (
                self._wide(each, ranges[0].dtype, dtype) for each in (ranges[0].low, ranges[0].high)
            )
            narrows = dtype is DType.int32 and ranges[0].dtype is DType.int64
            return None if narrows else replace(ranges[0], low=low, high=high, dtype=dtype)
        if name == "abs" and dtype is DType.int32:
            low = self._step(
                "max(0, max($0, -$1))", ranges[0].low, ranges[0].high, dtype=DType.int32
            )
            high = self._step("max(-$0, $1)", ranges[0].low, ranges[0].high, dtype=DType.int32)
            # -(-2**31) wraps around.
            sure = self._step("($0 > -2147483647)", ranges[0].low)
            self._sure = self._and(self._sure, sure)
            return _Interval(low, high, dtype, _MOST_COORDINATES)
        if len(ranges) < 2 or ranges[1] is None:
            return None
        if name in ("add", "sub") and step.args[2] == 1:
            return self._sum(ranges[0], ranges[1], dtype, "+" if name == "add" else "-")
        floors = name == "floor_divide" or (name == "div" and step.args[2:] == ("floor",))
        divisor = step.args[1]
        if floors and isinstance(divisor, int) and divisor > 0:
            ends = []
            for each in (ranges[0].low, ranges[0].high):
                end = self._wide(each, ranges[0].dtype, dtype)
                by = self._step(literal(divisor, dtype), dtype=dtype)
                ends.append(self._step("pv_floor_divide($0, $1)", end, by, dtype=dtype))
            return _Interval(ends[0], ends[1], dtype, ranges[0].coordinates)
        return None

    def _sum(self, one: _Interval, other: _Interval, dtype: DType, sign: str) -> _Interval | None:
        coordinates = one.coordinates + other.coordinates
        if coordinates > _MOST_COORDINATES:
            return None
        first, last = (other.low, other.high) if sign == "+" else (other.high, other.low)
        low, high = (
            self._step(
                f"($0 {sign} $1)",
                self._wide(mine, one.dtype, dtype),
                self._wide(its, other.dtype, dtype),
                dtype=dtype,
            )
            for mine, its in ((one.low, first), (one.high, last))
        )
        # Sums wrap around. Bounds of which only one has wrapped say nothing.
        self._sure = self._and(self._sure, self._step("($0 <= $1)", low, high))
        return _Interval(low, high, dtype, coordinates)

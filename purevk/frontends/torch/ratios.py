"""Float arithmetic on sizes, such as `n / 2 > 1.5` or `math.ceil(n / 3)`, as integer arithmetic.

Python rounds each step to the nearest double. The results here are exactly the same. A step whose
operands were rounded already is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from purevk.errors import UnsupportedProgramError
from purevk.ir import Dim, Guard, Size
from purevk.ir import dims as _dims
from purevk.ir.factors import scaled
from purevk.ir.relations import indicator

# Below this limit, rounding a fraction a/b to a double gives no integer, and no middle between two
# integers, unless the fraction is one.
_LARGEST = 2**51
_DIGITS = 2**20  # largest factor of a size that leaves all digits of the product in a double
_ROUNDED = ("FloorToInt", "CeilToInt", "TruncToInt", "RoundToInt")
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


@dataclass(frozen=True)
class Ratio:
    """The double that is nearest to above / below, where `below` is positive.

    Attributes:
        exact: the quotient is a double itself.
    """

    above: Size
    below: Size
    exact: bool = True


class Ratios:
    """Reads sympy expressions of floats over sizes.

    Args:
        size: gives the size for a sympy expression of integers.

    Attributes:
        limits: guards under which all values that count as exact are exact.
    """

    def __init__(self, size: Callable[[Any], Size]) -> None:
        self._size = size
        self.limits: list[Guard] = []

    def whole(self, expression: Any) -> Size:
        """An integer."""
        return self._size(expression)

    def rounded(self, expression: Any) -> Size:
        """An integer that `math.floor`, `ceil`, `trunc` or `round` gives."""
        kind = type(expression).__name__
        if kind in ("FloorToInt", "TruncToInt"):
            number = self._scaled(expression.args[0])
            if number is not None:
                return number
        ratio = self.read(expression.args[0])
        above, below = ratio.above, ratio.below
        if not _few_digits(above):
            raise _unknown(expression)
        if kind == "CeilToInt":
            return -((-above) // below)
        if kind == "RoundToInt":
            upper, twice = 2 * above + below, 2 * below
            number, remainder = upper // twice, upper % twice
            return number - indicator(remainder, "==", 0) * (number % 2)  # halves round to even
        if kind == "TruncToInt" and _dims.range_of(above)[0] < 0:
            negative = indicator(above, "<", 0)
            return above // below + negative * indicator(above % below, "!=", 0)
        return above // below

    def _scaled(self, expression: Any) -> Size | None:
        """A size times a float, rounded down; None: the expression is another one, or not known."""
        if type(expression).__name__ != "Mul" or len(expression.args) != 2:
            return None
        factor, size = sorted(expression.args, key=lambda factor_: not factor_.is_Float)
        if not factor.is_Float or type(size).__name__ != "ToFloat":
            return None
        return scaled(self._size(size.args[0]), float(factor))

    def compare(self, left: Any, op: str, right: Any) -> Iterator[Guard]:
        """The guards of a comparison of floats. All must hold."""
        first, two = self.read(left), self.read(right)
        if first.exact and two.exact:
            yield Guard(first.above * two.below, op, two.above * first.below, True)
        elif isinstance(two.above, int) and isinstance(two.below, int) and two.exact:
            yield from _against(first, op, Fraction(two.above, two.below))
        elif isinstance(first.above, int) and isinstance(first.below, int) and first.exact:
            yield from _against(two, _MIRRORED[op], Fraction(first.above, first.below))
        else:
            raise _unknown(f"{left} {op} {right}")

    def read(self, expression: Any) -> Ratio:
        """A float.

        Raises:
            UnsupportedProgramError: the result would depend on rounding.
        """
        kind = type(expression).__name__
        if expression.is_Float or kind in ("Float", "Half", "Rational"):
            number = Fraction(float(expression))
            return Ratio(number.numerator, number.denominator)
        if kind == "ToFloat":
            return self.read(expression.args[0])
        if kind == "FloatTrueDiv" and expression.args[1] in (1.0, -1.0):  # it rounds nothing
            ratio = self.read(expression.args[0])
            return replace(ratio, above=ratio.above * int(expression.args[1]))
        if kind in ("IntTrueDiv", "FloatTrueDiv"):
            one, two = map(self._exact, expression.args)
            return self._made(one.above * two.below, one.below * two.above)
        if kind in ("Mul", "Add") and not expression.is_integer:
            first, *others = expression.args
            ratio = self.read(first)
            for other_expression in others:
                one, two = self._kept(ratio, expression), self._exact(other_expression)
                if kind == "Mul":
                    ratio = self._made(one.above * two.above, one.below * two.below)
                else:
                    ratio = self._made(
                        one.above * two.below + two.above * one.below, one.below * two.below
                    )
            return ratio
        if not expression.is_integer:
            raise _unknown(expression)
        return self._made(self._size(expression), 1)

    def _exact(self, expression: Any) -> Ratio:
        return self._kept(self.read(expression), expression)

    @staticmethod
    def _kept(ratio: Ratio, expression: Any) -> Ratio:
        if not ratio.exact:
            raise _unknown(expression)
        return ratio

    def _made(self, above: Size, below: Size) -> Ratio:
        if isinstance(below, int) and below < 0:
            above, below = -above, -below
        if isinstance(below, int) and below == 0:
            raise _unknown("a division by 0")
        self._limit(Guard(below, ">", 0, True))
        few = _few_digits(above)
        if few and isinstance(above, Dim):
            self._limit(Guard(above, "<", _LARGEST, True))
            if _dims.range_of(above)[0] < 0:
                self._limit(Guard(above, ">", -_LARGEST, True))
        whole = isinstance(below, int) and below & (below - 1) == 0
        return Ratio(above, below, few and whole)

    def _limit(self, guard: Guard) -> None:
        holds = _dims.settled(guard.left, guard.op, guard.right)
        if holds is None:
            self.limits.append(guard)
        elif not holds:
            raise _unknown(guard)


def _few_digits(size: Size) -> bool:
    if isinstance(size, int):
        return abs(size) < _LARGEST
    return all(abs(factor) <= _DIGITS for _, factor in size.terms)


def _against(ratio: Ratio, op: str, number: Fraction) -> Iterator[Guard]:
    """The guards of a comparison with a number, for a float that may have been rounded. They compare
    with the ends of the interval that is rounded to the number."""
    double = float(number)
    if Fraction(double) != number:
        raise _unknown(number)
    ends = [
        (Fraction(double) + Fraction(math.nextafter(double, towards))) / 2
        for towards in (-math.inf, math.inf)
    ]
    belongs = [end.numerator / end.denominator == double for end in ends]

    def side(at: int, relation: str) -> Guard:
        end = ends[at]
        return Guard(ratio.above * end.denominator, relation, ratio.below * end.numerator, True)

    if op in (">=", "=="):
        yield side(0, ">=" if belongs[0] else ">")
    if op in ("<=", "=="):
        yield side(1, "<=" if belongs[1] else "<")
    if op == ">":
        yield side(1, ">" if belongs[1] else ">=")
    if op == "<":
        yield side(0, "<" if belongs[0] else "<=")
    if op == "!=":
        raise _unknown(f"!= {double}")


def is_rounded(expression: Any) -> bool:
    """Whether an expression is an integer made from a float."""
    return type(expression).__name__ in _ROUNDED


def _unknown(what: Any) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"{what} cannot be followed",
        why="it is float arithmetic on sizes that rounds several times",
    )

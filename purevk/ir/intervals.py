"""Smallest and largest results of functions of integers that lie within bounds."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

from purevk.errors import InputError

Range = tuple[int, int]  # both included


def of_quotient(left: Range, right: Range) -> Range:
    # The quotient is largest and smallest at the ends of the divisor's range and next to 0.
    divisors = [y for y in (*right, -1, 1) if y and right[0] <= y <= right[1]]
    corners = [x // y for x in left for y in divisors]
    return (min(corners), max(corners)) if corners else (0, 0)


def of_remainder(left: Range, right: Range) -> Range:
    (a, b), (c, d) = left, right
    return min(c + 1, 0), min(b, d - 1) if a >= 0 and c > 0 else max(d - 1, 0)


def of_power(base: Range, exponent: Range) -> Range:
    first, last = max(exponent[0], 0), max(exponent[1], 0)
    most = max(power(max(map(abs, base)), last), 1)
    return (-most if base[0] < 0 else power(base[0], first if base[0] else 1)), most


def of_bits(left: Range, right: Range) -> Range:
    """Of `&` and `|`: within as many bits as the operands have."""
    most = (1 << max(abs(end).bit_length() for end in (*left, *right))) - 1
    return (0 if left[0] >= 0 and right[0] >= 0 else -most - 1), most


def power(base: int, exponent: int) -> int:
    """`base ** exponent`. Exponents above 64 count as 64: no program has such a number."""
    if exponent < 0:
        raise InputError(
            f"{base} ** {exponent} is no integer", next="keep exponents and shifts above -1"
        )
    return int(base ** min(exponent, 64))


class Function(NamedTuple):
    """A function of two integers, and its range from those of its operands."""

    of_integers: Callable[[int, int], int]
    range_of: Callable[[Range, Range], Range]


FUNCTIONS = {
    "//": Function(operator.floordiv, of_quotient),
    "%": Function(operator.mod, of_remainder),
    "min": Function(min, lambda left, right: (min(left[0], right[0]), min(left[1], right[1]))),
    "max": Function(max, lambda left, right: (max(left[0], right[0]), max(left[1], right[1]))),
    "**": Function(power, of_power),
    "&": Function(operator.and_, of_bits),
    "|": Function(operator.or_, of_bits),
}

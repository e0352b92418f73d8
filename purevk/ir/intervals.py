"""Smallest and largest results of functions of integers that lie within bounds."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from purevk.errors import InputError
from purevk.ir import polynomials

Range = tuple[int, int]  # both included
_LARGE = 256  # bits that no number of a program has


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
    most = max(_large_power(max(map(abs, base)), last), 1)
    return (-most if base[0] < 0 else _large_power(base[0], first if base[0] else 1)), most


def of_bits(left: Range, right: Range) -> Range:
    """Of `&` and `|`: within as many bits as the operands have."""
    most = (1 << max(abs(end).bit_length() for end in (*left, *right))) - 1
    return (0 if left[0] >= 0 and right[0] >= 0 else -most - 1), most


def _large_power(base: int, exponent: int) -> int:
    """`base ** exponent`, neither negative; where that is larger than any number of a program, another
    one that is: an exponent may be a number without a bound."""
    most = max(_LARGE // max(base.bit_length(), 1), 2)
    return int(polynomials.bounded(base) ** min(exponent, most))


def power(base: int, exponent: int) -> int:
    """`base ** exponent`. Raises `ShapeError` if it has more than `polynomials.MOST_BITS` bits."""
    if exponent < 0:
        raise InputError(
            f"{base} ** {exponent} is no integer", next="keep exponents and shifts above -1"
        )
    if abs(base) > 1:
        polynomials.bounded(1 << min((abs(base).bit_length() - 1) * exponent, 1 << 20))
    return int(base ** (exponent if abs(base) > 1 else exponent % 2 or min(exponent, 2)))


def of_sum(
    terms: Iterable[polynomials.Term],
    range_of: Callable[[Any], Range],
    quotient: Callable[[Any], tuple[Iterable[polynomials.Term], int] | None],
) -> Range:
    """Of a sum of products of atoms.

    Args:
        terms: the products.
        range_of: of an atom.
        quotient: dividend and divisor of an atom that is a floor division by a positive number.
    """
    terms = tuple(terms)
    low = high = 0
    for atoms, factor in terms:
        a, b = factor, factor
        for atom in atoms:
            c, d = range_of(atom)
            corners = (a * c, a * d, b * c, b * d)
            a, b = polynomials.bounded(min(corners)), polynomials.bounded(max(corners))
        low, high = low + a, high + b
    if sum(bool(atoms) for atoms, _ in terms) < 2:
        return low, high
    # In `x - x // 2` the dividends cancel: floor(x / n) is (x - r) / n with 0 <= r < n.
    quotients = [quotient(atoms[0]) if len(atoms) == 1 else None for atoms, _ in terms]
    scale = math.lcm(*(found[1] for found in quotients if found is not None))
    if scale == 1 or scale > 1 << 64:
        return low, high
    scaled: dict[tuple[Any, ...], int] = {}
    least = most = 0
    for (atoms, factor), found in zip(terms, quotients):
        dividend, divisor = found or ([(atoms, 1)], 1)
        each = factor * scale // divisor
        scaled = polynomials.add(scaled.items(), ((key, each * n) for key, n in dividend))
        rest = -each * (divisor - 1)
        least, most = least + min(rest, 0), most + max(rest, 0)
    whole = of_sum(((key, n) for key, n in scaled.items() if n), range_of, quotient)
    return max(low, -(-(whole[0] + least) // scale)), min(high, (whole[1] + most) // scale)


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

"""Sizes times a float, rounded down as Python's doubles are: `int(size * 1.7)`."""

from __future__ import annotations

import math
from fractions import Fraction

from purevk.ir.dims import Size, bitwise_or, maximum, range_of
from purevk.ir.relations import indicator

_DIGITS = 2**20  # of a numerator or denominator, so that its product with a size is below 2**51


def scaled(size: Size, factor: float) -> Size | None:
    """floor(size * factor), where the product is rounded to a double first.

    None: `size` is known only at a call, and no fraction gives nearly the same for all sizes below
    2**31.
    The bounds of the size do not matter, since a program can be loaded with larger ones.

    Let p / q be the fraction that stands for the factor. If size * p / q is no integer, it is 1 / q
    away from one, and rounding changes it by less. If it is an integer k, the double nearest to
    size * factor is below k only if the factor is below p / q by more than 2**-54 of it, half of the
    least distance of doubles. See `_lost` for such factors, as 0.7.
    """
    if isinstance(size, int):
        return math.floor(size * factor)
    if not 0 < factor < _DIGITS or range_of(size)[0] < 0:
        return None
    exact = Fraction(factor)
    found = exact.limit_denominator(int(_DIGITS / max(1.0, factor)))
    if float(found) != factor:
        return None
    whole = size * found.numerator // found.denominator
    short = 1 - exact / found
    if short <= Fraction(1, 2**54):
        return whole
    lost = _lost(whole, Fraction(1, 2**53) / short)
    return maximum(whole - lost * indicator(size % found.denominator, "==", 0), 0)


def _lost(number: Size, least: Fraction) -> Size:
    """1 if the double nearest to a number slightly below this integer is below it, else 0.

    Let 2**e be the largest power of 2 up to the integer. Doubles below the integer are 2**(e - 52)
    apart, and half as far below 2**e itself. So it is lost from `least` * 2**e on, and at 2**e.
    """
    ones = number
    for bits in (1, 2, 4, 8, 16, 32):
        ones = bitwise_or(ones, ones // 2**bits)
    power = (ones + 1) // 2
    beyond = indicator(number * least.denominator, ">", power * least.numerator)
    return maximum(beyond, indicator(number, "==", power) * indicator(number, ">", 0))

"""Sizes times a float, rounded down as Python's doubles are: `int(size * 1.7)`."""

from __future__ import annotations

import math
from fractions import Fraction

from purevk.ir.dims import Size, range_of

_DIGITS = 2**20  # of a numerator or denominator, so that its product with a size is below 2**51


def scaled(size: Size, factor: float) -> Size | None:
    """floor(size * factor), where the product is rounded to a double first.

    None: `size` is known only at a call, and no fraction gives the same for all sizes below 2**31.
    The bounds of the size do not matter, since a program can be loaded with larger ones.

    Let p / q be the fraction that stands for the factor. If size * p / q is no integer, it is 1 / q
    away from one, and rounding changes it by less. If it is an integer k, the double nearest to
    size * factor is below k only if the factor is below p / q by more than 2**-54 of it, half of the
    least distance of doubles.
    """
    if isinstance(size, int):
        return math.floor(size * factor)
    if not 0 < factor < _DIGITS or range_of(size)[0] < 0:
        return None
    exact = Fraction(factor)
    found = exact.limit_denominator(int(_DIGITS / max(1.0, factor)))
    if float(found) != factor or exact / found - 1 < Fraction(-1, 2**54):
        return None
    return size * found.numerator // found.denominator

"""Sizes times a float, rounded down as Python's doubles are: `int(size * 1.7)`."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from purevk.ir.dims import Size, range_of

_DIGITS = 2**20  # of a numerator or denominator, so that products with a size stay small integers
_CHECKED = 2**16  # sizes that are tried one by one


def scaled(size: Size, factor: float) -> Size | None:
    """floor(size * factor), where the product is rounded to a double first.

    None: `size` is known only at a call, and no fraction gives the same for all of its values.
    """
    if isinstance(size, int):
        return math.floor(size * factor)
    if not 0 < factor < _DIGITS:
        return None
    least, most = range_of(size)
    exact = Fraction(factor)
    for limit in (4096, int(_DIGITS / max(1.0, factor))):
        found = exact.limit_denominator(limit)
        if 0 < found.numerator <= _DIGITS and least >= 0 and _is_same(found, factor, most):
            return size * found.numerator // found.denominator
    return None


def _is_same(found: Fraction, factor: float, most: int) -> bool:
    """Whether a fraction and a float give the same for all sizes up to `most`.

    Few sizes are tried one by one: 90 * 0.7 is below 63. For more, let n be a size and p / q the
    fraction. Unless n * p / q is an integer, it is 1 / q away from one, which is more than rounding
    changes. If it is an integer k, the double nearest to n * factor is less than k only if the factor
    is less than p / q by more than 2**-54 of it, half of the least distance of doubles.
    """
    if most * max(found.numerator, found.denominator) >= 2**51:
        return False
    if most >= _CHECKED and Fraction(factor) / found - 1 < Fraction(-1, 2**54):
        return False
    if most >= _CHECKED and float(found) != factor:
        return False
    sizes = np.arange(min(most, _CHECKED) + 1)
    wanted = np.floor(sizes * factor).astype(np.int64)
    return bool(np.array_equal(wanted, sizes * found.numerator // found.denominator))

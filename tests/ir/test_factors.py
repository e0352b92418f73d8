"""Sizes times floats against Python's own arithmetic."""

from __future__ import annotations

import math

import pytest

from purevk.ir import Dim, Symbol
from purevk.ir import dims as _dims
from purevk.ir.factors import scaled

TENTHS = [n / 10 for n in range(1, 60)]


@pytest.mark.parametrize("most", [500, 2**31 - 1])
@pytest.mark.parametrize(
    "factor", [*TENTHS, 0.35, 0.01, 1 / 3, 2 / 3, 1 / 49, 1.2345, 0.123456789, math.pi]
)
def test_scaled(factor, most):
    """Each size of a call gives what Python gives, or the factor is refused."""
    symbol = Symbol("s", most)
    found = scaled(Dim.of(symbol), factor)
    if found is not None:
        for size in [*range(min(most, 3000) + 1), most - 1, most, most // 3]:
            if size <= most:
                assert _dims.evaluate(found, {symbol: size}) == math.floor(size * factor), size


def test_factors_of_few_digits_can_be_followed():
    size = Dim.of(Symbol("s", 2**31 - 1))
    assert all(scaled(size, factor) is not None for factor in (*TENTHS, 0.35, 0.01, 2.675))


def test_a_known_size():
    assert scaled(90, 0.7) == 62 and scaled(10, 0.7) == 7

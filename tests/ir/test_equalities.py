"""Sizes that are rewritten by equations keep their values where the equations hold."""

from __future__ import annotations

import itertools
import random

import pytest

from purevk.ir import Dim, GuardLog, Size, Symbol
from purevk.ir import dims as _dims
from purevk.ir.equalities import Equalities

_SYMBOLS = (Symbol("a", 9), Symbol("b", 9), Symbol("c", 9))
_CALLS = [dict(zip(_SYMBOLS, sizes)) for sizes in itertools.product(range(10), repeat=3)]


def _random_size(rng: random.Random, depth: int = 3) -> Size:
    if depth == 0 or rng.random() < 0.2:
        return rng.randint(-3, 3) if rng.random() < 0.2 else Dim.of(rng.choice(_SYMBOLS))
    left, right = _random_size(rng, depth - 1), _random_size(rng, depth - 1)
    kind = rng.choice(("+", "-", "*", "//", "%", "max"))
    if kind in ("//", "%"):
        return _dims.apply(kind, left, rng.randint(1, 4))
    if kind == "max":
        return _dims.maximum(left, right)
    return left + right if kind == "+" else left - right if kind == "-" else left * right


@pytest.mark.parametrize("seed", range(30))
def test_values_stay(seed: int) -> None:
    rng = random.Random(seed)
    equalities, left = Equalities(), [_random_size(rng) for _ in range(2)]
    call = rng.choice(_CALLS)
    right = [_dims.evaluate(size, call) for size in left]
    with GuardLog() as log:
        for pair in zip(left, right):
            equalities.add(*pair)
        sizes = [_random_size(rng, 4) for _ in range(20)]
        rewritten = [equalities.rewritten(size) for size in sizes]
    assert not log.guards
    kept = [c for c in _CALLS if all(_dims.evaluate(a, c) == b for a, b in zip(left, right))]
    assert kept
    for size, new in zip(sizes, rewritten):
        for c in kept:
            assert _dims.evaluate(size, c) == _dims.evaluate(new, c)


def test_products_and_quotients_become_numbers() -> None:
    a, b = map(Dim.of, _SYMBOLS[:2])
    equalities = Equalities()
    equalities.add((a // 3) * (b // 3) + 1, 16)
    assert equalities.rewritten((a // 3) * (b // 3) * 4 + 8) == 68
    assert equalities.rewritten((544, (64 // ((a // 3) * (b // 3) + 1)) * 2)) == (544, 8)
    equalities.add(a // 3, 3)
    equalities.add(b // 3, a // 3 + 2)
    assert equalities.rewritten(b // 3) == 5


def test_a_multiple_with_a_known_quotient_is_a_number() -> None:
    a, b = map(Dim.of, _SYMBOLS[:2])
    padded = a + (8 - a % 8) % 8
    equalities = Equalities()
    equalities.add(padded * b * 32 // (b * 256), 1)  # `b` may be 0: it says nothing of `a`
    assert equalities.rewritten(padded).terms == padded.terms
    equalities.add(padded // 8, 1)
    assert equalities.rewritten((padded, padded * b * 2 - b, padded // 4)) == (8, 15 * b, 2)
    half = a + padded * 2 - a * 2
    assert equalities.rewritten(half).terms == half.terms

"""Polynomials with integer factors: sums of products of atoms, each as (atoms, factor). The atoms of
a product are sorted by their text.

What is computed here and in `intervals` is bounded: programs are read from files, and a few
products of sums, or powers of powers, would take all memory. The bounds are far above those of any
model, and what exceeds one raises `ShapeError`.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from purevk.errors import ShapeError

Term = tuple[tuple[Any, ...], int]

MOST_PARTS = 1 << 15
"""Symbols, functions and products of an expression, those within functions counted as often as they
are there: as many as in the square of a sum of 90 symbols."""
MOST_BITS = 4096
"""Bits of a number that sizes are computed with."""
MOST_WORK = 1 << 24
"""Parts of all expressions that are computed for one file: some seconds. Models have about 100 for
each node."""
_MOST_STEPS = 1 << 16  # of a division, after which it is taken to leave a remainder


class Work:
    """What is computed for one file, by what it is done for. What is done again counts once, so that
    a process may do it as often as it likes."""

    def __init__(self) -> None:
        self._done: dict[Hashable, int] = {}

    @contextlib.contextmanager
    def counting(self, task: Hashable) -> Iterator[None]:
        """Within, expressions count. Raises ShapeError above `MOST_WORK`."""
        most = self._done.get(task, 0)
        others = sum(self._done.values()) - most
        counter = [others]
        token = _counter.set(counter)
        try:
            yield
        finally:
            _counter.reset(token)
            self._done[task] = max(most, counter[0] - others)


_counter: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("work", default=None)


def parts(terms: Iterable[Term]) -> int:
    """How large a sum is, see `MOST_PARTS`. Atoms other than symbols have an attribute `parts`."""
    count = 0
    for atoms, factor in terms:
        count += 1
        for atom in atoms:
            count += getattr(atom, "parts", 1)
        if factor.bit_length() > MOST_BITS:
            bounded(factor)
    return bounded_parts(count)


def bounded_parts(count: int) -> int:
    if count > MOST_PARTS:
        raise ShapeError(
            f"an expression of sizes has {count} parts", why=f"at most {MOST_PARTS} are computed"
        )
    _count(count)
    return count


def _count(parts: int) -> None:
    counter = _counter.get()
    if counter is not None:
        counter[0] += parts
        if counter[0] > MOST_WORK:
            raise ShapeError(
                "the sizes of the file take too long to compute",
                why=f"at most {MOST_WORK} parts of expressions are computed for a file",
            )


def bounded(number: int) -> int:
    """The number, if it has no more than `MOST_BITS` bits."""
    if number.bit_length() > MOST_BITS:
        raise ShapeError(
            f"a number that sizes are computed with has {number.bit_length()} bits",
            why=f"at most {MOST_BITS} are computed",
        )
    return number


def add(left: Iterable[Term], right: Iterable[Term]) -> dict[tuple[Any, ...], int]:
    terms = dict(left)
    for atoms, factor in right:
        terms[atoms] = terms.get(atoms, 0) + factor
    return terms


def multiply(left: Iterable[Term], right: Iterable[Term]) -> dict[tuple[Any, ...], int]:
    terms: dict[tuple[Any, ...], int] = {}
    left, right = tuple(left), tuple(right)
    if len(left) > 1 < len(right):
        bounded_parts(parts(left) * len(right) + parts(right) * len(left))
    for atoms, a in left:
        for others, b in right:
            key = tuple(sorted(atoms + others, key=repr))
            terms[key] = terms.get(key, 0) + a * b
    return terms


def divide(left: Iterable[Term], right: Iterable[Term]) -> dict[tuple[Any, ...], int] | None:
    """left / right; None if right does not divide left, or if that takes long to see."""
    right = tuple(right)
    divisor, divisor_factor = max(right, key=_degree)
    quotient: dict[tuple[Any, ...], int] = {}
    remainder = dict(left)
    steps = 0
    while remainder:
        steps += len(remainder)
        _count(8 * len(remainder))
        if steps > _MOST_STEPS:
            return None
        atoms, factor = max(remainder.items(), key=_degree)
        remaining = list(atoms)
        if factor % divisor_factor:
            return None
        for atom in divisor:
            if atom not in remaining:
                return None
            remaining.remove(atom)
        part = tuple(remaining), factor // divisor_factor
        quotient[part[0]] = part[1]
        product = multiply(right, [(part[0], -part[1])])
        remainder = {a: f for a, f in add(remainder.items(), product.items()).items() if f}
    return quotient


def reduced(
    left: Sequence[Term], right: Sequence[Term], is_positive: Callable[[Any], bool]
) -> tuple[dict[tuple[Any, ...], int], ...] | None:
    """Both without the largest product of positive numbers and atoms that divides all their terms;
    None: that is 1."""
    terms = (*left, *right)
    common = Counter(terms[0][0])
    for atoms, _ in terms:
        common &= Counter(atoms)
    shared = tuple(filter(is_positive, common.elements()))
    number = math.gcd(*(factor for _, factor in terms))
    if not shared and number == 1:
        return None
    divisor = [(tuple(sorted(shared, key=repr)), number)]
    return tuple(divide(side, divisor) or {} for side in (left, right))


def _degree(term: Term) -> tuple[int, list[str]]:
    """The order of terms: by degree, then by names. Products keep it."""
    return len(term[0]), [repr(atom) for atom in term[0]]

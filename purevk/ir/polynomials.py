"""Polynomials with integer factors: sums of products of atoms, each as (atoms, factor). The atoms of
a product are sorted by their text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Term = tuple[tuple[Any, ...], int]


def add(left: Iterable[Term], right: Iterable[Term]) -> dict[tuple[Any, ...], int]:
    terms = dict(left)
    for atoms, factor in right:
        terms[atoms] = terms.get(atoms, 0) + factor
    return terms


def multiply(left: Iterable[Term], right: Iterable[Term]) -> dict[tuple[Any, ...], int]:
    terms: dict[tuple[Any, ...], int] = {}
    right = tuple(right)
    for atoms, a in left:
        for others, b in right:
            key = tuple(sorted(atoms + others, key=repr))
            terms[key] = terms.get(key, 0) + a * b
    return terms


def divide(left: Iterable[Term], right: Iterable[Term]) -> dict[tuple[Any, ...], int] | None:
    """left / right; None if right does not divide left."""
    right = tuple(right)
    divisor, divisor_factor = max(right, key=_degree)
    quotient: dict[tuple[Any, ...], int] = {}
    remainder = dict(left)
    while remainder:
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


def _degree(term: Term) -> tuple[int, list[str]]:
    """The order of terms: by degree, then by names. Products keep it."""
    return len(term[0]), [repr(atom) for atom in term[0]]

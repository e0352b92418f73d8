"""Rewrites sizes by what every call keeps equal, so that equal sizes have equal expressions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from purevk.ir import polynomials
from purevk.ir.dims import Dim, Size, apply, gcd_of
from purevk.ir.guards import Guard
from purevk.ir.relations import Relation
from purevk.ir.symbols import Symbol
from purevk.ir.types import TensorType


class Equalities:
    """Equations of sizes, each as a product that is another size: `s0 // 14 = 3`.

    Of the products of an equation, the one with the longest text is replaced, so that replacing
    ends. Where the quotient of a multiple is a number, the multiple as a whole is one too. Another
    equation with a symbol as a term is left: what bounds say of an expression over other symbols
    would be lost.

    Args:
        guards: what every call keeps.
    """

    def __init__(self, guards: Iterable[Guard] = ()) -> None:
        self._products: dict[tuple[Any, ...], Size] = {}
        self._multiples: list[tuple[Dim, int]] = []
        for guard in guards:
            if guard.op == "==" and guard.answer:
                self.add(guard.left, guard.right)

    def add(self, left: Size, right: Size) -> None:
        """Notes that two sizes are equal at every call."""
        difference = self.rewritten(left - right)
        if not isinstance(difference, Dim):
            return
        common = math.gcd(*(factor for _, factor in difference.terms))
        atoms, factor = max(difference.terms, key=lambda term: (len(repr(term[0])), repr(term[0])))
        of_symbol = any(len(key) == 1 and isinstance(key[0], Symbol) for key, _ in difference.terms)
        if abs(factor) == common and not of_symbol:
            product = _sum([(atoms, factor)])
            other = self._products[atoms] = (product - difference) // factor
            if len(atoms) == 1 and isinstance(other, int):
                self._add_multiple(atoms[0], other)

    def _add_multiple(self, atom: Any, number: int) -> None:
        """Notes what a quotient that is a number says of its dividend."""
        is_quotient = not isinstance(atom, Symbol) and atom.kind == "//"
        if is_quotient and isinstance(atom.right, int) and atom.right > 0:
            if _divides(atom.right, atom.left):
                self._multiples.append((atom.left, atom.right * number))

    def rewritten(self, size: Any) -> Any:
        """A size, a relation, a type or nested ones in their new form. Anything else stays."""
        if not self._products:
            return size
        if isinstance(size, tuple):
            return tuple(map(self.rewritten, size))
        if isinstance(size, Relation):
            left, right = self.rewritten(size.left), self.rewritten(size.right)
            return replace(size, left=left, right=right)
        if isinstance(size, TensorType):
            return size.with_dims(self.rewritten(size.dims))
        return self._sized(size) if isinstance(size, Dim) else size

    def _sized(self, size: Dim) -> Size:
        total: Size = 0
        for atoms, factor in size.terms:
            part: Size = factor
            for atom in atoms:
                if isinstance(atom, Symbol):
                    part = part * Dim.of(atom)
                else:
                    left, right = self.rewritten(atom.left), self.rewritten(atom.right)
                    part = part * apply(atom.kind, left, right)
            total = total + part
        for multiple, number in self._multiples:
            total = _replaced(total, multiple, number)
        for atoms, factor in total.terms if isinstance(total, Dim) else ():
            for product, other in self._products.items():
                rest = _without(atoms, product)
                if rest is not None:
                    found = _sum([(atoms, factor)])
                    total = total - found + _sum([(rest, factor)]) * other
                    return self._sized(total) if isinstance(total, Dim) else total
        return total


def _divides(number: int, size: Size) -> bool:
    """Whether a size is seen to be a multiple of a number, which `x % number` and x leave alike."""
    if not isinstance(size, Dim):
        return size % number == 0
    plain: Size = 0
    for atoms, factor in size.terms:
        part: Size = factor
        for atom in atoms:
            if isinstance(atom, Symbol) or atom.kind != "%" or not _divides(number, atom.right):
                part = part * Dim((((atom,), 1),))
            else:
                part = part * atom.left
        plain = plain + part
    if isinstance(plain, Dim) and plain.terms == size.terms:
        return gcd_of(size) % number == 0
    return _divides(number, plain)


def _replaced(size: Size, old: Dim, new: int) -> Size:
    """A size with a number for a sum, where the sum is there as a whole, also times something."""
    if not isinstance(size, Dim):
        return size
    terms = dict(size.terms)
    first, factor = max(old.terms, key=lambda term: (len(repr(term[0])), repr(term[0])))
    for atoms, times in size.terms:
        cofactor = _without(atoms, first)
        if cofactor is None or times % factor:
            continue
        part = _sum([(cofactor, times // factor)])
        product = polynomials.multiply(old.terms, [(cofactor, times // factor)])
        if all(terms.get(a) == f for a, f in product.items() if a != cofactor):
            return _replaced(size - part * old + part * new, old, new)
    return size


def _sum(terms: Sequence[tuple[tuple[Any, ...], int]]) -> Size:
    total: Size = 0
    for atoms, factor in terms:
        total = total + (Dim(((atoms, factor),)) if atoms else factor)
    return total


def _without(atoms: tuple[Any, ...], product: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The atoms that are left of a product without another one; None: it is no part of it."""
    rest = Counter(atoms)  # by hashes: comparing sizes would leave guards
    rest.subtract(product)
    return None if min(rest.values()) < 0 else tuple(sorted(rest.elements(), key=repr))

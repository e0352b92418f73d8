"""Evaluates many sizes together: those of the parameters and grids of a segment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from purevk.errors import InputError
from purevk.ir import Dim, Size, Symbol
from purevk.ir import dims as _dims


class SizeTable:
    """A list of sizes. An expression that occurs several times is evaluated once.

    Attributes:
        symbols: what the sizes depend on, sorted by name.
        varying: (index of the size, number of its expression) of those that are no integers.
    """

    def __init__(self, sizes: Iterable[Size]) -> None:
        indices: dict[Any, int] = {}
        self._expressions: list[Dim] = []
        numbers, at, which = [], [], []
        for index, size in enumerate(sizes):
            if isinstance(size, Dim):
                number = indices.setdefault(size.terms, len(indices))
                if number == len(self._expressions):
                    self._expressions.append(size)
                at.append(index)
                which.append(number)
                size = 0
            numbers.append(size)
        self._fixed = np.array(numbers, np.int64)
        self._at, self._which = np.array(at, np.intp), np.array(which, np.intp)
        self.varying = list(zip(at, which))
        found = set().union(*map(_dims.symbols, self._expressions)) if self._expressions else set()
        self.symbols: tuple[Symbol, ...] = tuple(sorted(found, key=lambda symbol: symbol.name))

    def evaluate(self, env: Mapping[Symbol, int]) -> np.ndarray:
        """The sizes as int64, for the values of the symbols in `env`.

        Raises:
            InputError: one has more than 64 bits.
        """
        numbers: np.ndarray = self._fixed.copy()
        if self._expressions:
            values = self.values(env)
            try:
                numbers[self._at] = np.array(values, np.int64)[self._which]
            except OverflowError:
                raise InputError(
                    f"the integers of this call make the number {max(values, key=abs)}",
                    why="tensors have integers of up to 64 bits",
                ) from None
        return numbers

    def values(self, env: Mapping[Symbol, int]) -> list[int]:
        """The values of the expressions, by number."""
        return [_dims.evaluate(size, env) for size in self._expressions]

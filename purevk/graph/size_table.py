"""Evaluates many sizes together: those of the parameters and grids of a segment."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from purevk.errors import InputError
from purevk.graph.call_memory import Cut
from purevk.graph.memory import BufferRange
from purevk.ir import Dim, Size, Symbol, Value
from purevk.ir import dims as _dims
from purevk.lower.lowering import Dispatch

MIN_INT32 = -(2**31)


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


class SegmentTables:
    """The expressions that are evaluated to record a segment, or to run it again.

    Args:
        all_dispatches: of the program.
        params: where the parameters of a dispatch are, if they are in a buffer, by its number.
        copied: the downloads that are copied at the end of the segment.
        cut: the segment.

    Attributes:
        pushed, grids, repeats, buffered: words of push constants, grids (three per dispatch),
            repetitions, words of parameters in buffers.
        spans: for each dispatch, the first byte of its push constants and their count of bytes.
        params: numbers of the dispatches whose parameters are in a buffer.
        offsets: of its words in the buffer, in words.
        filled: whether all of them have been written once.
        symbols: what a recording depends on, sorted by name.
    """

    def __init__(
        self,
        all_dispatches: Sequence[Dispatch],
        params: Mapping[int, BufferRange],
        copied: Container[Value],
        cut: Cut,
    ) -> None:
        dispatches = all_dispatches[cut.first : cut.last]
        self.spans: list[tuple[int, int]] = []
        words: list[Any] = []
        for dispatch in dispatches:
            count = 0 if dispatch.params_buffer else len(dispatch.push)
            self.spans.append((4 * len(words), 4 * count))
            words.extend(dispatch.push[:count])
        self.pushed = SizeTable(words or [0])
        self.grids = SizeTable(size for dispatch in dispatches for size in dispatch.grid)
        self.repeats = SizeTable(dispatch.repeat for dispatch in dispatches)
        self.params = [number for number in params if cut.first <= number < cut.last]
        self.buffered = SizeTable(
            size for number in self.params for size in all_dispatches[number].push
        )
        self.offsets = [
            params[number].offset // 4 + at
            for number in self.params
            for at in range(len(all_dispatches[number].push))
        ]
        self.filled = False
        found = {*self.pushed.symbols, *self.grids.symbols, *self.repeats.symbols}
        for value in cut.downloads:
            if value in copied:
                found |= _dims.symbols(value.type.numel)
        self.symbols = tuple(sorted(found, key=lambda symbol: symbol.name))


def int32_words(numbers: np.ndarray) -> np.ndarray:
    """Numbers as the 32-bit words that shaders take.

    Raises:
        InputError: one has more than 32 bits.
    """
    words = numbers.astype(np.int32)
    if not np.array_equal(words, numbers):
        (largest,) = numbers[np.argmax(np.abs(numbers))][None]
        raise InputError(
            f"the sizes or integers of this call make the number {largest}",
            why="kernels take whole numbers of up to 32 bits",
            next="pass the number as a tensor",
        )
    return words

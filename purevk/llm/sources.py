"""What a program reads the graphs of language models from, so that plans in the cache serve them.
Constants say in plain data what they have of a file: plans name them by it. Bytes are read when they
are uploaded."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from purevk.dtypes import dtype_named
from purevk.ir import BorrowedConstant, Graph, GuardLog
from purevk.llm.files import ModelFile, damaged, to_bfloat16

if TYPE_CHECKING:
    from purevk.frontends.importer import InputSizes
    from purevk.frontends.respecialize import ReadGraph


class BuiltGraph:
    """A graph that a function builds, unless its plan is in the cache.

    Args:
        build: builds it.
        label: names it, for lists.
        built: all that it follows from besides the code of purevk; "": its plan is not cached.
        borrowed: gives a constant of it by its name.
    """

    def __init__(
        self,
        build: Callable[[], Graph],
        label: str,
        built: str = "",
        borrowed: Callable[[str], BorrowedConstant] | None = None,
    ) -> None:
        self._build, self.label, self.built, self.borrowed = build, label, built, borrowed

    @functools.cached_property
    def _read(self) -> ReadGraph:
        from purevk.frontends.respecialize import ReadGraph

        with GuardLog() as log:
            graph = self._build()
        return ReadGraph(graph, tuple(log.guards), graph.name)

    def __call__(self, sizes: InputSizes | None) -> Graph:
        return self._read(sizes)


class Weight(NamedTuple):
    """A tensor of a file, or a part of it.

    Attributes:
        tensor: its name.
        part: "values", "scales" or "minimums" of one that is quantized; "": the elements.
        dtype: of the constant.
        heads: rows are those of so many heads, and in the order that rotates neighbours; they
            become those that rotate halves. 0: rows stay as they are.
        plus: is added to elements.
    """

    tensor: str
    part: str
    dtype: str
    heads: int = 0
    plus: float = 0.0

    def read(self, file: ModelFile) -> np.ndarray:
        tensor = file.tensors[self.tensor]
        if self.part:
            return self._ordered(
                tensor.values() if self.part == "values" else file.parts(tensor)[self.part]
            )
        numbers = tensor.floats() + np.float32(self.plus) if self.plus else tensor.floats()
        return _cast(self._ordered(numbers), self.dtype)

    def _ordered(self, rows: np.ndarray) -> np.ndarray:
        if not self.heads:
            return rows
        pairs = rows.reshape(self.heads, -1, 2, *rows.shape[1:])
        return np.asarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


class Angles(NamedTuple):
    """Cosines or sines of a rotation, [rows, 2 * frequencies].

    Attributes:
        function: "cos" or "sin".
        dtype: of the constant.
        rows: positions.
        factor: that all are multiplied by.
        frequencies: of the first half of a head; the second half has the same.
    """

    function: str
    dtype: str
    rows: int
    factor: float
    frequencies: tuple[float, ...]

    def read(self, file: ModelFile) -> np.ndarray:
        angles = np.arange(self.rows)[:, None] * np.array(self.frequencies)
        function = {"cos": np.cos, "sin": np.sin}[self.function]
        return _cast(np.tile(function(angles) * self.factor, 2), self.dtype)


def _cast(numbers: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return to_bfloat16(numbers)
    return numbers.astype(dtype_named(dtype).numpy)


def constant_of(file: ModelFile, content: Weight | Angles, nbytes: int) -> BorrowedConstant:
    """A constant with so many bytes, which is uploaded from a file."""
    name = json.dumps((type(content).__name__, nbytes, *content))

    def data() -> memoryview:
        elements = np.ascontiguousarray(content.read(file)).reshape(-1).view(np.uint8).data
        if len(elements) != nbytes:
            raise damaged(file.name, f"{name[:200]} has {len(elements)} bytes")
        return elements

    return BorrowedConstant((id(file), name), nbytes, data, name)


def constant_named(file: ModelFile, name: str) -> BorrowedConstant:
    """The constant that has a name of `constant_of`."""
    kind, nbytes, *fields = json.loads(name)
    if kind == "Weight":
        return constant_of(file, Weight(*fields), nbytes)
    function, dtype, rows, factor, frequencies = fields
    return constant_of(file, Angles(function, dtype, rows, factor, tuple(frequencies)), nbytes)

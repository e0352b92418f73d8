"""Types of values, and how a tensor's elements lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.ir import dims
from purevk.ir.dims import Size
from purevk.plain_text import printable


@dataclass(frozen=True)
class TensorType:
    """Element type and sizes. 0-d tensors have no dims."""

    dtype: DType
    dims: tuple[Size, ...]

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.dims)

    @property
    def numel(self) -> Size:
        """Number of elements."""
        return dims.product(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense tensor at the sizes' upper bounds."""
        return dims.upper(self.numel) * self.dtype.itemsize

    @property
    def is_static(self) -> bool:
        return all(isinstance(size, int) for size in self.dims)

    def with_dims(self, sizes: Sequence[Size]) -> TensorType:
        """The same dtype with other sizes."""
        return TensorType(self.dtype, tuple(sizes))

    def with_dtype(self, dtype: DType) -> TensorType:
        """The same sizes with another dtype."""
        return TensorType(dtype, self.dims)

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor that a node makes, or an input, constant or state of the graph. Compared by
    identity."""

    name: str
    type: TensorType

    def __repr__(self) -> str:
        return printable(f"%{self.name}")


def contiguous_strides(
    sizes: Sequence[Size], order: Sequence[int] | None = None
) -> tuple[Size, ...]:
    """Strides, in elements, of a dense tensor whose dims lie in memory in `order` (outermost
    first)."""
    order = tuple(range(len(sizes))) if order is None else tuple(order)
    strides: list[Size] = [0] * len(sizes)
    step: Size = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * sizes[dim]
    return tuple(strides)


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor lie: element [i, j, ...] at `offset + i*strides[0] +
    j*strides[1] + ...`.

    Offset and strides count elements of the tensor's dtype within the buffer of its storage.
    """

    offset: Size
    strides: tuple[Size, ...]

    @classmethod
    def dense(cls, sizes: Sequence[Size], order: Sequence[int] | None = None) -> Layout:
        return cls(0, contiguous_strides(sizes, order))

    def is_contiguous(self, sizes: Sequence[Size]) -> bool:
        """Dense and row-major (sizes of 1 may have any stride)."""
        expected = contiguous_strides(sizes)
        return all(
            dims.same(a, b) or dims.same(size, 1)
            for size, a, b in zip(sizes, self.strides, expected)
        )

    def dense_order(self, sizes: Sequence[Size]) -> tuple[int, ...] | None:
        """The order of dims in memory, outermost first, if the tensor is dense; None otherwise."""
        order = sorted(
            range(len(sizes)),
            key=lambda d: (-dims.hint(self.strides[d]), dims.hint(sizes[d]) != 1, d),
        )
        step: Size = 1
        for dim in reversed(order):
            if dims.same(sizes[dim], 1):
                continue
            if not dims.same(self.strides[dim], step):
                return None
            step = step * sizes[dim]
        return tuple(order)

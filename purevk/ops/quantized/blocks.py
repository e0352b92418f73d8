"""Tensors whose blocks share a scale and a zero point."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.ir import Dim, Size, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.registry import ShapeError


class Blocks:
    """A view of a tensor in which the parameters of its blocks broadcast.

    Args:
        dims: sizes of the tensor.
        block: sizes of a block. A dim that a block covers is not split.

    Attributes:
        sizes: of the view.
        parameter_sizes: of the parameters in this view.
        reduced: dims of the view whose elements share parameters.
        kept: sizes of the parameters without these dims.
        grid: how many blocks there are along each dim of the tensor.
    """

    def __init__(self, dims: Sequence[Size], block: Sequence[Size]) -> None:
        if len(block) != len(dims):
            raise ShapeError(f"blocks of {list(block)} in a tensor of {list(dims)}")
        self.sizes: list[Size] = []
        self.parameter_sizes: list[Size] = []
        self.reduced: list[int] = []
        self.grid: list[Size] = []
        for size, length in zip(dims, block):
            if isinstance(length, int) and length == 1:
                self._add(size, size)
                self.grid.append(size)
            elif _covers(length, size):
                self.reduced.append(len(self.sizes))
                self._add(size, 1)
                self.grid.append(1)
            elif size % length == 0:
                self._add(size // length, size // length)
                self.reduced.append(len(self.sizes))
                self._add(length, 1)
                self.grid.append(size // length)
            else:
                raise ShapeError(f"blocks of {list(block)} do not divide {list(dims)}")
        self.kept = [size for d, size in enumerate(self.parameter_sizes) if d not in self.reduced]

    def _add(self, size: Size, parameter_size: Size) -> None:
        self.sizes.append(size)
        self.parameter_sizes.append(parameter_size)

    def view(self, builder: Builder, value: Value) -> Value:
        """The view of a tensor."""
        return builder.aten.view(value, tuple(self.sizes))

    def parameters(self, builder: Builder, value: Value) -> Value:
        """Scales or zero points as they broadcast in the view."""
        return builder.aten.view(value, tuple(self.parameter_sizes))


def _covers(length: Size, size: Size) -> bool:
    """Whether a block takes the whole of a dim. Files record the upper bound of a symbolic size as
    the size of a block."""
    if isinstance(size, Dim):
        return isinstance(length, Dim) or length == _dims.upper(size)
    return length == size

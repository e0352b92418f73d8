"""Views of operands: broadcast to other sizes, or a slice."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.ir import Layout, Size, TensorType
from purevk.lower.lowering import Operand


def broadcast_strides(operand: Operand, sizes: Sequence[Size]) -> tuple[Size, ...]:
    """Strides of an operand along the dims of the result, 0 where it is broadcast."""
    lead = len(sizes) - len(operand.dims)
    return tuple(
        0 if d < lead or (operand.dims[d - lead] == 1 and size != 1) else operand.strides[d - lead]
        for d, size in enumerate(sizes)
    )


def slice_of(operand: Operand, dim: int, start: Size, length: Size) -> Operand:
    """Part of an operand along a dim."""
    layout = Layout(operand.offset + start * operand.strides[dim], operand.strides)
    sizes = (*operand.dims[:dim], length, *operand.dims[dim + 1 :])
    return Operand(operand.storage, layout, TensorType(operand.dtype, sizes))

"""Pointwise programs whose results are pieces of one tensor: concatenations that nothing copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.lower.expression import Expression
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.pointwise import emit_pointwise
from purevk.ops.image_layout import LayoutQuery
from purevk.ops.registry import Kernel, Order, define

NAME = "purevk.pieces"


class Piece(NamedTuple):
    """A pointwise program, and where its results go. It is an argument as a plain tuple.

    Attributes:
        expression: the program, with as many outputs as there are `starts`.
        inputs: the tensors that it reads, which broadcast to `sizes`.
        scalars: the numbers that are known only at a call.
        sizes: of each result.
        steps: of each dim: results are so many elements apart in the whole tensor.
        starts: for each result, the indices of its first element in the whole tensor.
    """

    expression: Expression
    inputs: tuple[Value, ...]
    scalars: tuple[Size, ...]
    sizes: tuple[Size, ...]
    steps: tuple[int, ...]
    starts: tuple[tuple[Size, ...], ...]


def pieces_of(node: Node) -> tuple[Piece, ...]:
    """The pieces of a node."""
    arguments: tuple[Any, ...] = node.arg_list("pieces")
    return tuple(Piece(*argument) for argument in arguments)


def _shape(pieces: Sequence[Any], sizes: Sequence[Size], dtype: DType) -> TensorType:
    """The pieces fill a tensor of `sizes` without overlap."""
    return TensorType(dtype, tuple(sizes))


def _lower(lowering: Lowering, node: Node) -> None:
    whole = lowering.operand(node.result)
    for piece in pieces_of(node):
        results = [_part(whole, piece, starts) for starts in piece.starts]
        inputs = [lowering.operand(value) for value in piece.inputs]
        emit_pointwise(lowering, piece.expression, inputs, piece.scalars, results)


def _part(whole: Operand, piece: Piece, starts: Sequence[Size]) -> Operand:
    offset = whole.offset
    for start, stride in zip(starts, whole.strides):
        offset = offset + start * stride
    strides = tuple(step * stride for step, stride in zip(piece.steps, whole.strides))
    return Operand(whole.storage, Layout(offset, strides), TensorType(whole.dtype, piece.sizes))


def _order(node: Node, query: LayoutQuery) -> tuple[Order | None]:
    """The result has the order of dims in memory of the first input of the sizes of its piece."""
    for piece in pieces_of(node):
        for value in piece.inputs:
            if value.type.dims == piece.sizes:
                return (_order_of(query(value)),)
    return (None,)


def _order_of(layout: Layout) -> Order | None:
    strides = [stride for stride in layout.strides if isinstance(stride, int)]
    if len(strides) != len(layout.strides) or len(set(strides)) != len(strides):
        return None
    order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    return None if order == tuple(range(len(order))) else order


define(NAME, _shape, Kernel(_lower, layouts=_order, any_size=True))

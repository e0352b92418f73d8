"""Operators of purevk's own: pointwise programs, copies, stores into states, iota."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType
from purevk.lower.copies import emit_copy
from purevk.lower.expression import Expression
from purevk.lower.lowering import Lowering
from purevk.lower.map import MapSpec, emit_map
from purevk.lower.pointwise import emit_pointwise
from purevk.ops.facts import Moves
from purevk.ops.image_layout import LayoutQuery
from purevk.ops.registry import Kernel, Order, define
from purevk.ops.signatures import signature


@signature("expression, inputs, scalars, sizes")
def _pointwise_shape(expression: Expression, sizes: Sequence[Size]) -> tuple[TensorType, ...]:
    dtypes = expression.dtypes
    return tuple(TensorType(dtypes[number], tuple(sizes)) for number in expression.outputs)


def _pointwise_lower(lowering: Lowering, node: Node) -> None:
    emit_pointwise(
        lowering,
        node.attribute("expression", Expression),
        [lowering.operand(value) for value in node.tensors("inputs")],
        node.sizes("scalars"),
        [lowering.operand(value) for value in node.results],
    )


def _pointwise_order(node: Node, query: LayoutQuery) -> tuple[Order | None, ...]:
    """The results have the layout of the first dense input with their sizes."""
    sizes = node.result.type.dims
    for value in node.tensors("inputs"):
        if value.type.rank == len(sizes) and all(a == b for a, b in zip(value.type.dims, sizes)):
            order = query(value).dense_order(sizes)
            if order is not None:
                return (order,) * len(node.results)
    return (None,) * len(node.results)


define(
    "purevk.pointwise",
    _pointwise_shape,
    Kernel(_pointwise_lower, layouts=_pointwise_order, any_size=True),
)


def _copy_lower(lowering: Lowering, node: Node) -> None:
    emit_copy(lowering, lowering.operand(node.tensor("x")), lowering.operand(node.result))


define(
    "purevk.copy",
    lambda x, order=None: x,
    Kernel(
        _copy_lower,
        layouts=lambda node, query: (node.optional_ints("order"),),
        any_size=True,
    ),
    moves=Moves.IN_ORDER,
)


def _store_lower(lowering: Lowering, node: Node) -> None:
    value, state = node.tensor("value"), node.tensor("state")
    emit_copy(lowering, lowering.operand(value), lowering.operand(state))


define(
    "purevk.store",
    lambda state, value: None,
    Kernel(_store_lower, any_size=True),
    mutates=(0,),
    moves=Moves.TENSORS,
)


def _iota_lower(lowering: Lowering, node: Node) -> None:
    emit_map(lowering, MapSpec("r = T_R(i0);", ()), [], {}, [lowering.operand(node.result)])


define(
    "purevk.iota",
    lambda length, dtype=DType.int32: TensorType(dtype, (length,)),
    Kernel(_iota_lower, windows=lambda node: True),
)

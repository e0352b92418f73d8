"""Concatenation."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.ir import Layout, Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.copies import emit_copy
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.map import MapSpec, coordinates, emit_map
from purevk.lower.operands import slice_of
from purevk.ops.facts import Moves
from purevk.ops.image_layout import FLATTENING, LayoutQuery
from purevk.ops.promotion import promote_types
from purevk.ops.registry import Kernel, Order, ShapeError, View, define, find
from purevk.ops.shapes import equal_shapes, wrap


def _cat_shape(tensors: Sequence[TensorType], dim: int = 0) -> TensorType:
    kept = [tensor for tensor in tensors if not (tensor.rank == 1 and tensor.dims[0] == 0)] or list(
        tensors
    )
    at = wrap(dim, kept[0].rank)
    sizes = list(kept[0].dims)
    dtype = kept[0].dtype
    for tensor in kept[1:]:
        others = [[*dims[:at], *dims[at + 1 :]] for dims in (sizes, list(tensor.dims))]
        if tensor.rank != len(sizes) or not equal_shapes(*others):
            raise ShapeError(f"cannot concatenate {list(tensors)} along dim {dim}")
        sizes[at] = sizes[at] + tensor.dims[at]
        dtype = promote_types(dtype, tensor.dtype)
    return TensorType(dtype, tuple(sizes))


def _cat_lower(lowering: Lowering, node: Node) -> None:
    out = lowering.operand(node.result)
    at = wrap(node.int("dim"), len(out.dims))
    operands = [lowering.operand(tensor) for tensor in node.tensors("tensors")]
    pieces = [piece for piece in operands if len(piece.dims) == len(out.dims)]
    if _interleaves(lowering, pieces, out, at):
        _interleave(lowering, pieces, out, at)
        return
    start: Size = 0
    for piece in pieces:
        emit_copy(lowering, piece, slice_of(out, at, start, piece.dims[at]))
        start = start + piece.dims[at]


def _interleaves(lowering: Lowering, pieces: Sequence[Operand], out: Operand, at: int) -> bool:
    """Whether each tensor gives so few neighbouring elements that one copy per tensor would write
    small pieces of memory."""
    order = out.layout.dense_order(out.dims) or tuple(range(len(out.dims)))
    inner = order[order.index(at) :]
    runs = [
        _dims.upper(_dims.product([piece.dims[d] for d in inner])) * out.dtype.itemsize
        for piece in pieces
    ]
    alike = all(piece.dtype is out.dtype for piece in pieces)
    return (
        lowering.traits.profile.coalesces_accesses
        and alike
        and 1 < len(pieces) <= 8
        and max(runs) < 64
        and not any(lowering.is_large(operand) for operand in (*pieces, out))
    )


def _interleave(lowering: Lowering, pieces: Sequence[Operand], out: Operand, at: int) -> None:
    """Appends one dispatch in which each element of the result chooses its tensor."""
    start: Size = 0
    choices: list[str] = []
    ends: dict[str, Size] = {}
    for n, piece in enumerate(pieces):
        here = coordinates(len(out.dims), **({f"d{at}": f"i{at} - end_{n - 1}"} if n else {}))
        test = f"if (i{at} < end_{n}) " if n + 1 < len(pieces) else ""
        choices.append(f"{test}r = P{n}({here});")
        start = start + piece.dims[at]
        ends[f"end_{n}"] = start
    names = tuple(f"P{n}" for n in range(len(pieces)))
    others = tuple((d, (d,) * len(pieces)) for d in range(len(out.dims)) if d != at)
    spec = MapSpec(" else ".join(choices), names, tuple(ends), lanes=others)
    emit_map(lowering, spec, pieces, ends, [out])


def _cat_order(node: Node, query: LayoutQuery) -> tuple[Order | None]:
    """The result has the order of its tensors in memory if all have the same, so that copies follow
    it, unless a reader would have to copy it to see it in another shape."""
    result = node.result
    if result in query.outputs:
        return (None,)
    rank = result.type.rank
    orders = {
        query(value).dense_order(value.type.dims) if value.type.rank == rank else None
        for value in node.tensors("tensors")
    }
    order = orders.pop()
    if orders or order is None:
        return (None,)
    layout = Layout.dense(result.type.dims, order)
    copied = any(_copies(reader, layout) for reader in query.users.get(result, ()))
    return (None if copied else order,)


def _copies(reader: Node, layout: Layout) -> bool:
    """Whether a node copies its first argument if this has a layout."""
    definition = find(reader.op)
    if definition is None or not isinstance(definition.form, View):
        return reader.op in FLATTENING
    types = tuple(value.type for value in reader.results)
    bound = definition.bind(reader.args).values()
    return definition.form.layout(layout, reader.inputs[0].type, types, *bound) is None


define(
    "aten.cat.default",
    _cat_shape,
    Kernel(_cat_lower, layouts=_cat_order, any_size=True),
    names=("aten.concat.default",),
    moves=Moves.TENSORS,
)

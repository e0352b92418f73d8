"""Operators that write to indices, such as scatter and index_put, or to a part of a tensor, such as
slice_scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.errors import GraphError
from purevk.ir import Arg, Dim, Node, Scalar, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import emit_copy
from purevk.lower.lowering import Lowering, Operand
from purevk.ops.builder import Builder
from purevk.ops.facts import Moves
from purevk.ops.index.masked import check_count, is_mask, put_by_mask
from purevk.ops.index.scatter import NAME as SCATTER
from purevk.ops.map import mapped
from purevk.ops.registry import (
    DataDependentSize,
    DataDependentType,
    Kernel,
    Operator,
    ShapeError,
    UnknownSizes,
    View,
    define,
    find,
    rewrite,
)
from purevk.ops.shapes import is_empty, wrap
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits


def _scattered(
    builder: Builder,
    x: Value,
    indices: Sequence[Value],
    source: Value | Scalar,
    along: int | None,
    given: Sequence[int],
    mode: str,
    include_self: bool = True,
) -> Value:
    """Emits `purevk.scatter`. Sums of half-precision numbers are made in float32."""
    wide = mode in ("add", "mean", "prod") and x.type.dtype in (DType.float16, DType.bfloat16)
    target = x
    if wide:
        target = builder.aten._to_copy(x, DType.float32)
    if isinstance(source, Value) and source.type.dtype is not target.type.dtype:
        source = builder.aten._to_copy(source, target.type.dtype)
    made = builder.emit(
        SCATTER, target, tuple(indices), source, along, tuple(given), mode, include_self
    )
    return builder.aten._to_copy(made, x.type.dtype) if wide else made


def _at_least_1d(builder: Builder, x: Value) -> Value:
    return x if x.type.rank else builder.aten.view(x, (1,))


def scatter_along(
    builder: Builder,
    x: Value,
    dim: int,
    index: Value,
    source: Value | Scalar,
    mode: str,
    include_self: bool = True,
    shared: bool = False,
) -> Value:
    """Emits a scatter whose index has the rank of x and gives the coordinate along a dim; `shared`: it
    has rank 1 and is the same for all other dims."""
    sizes, at = x.type.dims, wrap(dim, x.type.rank)
    x, index = _at_least_1d(builder, x), _at_least_1d(builder, index)
    if isinstance(source, Value):
        source = _at_least_1d(builder, source)
    along, given = (None, (at,)) if shared else (at, ())
    made = _scattered(builder, x, (index,), source, along, given, mode, include_self)
    return made if made.type.rank == len(sizes) else builder.aten.view(made, sizes)


# -- scatter -------------------------------------------------------------------------------------
def _scatter_shape(x: TensorType, dim: int, index: TensorType) -> TensorType:
    wrap(dim, x.rank)
    if max(index.rank, 1) != max(x.rank, 1):
        raise ShapeError(f"the index of scatter has rank {index.rank}, not {x.rank}")
    return x


_REDUCES = {
    "add": "add",
    "multiply": "prod",
    "sum": "add",
    "prod": "prod",
    "mean": "mean",
    "amax": "amax",
    "amin": "amin",
}


def _source(builder: Builder, x: Value, index: Value, value: Value | Scalar) -> Value | Scalar:
    """A number to scatter; one that is known only at a call as a tensor of the sizes of `index`."""
    if not isinstance(value, (Value, Dim)):
        return value
    return builder.aten.full(index.type.dims, value, x.type.dtype)


rewrite("aten.scatter.src", lambda x, dim, index, src: _scatter_shape(x, dim, index))(
    lambda builder, node, x, dim, index, source: scatter_along(
        builder, x, dim, index, source, "set"
    )
)
rewrite("aten.scatter.value", lambda x, dim, index, value: _scatter_shape(x, dim, index))(
    lambda builder, node, x, dim, index, source: scatter_along(
        builder, x, dim, index, _source(builder, x, index, source), "set"
    )
)
rewrite("aten.scatter.reduce", lambda x, dim, index, src, reduce: _scatter_shape(x, dim, index))(
    lambda builder, node, x, dim, index, source, how: scatter_along(
        builder, x, dim, index, source, _REDUCES[how]
    )
)
rewrite(
    "aten.scatter.value_reduce", lambda x, dim, index, value, reduce: _scatter_shape(x, dim, index)
)(
    lambda builder, node, x, dim, index, source, how: scatter_along(
        builder, x, dim, index, _source(builder, x, index, source), _REDUCES[how]
    )
)
rewrite("aten.scatter_add.default", lambda x, dim, index, src: _scatter_shape(x, dim, index))(
    lambda builder, node, x, dim, index, source: scatter_along(
        builder, x, dim, index, source, "add"
    )
)
rewrite(
    "aten.scatter_reduce.two",
    lambda x, dim, index, src, reduce, include_self=True: _scatter_shape(x, dim, index),
)(
    lambda builder, node, x, dim, index, source, how, include: scatter_along(
        builder, x, dim, index, source, _REDUCES[how], bool(include)
    )
)


# -- index_put -----------------------------------------------------------------------------------
@signature("x, indices, values, accumulate=False, unsafe=False")
def _index_put_shape(x: TensorType, indices: Sequence[TensorType | None]) -> TensorType:
    if len(indices) > x.rank:
        raise ShapeError(f"{len(indices)} indices for rank {x.rank}")
    return x


def _refuse_index_put(node: Node, traits: DeviceTraits) -> str | None:
    indices = node.optional_tensors("indices")
    given = [index for index in indices if index is not None]
    if any(is_mask(index) for index in given) and (len(given) > 1 or indices[0] is None):
        return "no kernel for a boolean index among others"
    return None


def _put_by_mask(
    builder: Builder, node: Node, x: Value, mask: Value, values: Value, accumulate: bool
) -> Value:
    """`x[mask] = values`. One value serves all true elements of the mask; of several, the n-th is for
    the n-th true element."""
    if mask.type.dtype is not DType.bool:
        mask = builder.aten.ne.Tensor(mask, y=0)
    rest = x.type.dims[mask.type.rank :]
    if values.type.rank <= len(rest) or values.type.dims[0] == 1:
        wide = builder.aten.view(mask, (*mask.type.dims, *([1] * len(rest))))
        if values.type.rank > len(rest):
            values = builder.aten.squeeze.dims(values, (0,))
        other = builder.aten.add.Tensor(x, values) if accumulate else values
        return builder.aten.where.self(wide, other, x)
    rows = values.type.dims[0]
    wrong = "the mask has another number of true elements than there are values"
    check_count(builder, node, mask, rows, rows + 1, wrong)
    if not rest and not accumulate:
        return put_by_mask(builder, x, mask, values)
    count, width = mask.type.numel, _dims.product(rest)
    flat = builder.aten.view(mask, (count,))
    before = builder.aten.cumsum(flat, dim=0, dtype=DType.int32)
    values = builder.aten.view(
        builder.aten.expand(values, (rows, *rest)),
        (rows, width),
    )
    whole = builder.aten.view(x, (count, width))
    taken = "VALUES(clamp(BEFORE(i0) - 1, 0, values_size_0 - 1), i1)"
    body = f"r = X(i0, i1); if (MASK(i0) != 0) r {'+=' if accumulate else '='} {taken};"
    made = mapped(
        builder, body, {"X": whole, "MASK": flat, "BEFORE": before, "VALUES": values}, whole.type
    )
    return builder.aten.view(made, x.type.dims)


def _put_moves(node: Node) -> Moves:
    return Moves.NO if node.bool("accumulate") else Moves.TENSORS


@rewrite("aten.index_put.default", _index_put_shape, supports=_refuse_index_put, moves=_put_moves)
def _index_put(
    builder: Builder,
    node: Node,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool,
    unsafe: bool = False,
) -> Value:
    given = [d for d, index in enumerate(indices) if index is not None]
    chosen = [index for index in indices if index is not None]
    mode = "add" if accumulate else "set"
    if not chosen:
        wide = builder.aten.expand(
            builder.aten._to_copy(values, x.type.dtype),
            x.type.dims,
        )
        return builder.aten.add.Tensor(x, wide) if accumulate else builder.aten.alias(wide)
    if is_mask(chosen[0]):
        return _put_by_mask(
            builder,
            node,
            x,
            chosen[0],
            builder.aten._to_copy(values, x.type.dtype),
            accumulate,
        )
    return _scattered(builder, x, chosen, values, None, given, mode)


rewrite(
    "aten._unsafe_index_put.default",
    lambda x, indices, values, accumulate=False: _index_put_shape(x, indices, values, accumulate),
    supports=_refuse_index_put,
    moves=_put_moves,
)(_index_put)


# -- one index along a dim -----------------------------------------------------------------------
_one_index = partial(scatter_along, shared=True)


@rewrite("aten.index_add.default", lambda x, dim, index, source, alpha=1: x)
def _index_add(
    builder: Builder, node: Node, x: Value, dim: int, index: Value, source: Value, alpha: Scalar
) -> Value:
    if alpha != 1:
        source = builder.aten.mul.Tensor(source, alpha)
    return _one_index(builder, x, dim, index, source, "add")


rewrite("aten.index_copy.default", lambda x, dim, index, source: x, moves=Moves.TENSORS)(
    lambda builder, node, x, dim, index, source: _one_index(builder, x, dim, index, source, "set")
)
rewrite("aten.index_reduce.default", lambda x, dim, index, source, reduce, include_self=True: x)(
    lambda builder, node, x, dim, index, source, how, include: _one_index(
        builder, x, dim, index, source, _REDUCES[how], bool(include)
    )
)


@rewrite("aten.index_fill.int_Scalar", lambda x, dim, index, value: x, "aten.index_fill.int_Tensor")
def _index_fill(
    builder: Builder, node: Node, x: Value, dim: int, index: Value, value: Value | Scalar
) -> Value:
    if isinstance(value, Dim):
        value = builder.aten.scalar_tensor(value, x.type.dtype)
    return _one_index(builder, x, dim, index, value, "set")


@rewrite("aten.put.default", lambda x, index, source, accumulate=False: x)
def _put(
    builder: Builder, node: Node, x: Value, index: Value, source: Value, accumulate: bool
) -> Value:
    flat = [builder.aten.view(value, (value.type.numel,)) for value in (x, index, source)]
    made = _scattered(
        builder, flat[0], (flat[1],), flat[2], None, (0,), "add" if accumulate else "set"
    )
    return builder.aten.view(made, x.type.dims)


@rewrite("aten.take.default", lambda x, index: x.with_dims(index.dims), moves=Moves.SOME)
def _take(builder: Builder, node: Node, x: Value, index: Value) -> Value:
    flat = builder.aten.view(x, (x.type.numel,))
    picked = builder.aten.index_select(
        flat,
        dim=0,
        index=builder.aten.view(index, (index.type.numel,)),
    )
    return builder.aten.view(picked, index.type.dims)


def _one_hot_shape(x: TensorType, num_classes: Size = -1) -> TensorType:
    if isinstance(num_classes, int) and num_classes < 0:
        sizes = DataDependentType(DType.int64, (*x.dims, DataDependentSize(None)))
        raise UnknownSizes("the number of classes is known only at a call", (sizes,))
    return TensorType(DType.int64, (*x.dims, num_classes))


def _refuse_one_hot(node: Node, traits: DeviceTraits) -> str | None:
    count = node.size("num_classes")
    unknown = isinstance(count, int) and count < 0
    return "no kernel that finds the number of classes" if unknown else None


@rewrite("aten.one_hot.default", _one_hot_shape, supports=_refuse_one_hot)
def _one_hot(builder: Builder, node: Node, x: Value, num_classes: Size) -> Value:
    column = builder.aten.unsqueeze(x, dim=-1)
    numbers = builder.purevk.iota(num_classes, DType.int32)
    return builder.aten._to_copy(
        builder.aten.eq.Tensor(column, numbers),
        node.result.type.dtype,
    )


# -- writing a part ------------------------------------------------------------------------------
class _View(NamedTuple):
    """An operator that is a view, and the form of its definition."""

    definition: Operator
    form: View


def _view_of(name: str) -> _View:
    definition = find(name)
    if definition is None or not isinstance(definition.form, View):
        raise GraphError(f"{name} is no view")
    return _View(definition, definition.form)


def _write_lower(lowering: Lowering, node: Node) -> None:
    """Copies `x`, then `source` to the part of the copy that the view `op` gives."""
    x, target = node.tensor("x"), lowering.operand(node.result)
    if is_empty(target.type):
        return
    emit_copy(lowering, lowering.operand(x), target)
    view, args = _view_of(node.str("op")), (x, *node.arg_list("args"))
    (type,) = view.definition.infer(args)
    if is_empty(type):
        return
    bound = view.definition.bind(args)
    layouts = view.form.layout(target.layout, x.type, (type,), *bound.values())
    if not isinstance(layouts, tuple):
        raise GraphError(f"{node.str('op')} is no part of {x.type}", where=node.source)
    source = lowering.operand(node.tensor("source"))
    emit_copy(lowering, source, Operand(target.storage, layouts[0], type))


define("purevk.write_part", lambda x, source, op, args: x, Kernel(_write_lower))


def _part(name: str, view: str, shape: Callable[..., TensorType]) -> None:
    def expand(builder: Builder, node: Node, x: Value, source: Value, *args: Arg) -> Value:
        (type,) = _view_of(view).definition.infer((x, *args))
        source = builder.aten._to_copy(source, x.type.dtype)
        if source.type.dims != type.dims:
            source = builder.aten.expand(source, type.dims)
        return builder.purevk.write_part(x, source, view, tuple(args))

    rewrite(name, shape, moves=Moves.TENSORS)(expand)


_part("aten.select_scatter.default", "aten.select.int", lambda x, src, dim, index: x)
_part(
    "aten.slice_scatter.default",
    "aten.slice.Tensor",
    lambda x, src, dim=0, start=None, end=None, step=1: x,
)
_part(
    "aten.diagonal_scatter.default",
    "aten.diagonal.default",
    lambda x, src, offset=0, dim1=0, dim2=1: x,
)
_part(
    "aten.as_strided_scatter.default",
    "aten.as_strided.default",
    lambda x, src, size, stride, storage_offset=None: x,
)

"""Sorting along a dim, and what follows from it: topk, median, kthvalue.

If few elements of a row are wanted, they are selected without sorting it (`selection.py`). In short
rows, each element counts the elements before it. Longer rows are sorted by blocks (`blocks.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.elements import acc_of
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.map import MapSpec, coordinates, emit_map
from purevk.ops.builder import Builder
from purevk.ops.registry import Kernel, ShapeError, define, rewrite
from purevk.ops.shapes import is_empty, reduced, wrap
from purevk.ops.sort.blocks import emit_sort
from purevk.ops.sort.selection import can_select, emit_select, select

NAME = "purevk.sort"
SHORT = 128  # up to this length every element counts those before it


def _shape(
    x: TensorType, dim: int, descending: bool, count: Size, index: DType = DType.int64
) -> tuple[TensorType, TensorType]:
    sizes = tuple(count if d == dim else size for d, size in enumerate(x.dims))
    return x.with_dims(sizes), TensorType(index, sizes)


def _lower(lowering: Lowering, node: Node) -> None:
    x = lowering.operand(node.tensor("x"))
    dim, descending, count = node.int("dim"), node.bool("descending"), node.size("count")
    values, indices = (lowering.operand(value) for value in node.results)
    if is_empty(values.type):
        return
    if can_select(lowering.traits, x.type, dim, count):
        emit_select(lowering, x, values, indices, dim, descending, count)
    elif _dims.upper(x.dims[dim]) <= SHORT:
        _count_before(lowering, x, values, indices, dim, descending)
    else:
        emit_sort(lowering, x, values, indices, dim, descending, count)


def _count_before(
    lowering: Lowering, x: Operand, values: Operand, indices: Operand, dim: int, descending: bool
) -> None:
    rank = len(x.dims)
    mine, other, to = (
        coordinates(rank, **{f"d{dim}": name}) for name in (f"i{dim}", "j", "before")
    )
    flag = "true" if descending else "false"
    body = (
        f"{acc_of(x.dtype)} v = X({mine}); LOOPS(loop(x_size_{dim}))"
        f" COUNT_BEFORE(x_size_{dim}, X({other}), v, i{dim}, {flag})"
        f" if (before < r_size_{dim}) {{ R_PUT({to}, v); R1_PUT({to}, i{dim}); }}"
    )
    emit_map(lowering, MapSpec(body, ("X",), stores=False), [x], {}, [values, indices], x.dims)


define(NAME, _shape, Kernel(_lower))


# -- operators -----------------------------------------------------------------------------------
def sort(
    builder: Builder, x: Value, dim: int, descending: bool, count: Size | None = None
) -> tuple[Value, Value]:
    """The `count` first elements along a dim (None: all) in their order, and their indices; equal
    ones keep their order."""
    if not x.type.rank:
        made = sort(builder, builder.aten.view(x, (1,)), 0, descending)
        values, indices = (builder.aten.view(value, ()) for value in made)
        return values, indices
    at = wrap(dim, x.type.rank)
    index = DType.int64 if "int64" in builder.traits.features else DType.int32
    count = x.type.dims[at] if count is None else count
    values, indices = builder.emit_all(NAME, x, at, bool(descending), count, index)
    return values, indices


def _sort_shape(
    x: TensorType, dim: int = -1, descending: bool = False
) -> tuple[TensorType, TensorType]:
    wrap(dim, x.rank)
    return x, x.with_dtype(DType.int64)


rewrite("aten.sort.default", _sort_shape)(
    lambda builder, node, x, dim, descending: sort(builder, x, dim, descending)
)
rewrite(
    "aten.sort.stable",
    lambda x, stable=None, dim=-1, descending=False: _sort_shape(x, dim, descending),
)(lambda builder, node, x, stable, dim, descending: sort(builder, x, dim, descending))
rewrite(
    "aten.argsort.default", lambda x, dim=-1, descending=False: _sort_shape(x, dim, descending)[1]
)(lambda builder, node, x, dim, descending: sort(builder, x, dim, descending)[1])
rewrite(
    "aten.argsort.stable",
    lambda x, stable, dim=-1, descending=False: _sort_shape(x, dim, descending)[1],
)(lambda builder, node, x, stable, dim, descending: sort(builder, x, dim, descending)[1])
rewrite("aten.msort.default", lambda x: x)(lambda builder, node, x: sort(builder, x, 0, False)[0])


def _topk_shape(
    x: TensorType, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[TensorType, TensorType]:
    if not x.rank:
        return x, x.with_dtype(DType.int64)
    at = wrap(dim, x.rank)
    if isinstance(k, int) and k > _dims.upper(x.dims[at]):
        raise ShapeError(f"topk takes {k} of {x.dims[at]} elements")
    return _shape(x, at, largest, k)


rewrite("aten.topk.default", _topk_shape)(
    lambda builder, node, x, k, dim, largest, _: sort(
        builder, x, dim, largest, k if x.type.rank else None
    )
)


def _pick(
    builder: Builder, x: Value, dim: int, keepdim: bool, rank: str, number: Size = 1
) -> tuple[Value, Value]:
    """The element of a rank along a dim, and its index; see `select`."""
    if not x.type.rank:
        return sort(builder, x, 0, False)
    at = wrap(dim, x.type.rank)
    made = select(builder, x, at, rank, number)
    if keepdim:
        return made
    values, indices = (builder.aten.squeeze.dims(value, (at,)) for value in made)
    return values, indices


def _rank_shape(
    x: TensorType, dim: int = -1, keepdim: bool = False
) -> tuple[TensorType, TensorType]:
    made = x.with_dims(reduced(x.dims, (wrap(dim, x.rank),), keepdim) if x.rank else ())
    return made, made.with_dtype(DType.int64)


rewrite("aten.kthvalue.default", lambda x, k, dim=-1, keepdim=False: _rank_shape(x, dim, keepdim))(
    lambda builder, node, x, k, dim, keepdim: _pick(builder, x, dim, keepdim, "kth", k)
)


def _median_of_all(name: str) -> Callable[..., Value]:
    def expand(builder: Builder, node: Node, x: Value) -> Value:
        if is_empty(x.type):
            return builder.aten.full((), float("nan"), x.type.dtype)
        return _pick(builder, builder.aten.view(x, (x.type.numel,)), 0, False, name)[0]

    return expand


for _name in ("median", "nanmedian"):
    rewrite(f"aten.{_name}.dim", _rank_shape)(
        lambda builder, node, x, dim, keepdim, name=_name: _pick(builder, x, dim, keepdim, name)
    )
    rewrite(f"aten.{_name}.default", lambda x: x.with_dims(()))(_median_of_all(_name))

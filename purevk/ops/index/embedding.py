"""Embeddings: rows of a table, bags of rows, and tables whose rows have a largest norm."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.facts import Moves
from purevk.ops.fold import Fold, Loop, folded
from purevk.ops.index.check import check
from purevk.ops.index.gather import NAME, GatherDims, refuse_index
from purevk.ops.registry import ShapeError, rewrite, rewrite_node
from purevk.ops.shapes import is_empty
from purevk.ops.signatures import signature


@signature("weight, indices, padding_idx: Size = -1, scale_grad_by_freq=False, sparse=False")
def _embedding_shape(weight: TensorType, indices: TensorType) -> TensorType:
    if weight.rank != 2:
        raise ShapeError(f"an embedding table has rank 2, not {weight.rank}")
    return weight.with_dims((*indices.dims, weight.dims[1]))


@rewrite_node("aten.embedding.default", _embedding_shape, supports=refuse_index, moves=Moves.SOME)
def _expand_embedding(builder: Builder, node: Node) -> Value:
    weight, indices = node.tensor("weight"), node.tensor("indices")
    rows, width = weight.type.dims
    limit = builder.traits.max_storage_range
    if weight.type.nbytes > limit and isinstance(rows, int) and isinstance(width, int):
        fit = limit // (width * weight.type.dtype.itemsize)
        return _embedding_in_parts(builder, weight, indices, rows, max(fit // 64 * 64, 1))
    rank = indices.type.rank
    dims = GatherDims((None,) * rank + (1,), (*range(rank, 0, -1), None), (0,))
    return builder.emit(NAME, weight, (indices,), node.result.type.dims, dims)


def _embedding_in_parts(
    builder: Builder, weight: Value, indices: Value, rows: int, count: int
) -> Value:
    """The embedding of a table of `rows` rows that one binding cannot span. Each part of `count`
    rows gives its own rows, and a comparison picks them."""
    column = builder.aten.unsqueeze(indices, dim=-1)
    made: Value | None = None
    for start in range(0, rows, count):
        part = builder.aten.slice.Tensor(weight, dim=0, start=start, end=min(start + count, rows))
        own = indices if start == 0 else builder.aten.sub.Tensor(indices, start)
        found = builder.aten.embedding(part, own)
        if made is not None:
            later = builder.aten.ge.Tensor(column, start)
            found = builder.aten.where.self(later, found, made)
        made = found
    if made is None:
        raise ShapeError("an embedding table has no rows")
    return made


# -- bags of embeddings --------------------------------------------------------------------------
@signature(
    "weight, indices, offsets, scale_grad_by_freq=False, mode: int = 0, sparse=False,"
    " per_sample_weights=None, include_last_offset=False, padding_idx: int = -1"
)
def _bag_shape(
    weight: TensorType,
    indices: TensorType,
    offsets: TensorType,
    mode: int,
    include_last_offset: bool,
    padding_idx: int,
) -> tuple[TensorType, ...]:
    bags = offsets.dims[0] - int(include_last_offset)
    fast = mode == 0 and padding_idx < 0 and weight.dtype in (DType.float32, DType.float16)
    best: tuple[Size, ...] = (bags, weight.dims[1]) if mode == 2 else (bags,)
    return (
        weight.with_dims((bags, weight.dims[1])),
        offsets.with_dims((0,) if fast else indices.dims),
        offsets.with_dims((bags,)),
        offsets.with_dims(best),
    )


def _renorm_shape(
    weight: TensorType, indices: TensorType, max_norm: float, norm_type: float
) -> TensorType:
    return weight


@rewrite("aten.embedding_renorm.default", _renorm_shape)
def _renorm(
    builder: Builder, node: Node, weight: Value, indices: Value, max_norm: float, norm_type: float
) -> Value:
    """The table with those of the rows that are looked up scaled to the norm `max_norm` at most."""
    flat = builder.aten.view(indices, (indices.type.numel,))
    marks = builder.aten.full((weight.type.dims[0],), fill_value=0, dtype=DType.int32)
    marks = builder.aten.index_put(
        marks,
        (flat,),
        builder.aten.full((), fill_value=1, dtype=DType.int32),
    )
    used = builder.aten.gt.Tensor(builder.aten.unsqueeze(marks, dim=1), y=0)
    norm = builder.aten.linalg_vector_norm(weight, norm_type, (1,), keepdim=True)
    long = builder.aten.logical_and(used, builder.aten.gt.Tensor(norm, max_norm))
    factor = builder.aten.div.Tensor(max_norm, builder.aten.add.Tensor(norm, y=1e-7))
    return builder.aten.where.self(long, builder.aten.mul.Tensor(weight, factor), weight)


@functools.wraps(_bag_shape)
def _forward_bag_shape(
    weight: TensorType, indices: TensorType, offsets: TensorType, *args: Any, **options: Any
) -> tuple[TensorType, ...]:
    """What torch.export records: as many lengths as there are offsets, the last one included."""
    out, bags, _, best = _bag_shape(weight, indices, offsets, *args, **options)
    return out, bags, offsets, best


@rewrite("aten._embedding_bag.default", _bag_shape)
def _bag(
    builder: Builder,
    node: Node,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    weights: Value | None,
    include_last_offset: bool,
    padding: int,
) -> tuple[Value, ...]:
    out, to_bag, sizes, best = (value.type for value in node.results)
    inputs = {"TABLE": weight, "INDEX": indices, "START": offsets}
    entries = indices.type.dims[0]
    if not is_empty(offsets.type):
        first = builder.aten.slice.Tensor(offsets, dim=0, start=0, end=1)
        check(builder, node, first, 0, 1, "the first offset is not 0", node.op)
        wrong = "an offset is not among the indices"
        check(builder, node, offsets, 0, entries + 1, wrong, node.op)
    last = offsets.type.dims[0] - 1 - int(include_last_offset)  # the last bag
    numbers = {"count": entries, "last": last}
    # The last bag takes all entries that are left, whatever the last offset is. But torch's fast
    # kernels end their sums at the last offset.
    ends_at_offset = (
        include_last_offset and mode != 2 and padding < 0 and out.dtype is not DType.float64
    )
    span = "int from = max(int(START(i0)), 0), to = i0 < last ? min(int(START(i0 + 1)), count) : count;"
    skip = "" if padding < 0 else f"if (int(INDEX(m)) == {padding}) continue;"
    entry = Loop("m", "from", "to", entries, "count", enter=skip)
    if mode == 0:  # torch needs no lengths to sum
        lengths = builder.aten.full(sizes.dims, fill_value=0, dtype=sizes.dtype)
    else:
        some = {"INDEX": indices, "START": offsets}
        counted = Fold((entry,), "r++;", before=span)
        type = sizes.with_dtype(DType.int32)
        (lengths,) = folded(builder, counted, some, type, numbers=numbers)
        inputs["LENGTH"] = lengths
        lengths = builder.aten._to_copy(lengths, sizes.dtype)
    row = "pv_index(int(INDEX(m)), table_size_0)"
    if mode == 2:
        largest = Fold(
            (entry,),
            f"BAG_STEP({row}, TABLE(row, i1))",
            join="if (v1 >= 0 && (r1 < 0 || v > r)) { r = v; r1 = v1; }",
            start="r = 0.0; r1 = -1;",
            before=span,
            finish="r1 = max(r1, 0);",
        )
        types = (out, best.with_dtype(DType.int32))
        made, rows = folded(builder, largest, inputs, *types, numbers=numbers)
    else:
        if weights is not None:
            inputs["WEIGHT"] = weights
        added = Fold(
            (replace(entry, last="min(to, int(START(i0 + 1)))" if ends_at_offset else "to"),),
            f"r += TABLE({row}, i1){'' if weights is None else ' * WEIGHT(m)'};",
            before=span,
            finish="if (LENGTH(i0) > 0) r /= T_COORD(LENGTH(i0));" if mode == 1 else "",
        )
        (made,) = folded(builder, added, inputs, out, numbers=numbers)
    if to_bag.dims == (0,):
        bags = builder.aten.full((0,), fill_value=0, dtype=to_bag.dtype)
    else:
        find = Fold(
            (Loop("k", "0", "last + 1", last + 1, "last + 1"),),
            "if (int(START(k)) <= i0) r = k;",
            join="r = max(r, v);",
            start="r = -1;",
        )
        type = to_bag.with_dtype(DType.int32)
        (bags,) = folded(builder, find, {"START": offsets}, type, numbers={"last": last})
        bags = builder.aten._to_copy(bags, to_bag.dtype)
    if mode == 2:
        return made, bags, lengths, builder.aten._to_copy(rows, best.dtype)
    if best.dims != sizes.dims:
        shorter = builder.aten.slice.Tensor(lengths, dim=0, start=0, end=best.dims[0])
        return made, bags, lengths, shorter
    return made, bags, lengths, lengths


rewrite("aten._embedding_bag_forward_only.default", _forward_bag_shape)(_bag)

"""Operators whose results have as many elements as the values of their arguments say: nonzero,
boolean indices, unique.

A running sum over the flags of the taken elements gives each of them its index in the result. Its
last element is the count, which the host reads. Memory is planned for the upper bound of the count.
Nodes that need the count run in a later segment (see `SymbolSource`). The elements are written
without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.elements import acc_of
from purevk.ops.builder import Builder
from purevk.ops.facts import Moves
from purevk.ops.fold import Fold, Loop, folded
from purevk.ops.index.check import check
from purevk.ops.map import mapped, mapped_over
from purevk.ops.registry import (
    DataDependentSize,
    DataDependentType,
    ShapeError,
    UnknownSizes,
    rewrite,
)
from purevk.ops.shapes import broadcast, equal_shapes, is_empty, wrap
from purevk.ops.sort.sort import sort
from purevk.tuning import DeviceTraits


def _flat(builder: Builder, x: Value) -> Value:
    return builder.aten.view(x, (x.type.numel,))


def _flags(builder: Builder, x: Value) -> Value:
    """Which elements are not zero, flat."""
    if x.type.dtype is not DType.bool:
        x = builder.aten.ne.Tensor(x, y=0)
    return _flat(builder, x)


def _running_count(builder: Builder, flags: Value, size: Size) -> Value:
    """The running count of the flags. The last one is the value of `size` at a call."""
    before = builder.aten.cumsum(flags, dim=0, dtype=DType.int32)
    builder.bind_symbol(size, _last(builder, before))
    return before


def _last(builder: Builder, sums: Value) -> Value:
    body = "r = 0; if (total > 0) r = int(SUMS(total - 1));"
    return mapped(
        builder,
        body,
        {"SUMS": sums},
        TensorType(DType.int32, (1,)),
        numbers={"total": sums.type.dims[0]},
    )


def _nothing(builder: Builder, node: Node) -> tuple[Value, ...]:
    return tuple(
        builder.aten.full(value.type.dims, fill_value=0, dtype=value.type.dtype)
        for value in node.results
    )


# -- masks ---------------------------------------------------------------------------------------
def _taken(builder: Builder, x: Value, mask: Value, size: Size) -> Value:
    """The rows of x[n, ...] where the flat mask[n] is true."""
    flags = _flags(builder, mask)
    before = _running_count(builder, flags, size)
    count, rest = x.type.dims[0], x.type.dims[1:]
    width = _dims.product(rest)
    rows = builder.aten.view(x, (count, width))
    made = mapped_over(
        builder,
        "if (MASK(i0) != 0) R_PUT(BEFORE(i0) - 1, i1, X(i0, i1));",
        {"X": rows, "MASK": flags, "BEFORE": before},
        (count, width),
        TensorType(x.type.dtype, (size, width)),
    )
    return builder.aten.view(made, (size, *rest))


def _coordinates(builder: Builder, mask: Value, size: Size, dtype: DType) -> Value:
    """The coordinates of the elements that are not zero, a row each."""
    flags = _flags(builder, mask)
    before = _running_count(builder, flags, size)
    rank = mask.type.rank
    if not rank:
        return builder.aten.full((size, 0), fill_value=0, dtype=dtype)
    writes, left = [], "left"
    for d in reversed(range(rank)):
        writes.append(
            f"R_PUT(at, {d}, {left} % dim_{d}); left /= dim_{d};" if d else f"R_PUT(at, 0, {left});"
        )
    body = f"if (MASK(i0) != 0) {{ int at = BEFORE(i0) - 1, left = i0; {' '.join(writes)} }}"
    return mapped_over(
        builder,
        body,
        {"MASK": flags, "BEFORE": before},
        flags.type.dims,
        TensorType(dtype, (size, rank)),
        numbers={f"dim_{d}": mask.type.dims[d] for d in range(1, rank)},
    )


def _nonzero_shape(x: TensorType) -> NoReturn:
    raise UnknownSizes(
        "how many elements are not zero is known only at a call",
        (DataDependentType(DType.int64, (DataDependentSize(x.numel), x.rank)),),
    )


@rewrite("aten.nonzero.default", _nonzero_shape, "aten.argwhere.default")
def _nonzero(builder: Builder, node: Node, x: Value) -> Value | tuple[Value, ...]:
    if is_empty(x.type):
        return _nothing(builder, node)
    return _coordinates(builder, x, node.result.type.dims[0], node.result.type.dtype)


@rewrite(
    "aten.nonzero_static.default",
    lambda x, size, fill_value=-1: TensorType(DType.int64, (size, x.rank)),
)
def _nonzero_static(builder: Builder, node: Node, x: Value, size: int, fill: int) -> Value:
    if is_empty(x.type) or is_empty(node.result.type):
        return builder.aten.full(node.result.type.dims, fill, node.result.type.dtype)
    flags = _flags(builder, x)
    found = _coordinates(builder, x, x.type.numel, DType.int32)
    total = _last(builder, builder.aten.cumsum(flags, dim=0, dtype=DType.int32))
    body = "r = fill; if (i0 < TOTAL(0)) r = FOUND(i0, i1);"
    return mapped(
        builder,
        body,
        {"FOUND": found, "TOTAL": total},
        node.result.type.with_dtype(DType.int32),
        numbers={"fill": fill},
    )


def _masked_select_shape(x: TensorType, mask: TensorType) -> NoReturn:
    # torch.export takes the elements before the broadcast for the most that there can be.
    count = DataDependentSize(_dims.product(broadcast(x.dims, mask.dims)), misstated=x.numel)
    raise UnknownSizes(
        "how many elements a mask takes is known only at a call",
        (DataDependentType(x.dtype, (count,)),),
    )


@rewrite("aten.masked_select.default", _masked_select_shape, moves=Moves.SOME)
def _masked_select(
    builder: Builder, node: Node, x: Value, mask: Value
) -> Value | tuple[Value, ...]:
    sizes = broadcast(x.type.dims, mask.type.dims)
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return _nothing(builder, node)
    x, mask = (_flat(builder, builder.aten.expand(value, sizes)) for value in (x, mask))
    return _taken(builder, x, mask, node.result.type.dims[0])


def masked_types(
    x: TensorType, indices: Sequence[TensorType | None]
) -> tuple[DataDependentType, ...] | None:
    """The type of `x[indices]` with one boolean index; None where there are others beside it."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return None
    ((dim, mask),) = given
    sizes = (*x.dims[:dim], DataDependentSize(mask.numel), *x.dims[dim + mask.rank :])
    return (DataDependentType(x.dtype, sizes),)


def index_by_mask(
    builder: Builder, node: Node, x: Value, indices: Sequence[Value | None]
) -> Value | tuple[Value, ...]:
    """`x[indices]`, one of which is boolean, all others None."""
    at, mask = next((dim, index) for dim, index in enumerate(indices) if index is not None)
    size = node.result.type.dims[at]
    if is_empty(x.type) or is_empty(mask.type):
        return _nothing(builder, node)
    if at == 0:
        rows = builder.aten.view(x, (mask.type.numel, *x.type.dims[mask.type.rank :]))
        return _taken(builder, rows, mask, size)
    found = _coordinates(builder, mask, size, DType.int32)
    columns = tuple(builder.aten.select.int(found, dim=1, index=d) for d in range(mask.type.rank))
    return builder.aten.index.Tensor(x, (*([None] * at), *columns))


# -- unique --------------------------------------------------------------------------------------
def _unique_types(x: TensorType, inverse: bool, counts: bool) -> tuple[DataDependentType, ...]:
    size = DataDependentSize(x.numel)
    return (
        DataDependentType(x.dtype, (size,)),
        DataDependentType(DType.int64, x.dims if inverse else (0,)),
        DataDependentType(DType.int64, (size,) if counts else (0,)),
    )


def _unknown_unique(types: Sequence[DataDependentType]) -> NoReturn:
    raise UnknownSizes("how many values differ is known only at a call", types)


def _unique2_shape(
    x: TensorType, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> NoReturn:
    _unknown_unique(_unique_types(x, return_inverse, return_counts))


def _slice_order(builder: Builder, rows: Value) -> Value:
    """The indices of rows in ascending order. Each row counts the rows before it."""
    dtype, (length, width) = rows.type.dtype, rows.type.dims
    less = "LESS_OR_NAN" if dtype.is_float else "LESS"
    count = Fold(
        (Loop("j", "0", "x_size_0", length, "x_size_0"),),
        f"COUNT_ROW_BEFORE({acc_of(dtype)}, {less}, x_size_1)",
        start="r = 0;",
        cost=width + 1,
    )
    type = TensorType(DType.int32, (length,))
    (before,) = folded(builder, count, {"X": rows}, type)
    return mapped_over(builder, "R_PUT(int(B(i0)), i0);", {"B": before}, (length,), type)


def _unique(
    builder: Builder,
    node: Node,
    x: Value,
    ordered: bool,
    inverse: bool,
    counts: bool,
    dim: int | None = None,
) -> tuple[Value, ...]:
    """Values, inverse and counts of the runs of equal elements (slices along `dim`), after sorting
    unless they are taken as they come (`ordered`)."""
    if is_empty(x.type):
        return _nothing(builder, node)
    at = 0 if dim is None else wrap(dim, x.type.rank)
    size = node.result.type.dims[at if dim is not None else 0]
    order: Value | None = None  # None: the rows keep their order
    if dim is None or x.type.rank < 2:
        rows = _flat(builder, x)
        if not ordered:
            rows, order = sort(builder, rows, 0, False)
        differs = "X(i0) != X(max(i0 - 1, 0))" + (
            " || pv_isnan(X(i0))" if x.type.dtype.is_float else ""
        )
        body = f"r = i0 == 0 || {differs} ? 1 : 0;"
    else:
        front = builder.aten.permute(x, (at, *(d for d in range(x.type.rank) if d != at)))
        rows = builder.aten.view(front, (x.type.dims[at], _dims.product(front.type.dims[1:])))
        if not ordered:
            order = _slice_order(builder, rows)
            rows = builder.aten.index_select(rows, dim=0, index=order)
        differs = "X(i0, c) != X(max(i0 - 1, 0), c)"
        body = f"if ({differs}) {{ r = 1; break; }}"
    length, width = rows.type.dims[0], rows.type.dims[1:]
    type = TensorType(DType.bool, (length,))
    if width:
        find = Fold(
            (Loop("c", "0", "x_size_1", width[0], "x_size_1"),),
            body,
            join="r = max(r, v);",
            start="r = 0;",
            finish="if (i0 == 0) r = 1;",
        )
        (flags,) = folded(builder, find, {"X": rows}, type)
    else:
        flags = mapped(builder, body, {"X": rows}, type)
    before = _running_count(builder, flags, size)
    column = ", i1" if width else ""
    body = f"if (FLAG(i0) != 0) R_PUT(BEFORE(i0) - 1{column}, X(i0{column}));"
    inputs = {"X": rows, "FLAG": flags, "BEFORE": before}
    found = mapped_over(builder, body, inputs, rows.type.dims, rows.type.with_dims((size, *width)))
    if width:
        found = builder.aten.view(found, (size, *front.type.dims[1:]))
        found = builder.aten.permute(found, (*range(1, at + 1), 0, *range(at + 1, x.type.rank)))
    made = [found]
    index = TensorType(node.results[1].type.dtype, (length,))
    if inverse and order is not None:
        body = "R_PUT(int(ORDER(i0)), BEFORE(i0) - 1);"
        back = mapped_over(builder, body, {"ORDER": order, "BEFORE": before}, (length,), index)
        made.append(builder.aten.view(back, node.results[1].type.dims))
    elif inverse:
        back = mapped(builder, "r = BEFORE(i0) - 1;", {"BEFORE": before}, index)
        made.append(builder.aten.view(back, node.results[1].type.dims))
    if counts:
        # Where the runs start, and the end of the last one.
        body = "if (FLAG(i0) != 0) R_PUT(BEFORE(i0) - 1, i0); if (i0 == count - 1) R_PUT(BEFORE(i0), count);"
        starts = mapped_over(
            builder,
            body,
            {"FLAG": flags, "BEFORE": before},
            (length,),
            TensorType(DType.int32, (length + 1,)),
            numbers={"count": length},
        )
        body = "if (i0 < BEFORE(count - 1)) R_PUT(i0, START(i0 + 1) - START(i0));"
        made.append(
            mapped_over(
                builder,
                body,
                {"START": starts, "BEFORE": before},
                (length,),
                node.results[2].type,
                numbers={"count": length},
            )
        )
    results = iter(made)
    return tuple(
        next(results) if wanted else builder.aten.full((0,), fill_value=0, dtype=result.type.dtype)
        for wanted, result in zip((True, inverse, counts), node.results)
    )


rewrite("aten._unique2.default", _unique2_shape)(
    lambda builder, node, x, sorted, inverse, counts: _unique(
        builder, node, x, False, inverse, counts
    )
)
rewrite(
    "aten._unique.default",
    lambda x, sorted=True, return_inverse=False: _unknown_unique(
        _unique_types(x, return_inverse, False)[:2]
    ),
)(lambda builder, node, x, sorted, inverse: _unique(builder, node, x, False, inverse, False)[:2])


def _along_types(x: TensorType, dim: int) -> tuple[DataDependentType, ...]:
    """Along a dim torch gives the inverse and the counts whether they are asked for or not."""
    at = wrap(dim, x.rank)
    size = DataDependentSize(x.dims[at])
    return (
        DataDependentType(x.dtype, (*x.dims[:at], size, *x.dims[at + 1 :])),
        DataDependentType(DType.int64, (x.dims[at],)),
        DataDependentType(DType.int64, (size,)),
    )


def _consecutive_shape(
    x: TensorType, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> NoReturn:
    _unknown_unique(
        _unique_types(x, return_inverse, return_counts) if dim is None else _along_types(x, dim)
    )


_MOST_SLICES = 8192  # each of which is compared with all


def _refuse_slices(node: Node, traits: DeviceTraits) -> str | None:
    x, dim = node.tensor("x").type, node.optional_int("dim")
    if dim is None or x.rank < 2:
        return None
    at = wrap(dim, x.rank)
    if is_empty(x):
        return "no kernel for empty slices"
    if "consecutive" in node.op:
        return None
    if _dims.upper(x.dims[at]) > _MOST_SLICES:
        return f"no kernel that sorts {x.dims[at]} slices"
    return traits.too_long(2, x.numel // x.dims[at])


rewrite("aten.unique_consecutive.default", _consecutive_shape, supports=_refuse_slices)(
    lambda builder, node, x, inverse, counts, dim: _unique(
        builder, node, x, True, inverse or dim is not None, counts or dim is not None, dim
    )
)
rewrite(
    "aten.unique_dim.default",
    lambda x, dim, sorted=True, return_inverse=False, return_counts=False: _unknown_unique(
        _along_types(x, dim)
    ),
    supports=_refuse_slices,
)(lambda builder, node, x, dim, *_: _unique(builder, node, x, False, True, True, dim))
rewrite(
    "aten.unique_dim_consecutive.default",
    lambda x, dim, return_inverse=False, return_counts=False: _unknown_unique(_along_types(x, dim)),
    supports=_refuse_slices,
)(lambda builder, node, x, dim, *_: _unique(builder, node, x, True, True, True, dim))


# -- repetitions ---------------------------------------------------------------------------------
def _repeat_shape(repeats: TensorType, output_size: Size | None = None) -> TensorType:
    if output_size is not None:
        return repeats.with_dims((output_size,))
    guess = max(64, 4 * _dims.upper(repeats.dims[0]))
    sizes = DataDependentType(repeats.dtype, (DataDependentSize(None, guess=guess),))
    raise UnknownSizes("the sum of the repetitions is known only at a call", (sizes,))


@rewrite("aten.repeat_interleave.Tensor", _repeat_shape)
def _repeat(
    builder: Builder, node: Node, repeats: Value, output_size: Size | None
) -> Value | tuple[Value, ...]:
    size = node.result.type.dims[0]
    if is_empty(repeats.type):  # as one element that is never repeated
        repeats = builder.aten.full((1,), fill_value=0, dtype=repeats.type.dtype)
    ends = builder.aten.cumsum(repeats, dim=0, dtype=DType.int32)
    check(
        builder, node, repeats, 0, _dims.UNBOUNDED, "a number of repetitions is negative", node.op
    )
    if output_size is None:
        builder.bind_symbol(size, _last(builder, ends))
    else:
        wrong = "the repetitions do not add up to output_size"
        check(builder, node, _last(builder, ends), size, size + 1, wrong, node.op)
    body = "LOOPS(loop(32)) BISECT(count, ENDS(m) <= i0) r = low;"
    made = TensorType(DType.int32, (size,))
    return mapped(builder, body, {"ENDS": ends}, made, numbers={"count": repeats.type.dims[0]})


# -- counts of values ----------------------------------------------------------------------------
def _bincount_shape(
    x: TensorType, weights: TensorType | None = None, minlength: Size = 0
) -> TensorType:
    if x.rank != 1 or (weights is not None and not equal_shapes(weights.dims, x.dims)):
        raise ShapeError(f"cannot count the values of {x}, with weights {weights}")
    dtype = DType.int64
    if weights is not None and not is_empty(x):
        dtype = DType.float32 if weights.dtype is DType.float32 else DType.float64
    guess = max(64, 2 * _dims.upper(minlength))
    raise UnknownSizes(
        "the largest value is known only at a call",
        (DataDependentType(dtype, (DataDependentSize(None, guess=guess),)),),
    )


@rewrite("aten.bincount.default", _bincount_shape)
def _bincount(
    builder: Builder, node: Node, x: Value, weights: Value | None, minlength: Size
) -> Value | tuple[Value, ...]:
    size, dtype = node.result.type.dims[0], node.result.type.dtype
    if is_empty(x.type):
        count = builder.aten.full((1,), fill_value=minlength, dtype=DType.int32)
        builder.bind_symbol(size, count)
        return builder.aten.full((size,), fill_value=0, dtype=dtype)
    given, x = x, builder.aten._to_copy(x, DType.int32)
    indices = given if given.type.dtype is DType.int64 else x
    check(builder, node, indices, 0, _dims.UNBOUNDED, "a value to count is negative", node.op)
    least = builder.aten.full((1,), fill_value=minlength - 1, dtype=DType.int32)
    last = builder.aten.amax(builder.aten.cat((x, least)), (0,), True)
    builder.bind_symbol(size, builder.aten.add.Scalar(last, y=1))
    if weights is None:
        dtype = DType.int32
        weights = builder.aten.full(x.type.dims, fill_value=1, dtype=dtype)
    zeros = builder.aten.full((size,), fill_value=0, dtype=dtype)
    weights = builder.aten._to_copy(weights, dtype)
    return builder.aten.index_put(zeros, (x,), weights, accumulate=True)

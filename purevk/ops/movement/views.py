"""Operators that move no data: their result is another layout of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from purevk.ir import Arg, Dim, Layout, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.facts import (
    Moves,
    Rowwise,
    by_element,
    of_permute,
    of_reversed_dims,
    of_transpose,
)
from purevk.ops.registry import Operator, ShapeError, View, register
from purevk.ops.shapes import reshape, wrap, wrap_all


def view_layout(layout: Layout, sizes: Sequence[Size], wanted: Sequence[Size]) -> Layout | None:
    """The layout of a tensor of `sizes` viewed as `wanted`, or None if no strides can express it.

    As in `Tensor.view`, runs of dims that are dense within one another are matched with runs of
    wanted dims that have as many elements.
    """
    old = [(size, stride) for size, stride in zip(sizes, layout.strides) if size != 1]
    strides: list[Size] = [0] * len(wanted)
    new = [position for position, size in enumerate(wanted) if size != 1]
    at = 0
    while at < len(old):
        if not new:
            return None
        size, run = old[at][0], 1
        group = [new.pop(0)]
        total = wanted[group[0]]
        # The last runs have as many elements as one another, since all dims together have.
        while (new or at + run < len(old)) and size != total:
            if _dims.hint(size) < _dims.hint(total):
                if at + run >= len(old):
                    return None
                inner_size, inner_stride = old[at + run]
                if old[at + run - 1][1] != inner_size * inner_stride:
                    return None
                size, run = size * inner_size, run + 1
            else:
                if not new:
                    return None
                group.append(new.pop(0))
                total = total * wanted[group[-1]]
        step = old[at + run - 1][1]
        for position in reversed(group):
            strides[position] = step
            step = step * wanted[position]
        at += run
    if new:
        return None
    return Layout(layout.offset, tuple(strides))


def _view(
    name: str,
    shape: Callable[..., TensorType | tuple[TensorType, ...]],
    layout: Callable[..., tuple[Layout, ...] | None],
    *names: str,
    moves: Moves | None = None,
    rowwise: Rowwise | None = None,
) -> None:
    register(Operator(name, shape, View(layout), names=names, moves=moves, rowwise=rowwise))


def _view_shape(x: TensorType, size: Sequence[Size]) -> TensorType:
    return x.with_dims(reshape(x.dims, size))


def _by_size(
    layout: Layout, x: TensorType, results: tuple[TensorType, ...], *args: Arg
) -> tuple[Layout, ...] | None:
    if 0 in x.dims:
        return (Layout.dense(results[0].dims),)
    seen = view_layout(layout, x.dims, results[0].dims)
    return None if seen is None else (seen,)


_view(
    "aten.view.default",
    _view_shape,
    _by_size,
    "aten.view_copy.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten._reshape_copy.default",
    moves=Moves.IN_ORDER,
)


def _squeeze_shape(x: TensorType, dim: Sequence[int] | int | None = None) -> TensorType:
    if dim is not None and not isinstance(dim, int) and not dim:
        return x
    chosen = wrap_all(dim, x.rank) if x.rank else ()
    return x.with_dims([size for d, size in enumerate(x.dims) if not (d in chosen and size == 1)])


_view(
    "aten.squeeze.dims",
    _squeeze_shape,
    _by_size,
    "aten.squeeze_copy.dims",
    "aten.squeeze.dim",
    "aten.squeeze_copy.dim",
    "aten.squeeze.default",
    "aten.squeeze_copy.default",
    moves=Moves.IN_ORDER,
)


def _unsqueeze_shape(x: TensorType, dim: int) -> TensorType:
    at = wrap(dim, x.rank + 1)
    return x.with_dims((*x.dims[:at], 1, *x.dims[at:]))


_view(
    "aten.unsqueeze.default",
    _unsqueeze_shape,
    _by_size,
    "aten.unsqueeze_copy.default",
    moves=Moves.IN_ORDER,
)


def _flatten_shape(x: TensorType, start_dim: int = 0, end_dim: int = -1) -> TensorType:
    if not x.rank:
        return x.with_dims((1,))
    start, end = wrap(start_dim, x.rank), wrap(end_dim, x.rank)
    return x.with_dims(
        (*x.dims[:start], _dims.product(x.dims[start : end + 1]), *x.dims[end + 1 :])
    )


_view("aten.flatten.using_ints", _flatten_shape, _by_size, moves=Moves.IN_ORDER)


def _permute_shape(x: TensorType, dims: Sequence[int]) -> TensorType:
    order = [wrap(d, x.rank) for d in dims]
    if sorted(order) != list(range(x.rank)):
        raise ShapeError(f"permute dims {list(dims)} are no permutation of rank {x.rank}")
    return x.with_dims([x.dims[d] for d in order])


def _permute_layout(
    layout: Layout,
    x: TensorType,
    results: tuple[TensorType, ...],
    value: Value,
    dims: Sequence[int],
) -> tuple[Layout, ...]:
    return (Layout(layout.offset, tuple(layout.strides[wrap(d, x.rank)] for d in dims)),)


_view(
    "aten.permute.default",
    _permute_shape,
    _permute_layout,
    "aten.permute_copy.default",
    moves=Moves.ALL,
    rowwise=of_permute,
)


def _transpose_shape(x: TensorType, dim0: int, dim1: int) -> TensorType:
    sizes = list(x.dims)
    if sizes:
        a, b = wrap(dim0, x.rank), wrap(dim1, x.rank)
        sizes[a], sizes[b] = sizes[b], sizes[a]
    return x.with_dims(sizes)


def _transpose_layout(
    layout: Layout,
    x: TensorType,
    results: tuple[TensorType, ...],
    value: Value,
    dim0: int,
    dim1: int,
) -> tuple[Layout, ...]:
    strides = list(layout.strides)
    if strides:
        a, b = wrap(dim0, x.rank), wrap(dim1, x.rank)
        strides[a], strides[b] = strides[b], strides[a]
    return (Layout(layout.offset, tuple(strides)),)


_view(
    "aten.transpose.int",
    _transpose_shape,
    _transpose_layout,
    "aten.transpose_copy.int",
    moves=Moves.ALL,
    rowwise=of_transpose,
)


def _t_shape(x: TensorType) -> TensorType:
    if x.rank > 2:
        raise ShapeError(f"t() takes a tensor of rank 2 at most, not {x.rank}")
    return x.with_dims(x.dims[::-1])


_view(
    "aten.t.default",
    _t_shape,
    lambda layout, x, results, value: (Layout(layout.offset, layout.strides[::-1]),),
    "aten.t_copy.default",
    moves=Moves.ALL,
    rowwise=of_reversed_dims,
)


_view(
    "aten.numpy_T.default",
    lambda x: x.with_dims(x.dims[::-1]),
    lambda layout, x, results, value: (Layout(layout.offset, layout.strides[::-1]),),
    moves=Moves.ALL,
    rowwise=of_reversed_dims,
)


def _expand_shape(x: TensorType, size: Sequence[Size], implicit: bool = False) -> TensorType:
    lead = len(size) - x.rank
    if lead < 0:
        raise ShapeError(f"cannot expand {x} to {list(size)}")
    sizes: list[Size] = []
    for position, wanted in enumerate(size):
        present = x.dims[position - lead] if position >= lead else 1
        if isinstance(wanted, int) and wanted == -1:
            sizes.append(present)
        elif present == wanted or present == 1:
            sizes.append(wanted)
        else:
            raise ShapeError(f"cannot expand {x} to {list(size)}")
    return x.with_dims(sizes)


def _expand_layout(
    layout: Layout, x: TensorType, results: tuple[TensorType, ...], value: Value, *rest: Arg
) -> tuple[Layout, ...]:
    lead = results[0].rank - x.rank
    strides = tuple(
        layout.strides[position - lead]
        if position >= lead and x.dims[position - lead] == size
        else 0
        for position, size in enumerate(results[0].dims)
    )
    return (Layout(layout.offset, strides),)


_view(
    "aten.expand.default",
    _expand_shape,
    _expand_layout,
    "aten.expand_copy.default",
    rowwise=by_element,
)


def slice_bounds(size: Size, start: Size | None, end: Size | None, step: int) -> tuple[Size, Size]:
    """First index and number of elements of `[start:end:step]` along a dim, as Python counts."""
    low = _bounded(0 if start is None else start, size)
    high = _bounded(
        size if end is None or (isinstance(end, int) and end >= 2**31 - 1) else end, size
    )
    length = high - low
    return low, _dims.maximum(_dims.ceil_div(length, step) if step != 1 else length, 0)


def _bounded(index: Size, size: Size) -> Size:
    literal = isinstance(index, int)
    if _dims.upper(index) < 0:
        index = index + size
    if isinstance(index, int):
        return _dims.minimum(_dims.maximum(index, 0), size)
    if _follows_from_data(index):
        # A position that only a call knows is taken at its word: `position_limits` has it checked.
        return _dims.maximum(index, 0) if literal else index
    # Sizes mostly lie within. torch takes the nearest one where they do not.
    if not _dims.assume(index, ">=", 0):
        return 0
    return index if _dims.assume(index, "<=", size) else size


def _follows_from_data(size: Size) -> bool:
    return any(symbol.unbacked or not symbol.is_size for symbol in _dims.symbols(size))


def _slice_shape(
    x: TensorType, dim: int = 0, start: Size | None = None, end: Size | None = None, step: int = 1
) -> TensorType:
    at = wrap(dim, x.rank)
    _, length = slice_bounds(x.dims[at], start, end, step)
    return x.with_dims((*x.dims[:at], length, *x.dims[at + 1 :]))


def _slice_layout(
    layout: Layout,
    x: TensorType,
    results: tuple[TensorType, ...],
    value: Value,
    dim: int,
    start: Size | None,
    end: Size | None,
    step: int,
) -> tuple[Layout, ...]:
    at = wrap(dim, x.rank)
    low, _ = slice_bounds(x.dims[at], start, end, step)
    strides = tuple(stride * step if d == at else stride for d, stride in enumerate(layout.strides))
    return (Layout(layout.offset + low * layout.strides[at], strides),)


_view("aten.slice.Tensor", _slice_shape, _slice_layout, "aten.slice_copy.Tensor")


def _part_layout(
    layout: Layout,
    x: TensorType,
    results: tuple[TensorType, ...],
    value: Value,
    dim: int,
    start: int,
    size: Size,
) -> tuple[Layout, ...]:
    return (Layout(layout.offset + start * layout.strides[dim], layout.strides),)


# A slice whose start is a number whatever the sizes of the call: nothing is read if they are smaller.
_view(
    "purevk.part",
    lambda x, dim, start, size: x.with_dims((*x.dims[:dim], size, *x.dims[dim + 1 :])),
    _part_layout,
)


def _select_shape(x: TensorType, dim: int, index: Size) -> TensorType:
    at = wrap(dim, x.rank)
    size = x.dims[at]
    if not _follows_from_data(index) and not _follows_from_data(size):
        position = position_of(index, size)
        if not (_dims.assume(position, ">=", 0) and _dims.assume(position, "<", size)):
            raise ShapeError(f"index {index} is outside of dim {at} of {x}")
    return x.with_dims((*x.dims[:at], *x.dims[at + 1 :]))


def position_of(index: Size, size: Size) -> Size:
    """The position along a dim that an index stands for, which may count from the end."""
    negative = _dims.upper(index) < 0 if _follows_from_data(index) else index < 0
    return index + size if negative else index


def _select_layout(
    layout: Layout,
    x: TensorType,
    results: tuple[TensorType, ...],
    value: Value,
    dim: int,
    index: Size,
) -> tuple[Layout, ...]:
    at = wrap(dim, x.rank)
    strides = (*layout.strides[:at], *layout.strides[at + 1 :])
    return (Layout(layout.offset + position_of(index, x.dims[at]) * layout.strides[at], strides),)


_view("aten.select.int", _select_shape, _select_layout, "aten.select_copy.int")


def _split_shape(
    x: TensorType, split_sizes: Sequence[Size] | Size, dim: int = 0
) -> tuple[TensorType, ...]:
    return tuple(
        x.with_dims((*x.dims[: wrap(dim, x.rank)], size, *x.dims[wrap(dim, x.rank) + 1 :]))
        for size in split_lengths(x, split_sizes, dim)
    )


def split_lengths(x: TensorType, split_sizes: Sequence[Size] | Size, dim: int) -> list[Size]:
    """The lengths of the pieces of a split along `dim`, from their list or from one length for all
    but the last."""
    if isinstance(split_sizes, (int, Dim)):
        size, step = _dims.specialize(x.dims[wrap(dim, x.rank)]), int(split_sizes)
        return [min(step, size - at) for at in range(0, size, step)] or [0]
    return list(split_sizes)


def _split_layout(
    layout: Layout,
    x: TensorType,
    results: tuple[TensorType, ...],
    value: Value,
    split_sizes: Sequence[Size] | Size,
    dim: int,
) -> tuple[Layout, ...]:
    at = wrap(dim, x.rank)
    position: Size = 0
    layouts = []
    for type in results:
        layouts.append(Layout(layout.offset + position * layout.strides[at], layout.strides))
        position = position + type.dims[at]
    return tuple(layouts)


_view(
    "aten.split_with_sizes.default",
    _split_shape,
    _split_layout,
    "aten.split_with_sizes_copy.default",
    "aten.split.Tensor",
    "aten.split_copy.Tensor",
    "aten.split.sizes",
)


def _unbind_shape(x: TensorType, dim: int = 0) -> tuple[TensorType, ...]:
    at = wrap(dim, x.rank)
    return (x.with_dims((*x.dims[:at], *x.dims[at + 1 :])),) * _dims.specialize(x.dims[at])


def _unbind_layout(
    layout: Layout, x: TensorType, results: tuple[TensorType, ...], value: Value, dim: int
) -> tuple[Layout, ...]:
    at = wrap(dim, x.rank)
    strides = (*layout.strides[:at], *layout.strides[at + 1 :])
    return tuple(
        Layout(layout.offset + n * layout.strides[at], strides) for n in range(len(results))
    )


_view("aten.unbind.int", _unbind_shape, _unbind_layout, "aten.unbind_copy.int")


def _diagonal_shape(x: TensorType, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TensorType:
    a, b = wrap(dim1, x.rank), wrap(dim2, x.rank)
    rows, columns = x.dims[a], x.dims[b]
    length = (
        _dims.minimum(rows, columns - offset)
        if offset >= 0
        else _dims.minimum(rows + offset, columns)
    )
    return x.with_dims(
        (*(size for d, size in enumerate(x.dims) if d not in (a, b)), _dims.maximum(length, 0))
    )


def _diagonal_layout(
    layout: Layout,
    x: TensorType,
    results: tuple[TensorType, ...],
    value: Value,
    offset: int,
    dim1: int,
    dim2: int,
) -> tuple[Layout, ...]:
    a, b = wrap(dim1, x.rank), wrap(dim2, x.rank)
    start = offset * layout.strides[b] if offset >= 0 else -offset * layout.strides[a]
    kept = tuple(stride for d, stride in enumerate(layout.strides) if d not in (a, b))
    return (Layout(layout.offset + start, (*kept, layout.strides[a] + layout.strides[b])),)


_view("aten.diagonal.default", _diagonal_shape, _diagonal_layout, "aten.diagonal_copy.default")


def _as_strided_shape(
    x: TensorType, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None = None
) -> TensorType:
    return x.with_dims(size)


def _as_strided_layout(
    layout: Layout,
    x: TensorType,
    results: tuple[TensorType, ...],
    value: Value,
    size: Sequence[Size],
    stride: Sequence[Size],
    offset: Size | None,
) -> tuple[Layout, ...] | None:
    if not layout.is_contiguous(x.dims):
        return None
    return (Layout(layout.offset + (offset or 0), tuple(stride)),)


_view(
    "aten.as_strided.default",
    _as_strided_shape,
    _as_strided_layout,
    "aten.as_strided_copy.default",
)


def _unfold_shape(x: TensorType, dimension: int, size: int, step: int) -> TensorType:
    if not x.rank:
        return x.with_dims((size,))
    at = wrap(dimension, x.rank)
    count = (x.dims[at] - size) // step + 1
    return x.with_dims((*x.dims[:at], _dims.maximum(count, 0), *x.dims[at + 1 :], size))


def _unfold_layout(
    layout: Layout,
    x: TensorType,
    results: tuple[TensorType, ...],
    value: Value,
    dimension: int,
    size: int,
    step: int,
) -> tuple[Layout, ...]:
    if not x.rank:
        return (Layout(layout.offset, (1,)),)
    at = wrap(dimension, x.rank)
    strides = tuple(stride * step if d == at else stride for d, stride in enumerate(layout.strides))
    return (Layout(layout.offset, (*strides, layout.strides[at])),)


_view("aten.unfold.default", _unfold_shape, _unfold_layout, "aten.unfold_copy.default")

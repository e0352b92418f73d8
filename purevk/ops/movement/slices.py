"""Views of parts of a tensor: slices, selections, splits, diagonals."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.ir import Dim, Layout, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.movement.views import define_view
from purevk.ops.registry import ShapeError
from purevk.ops.shapes import piece_count, wrap
from purevk.ops.signatures import signature


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


@signature("layout, x, results, value, dim, start, end, step")
def _slice_layout(
    layout: Layout, x: TensorType, dim: int, start: Size | None, end: Size | None, step: int
) -> tuple[Layout, ...]:
    at = wrap(dim, x.rank)
    low, _ = slice_bounds(x.dims[at], start, end, step)
    strides = tuple(stride * step if d == at else stride for d, stride in enumerate(layout.strides))
    return (Layout(layout.offset + low * layout.strides[at], strides),)


define_view("aten.slice.Tensor", _slice_shape, _slice_layout, "aten.slice_copy.Tensor")


@signature("layout, x, results, value, dim, start, size")
def _part_layout(layout: Layout, dim: int, start: int) -> tuple[Layout, ...]:
    return (Layout(layout.offset + start * layout.strides[dim], layout.strides),)


# A slice whose start is a number whatever the sizes of the call: nothing is read if they are smaller.
define_view(
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


@signature("layout, x, results, value, dim, index")
def _select_layout(layout: Layout, x: TensorType, dim: int, index: Size) -> tuple[Layout, ...]:
    at = wrap(dim, x.rank)
    strides = (*layout.strides[:at], *layout.strides[at + 1 :])
    return (Layout(layout.offset + position_of(index, x.dims[at]) * layout.strides[at], strides),)


define_view("aten.select.int", _select_shape, _select_layout, "aten.select_copy.int")


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
        piece_count(-(-size // step))
        return [min(step, size - at) for at in range(0, size, step)] or [0]
    return list(split_sizes)


@signature("layout, x, results, value, split_sizes, dim")
def _split_layout(
    layout: Layout, x: TensorType, results: tuple[TensorType, ...], dim: int
) -> tuple[Layout, ...]:
    at = wrap(dim, x.rank)
    position: Size = 0
    layouts = []
    for type in results:
        layouts.append(Layout(layout.offset + position * layout.strides[at], layout.strides))
        position = position + type.dims[at]
    return tuple(layouts)


define_view(
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
    return (x.with_dims((*x.dims[:at], *x.dims[at + 1 :])),) * piece_count(x.dims[at])


def _unbind_layout(
    layout: Layout, x: TensorType, results: tuple[TensorType, ...], value: Value, dim: int
) -> tuple[Layout, ...]:
    at = wrap(dim, x.rank)
    strides = (*layout.strides[:at], *layout.strides[at + 1 :])
    return tuple(
        Layout(layout.offset + n * layout.strides[at], strides) for n in range(len(results))
    )


define_view("aten.unbind.int", _unbind_shape, _unbind_layout, "aten.unbind_copy.int")


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


@signature("layout, x, results, value, offset, dim1, dim2")
def _diagonal_layout(
    layout: Layout, x: TensorType, offset: int, dim1: int, dim2: int
) -> tuple[Layout, ...]:
    a, b = wrap(dim1, x.rank), wrap(dim2, x.rank)
    start = offset * layout.strides[b] if offset >= 0 else -offset * layout.strides[a]
    kept = tuple(stride for d, stride in enumerate(layout.strides) if d not in (a, b))
    return (Layout(layout.offset + start, (*kept, layout.strides[a] + layout.strides[b])),)


define_view(
    "aten.diagonal.default", _diagonal_shape, _diagonal_layout, "aten.diagonal_copy.default"
)

"""Operators that move no data: their result is another layout of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from purevk.ir import Arg, Layout, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.facts import (
    Moves,
    Rowwise,
    by_element,
    of_permute,
    of_reversed_dims,
    of_transpose,
)
from purevk.ops.registry import ShapeError, View, define
from purevk.ops.shapes import reshape, wrap, wrap_all
from purevk.ops.signatures import signature


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


def define_view(
    name: str,
    shape: Callable[..., TensorType | tuple[TensorType, ...]],
    layout: Callable[..., tuple[Layout, ...] | None],
    *names: str,
    moves: Moves | None = None,
    rowwise: Rowwise | None = None,
) -> None:
    define(name, shape, View(layout), names=names, moves=moves, rowwise=rowwise)


def _view_shape(x: TensorType, size: Sequence[Size]) -> TensorType:
    return x.with_dims(reshape(x.dims, size))


def _by_size(
    layout: Layout, x: TensorType, results: tuple[TensorType, ...], *args: Arg
) -> tuple[Layout, ...] | None:
    if 0 in x.dims:
        return (Layout.dense(results[0].dims),)
    seen = view_layout(layout, x.dims, results[0].dims)
    if seen is None and layout.strides == Layout.dense(x.dims).strides:
        seen = Layout(layout.offset, Layout.dense(results[0].dims).strides)
    return None if seen is None else (seen,)


define_view(
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


define_view(
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


define_view(
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


define_view("aten.flatten.using_ints", _flatten_shape, _by_size, moves=Moves.IN_ORDER)


def _permute_shape(x: TensorType, dims: Sequence[int]) -> TensorType:
    order = [wrap(d, x.rank) for d in dims]
    if sorted(order) != list(range(x.rank)):
        raise ShapeError(f"permute dims {list(dims)} are no permutation of rank {x.rank}")
    return x.with_dims([x.dims[d] for d in order])


@signature("layout, x, results, value, dims")
def _permute_layout(layout: Layout, x: TensorType, dims: Sequence[int]) -> tuple[Layout, ...]:
    return (Layout(layout.offset, tuple(layout.strides[wrap(d, x.rank)] for d in dims)),)


define_view(
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


@signature("layout, x, results, value, dim0, dim1")
def _transpose_layout(layout: Layout, x: TensorType, dim0: int, dim1: int) -> tuple[Layout, ...]:
    strides = list(layout.strides)
    if strides:
        a, b = wrap(dim0, x.rank), wrap(dim1, x.rank)
        strides[a], strides[b] = strides[b], strides[a]
    return (Layout(layout.offset, tuple(strides)),)


define_view(
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


define_view(
    "aten.t.default",
    _t_shape,
    lambda layout, x, results, value: (Layout(layout.offset, layout.strides[::-1]),),
    "aten.t_copy.default",
    moves=Moves.ALL,
    rowwise=of_reversed_dims,
)


define_view(
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
        elif present == wanted or present == 1 or _dims.assume(present, "==", wanted):
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


define_view(
    "aten.expand.default",
    _expand_shape,
    _expand_layout,
    "aten.expand_copy.default",
    rowwise=by_element,
)


def _as_strided_shape(
    x: TensorType, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None = None
) -> TensorType:
    return x.with_dims(size)


@signature("layout, x, results, value, size, stride, offset")
def _as_strided_layout(
    layout: Layout, x: TensorType, stride: Sequence[Size], offset: Size | None
) -> tuple[Layout, ...] | None:
    if not layout.is_contiguous(x.dims):
        return None
    return (Layout(layout.offset + (offset or 0), tuple(stride)),)


define_view(
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


@signature("layout, x, results, value, dimension, size, step")
def _unfold_layout(layout: Layout, x: TensorType, dimension: int, step: int) -> tuple[Layout, ...]:
    if not x.rank:
        return (Layout(layout.offset, (1,)),)
    at = wrap(dimension, x.rank)
    strides = tuple(stride * step if d == at else stride for d, stride in enumerate(layout.strides))
    return (Layout(layout.offset, (*strides, layout.strides[at])),)


define_view("aten.unfold.default", _unfold_shape, _unfold_layout, "aten.unfold_copy.default")

"""Tensors seen as elements of another dtype: other names of the same bytes."""

from __future__ import annotations

from collections.abc import Callable

from purevk.dtypes import DType
from purevk.ir import Layout, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.facts import Moves
from purevk.ops.registry import ShapeError, View, define

VIEW_DTYPE = "aten.view.dtype"


def _shape(x: TensorType, dtype: DType) -> TensorType:
    """As `Tensor.view(dtype)`: the last dim has as many bytes as before."""
    old, new = x.dtype.itemsize, dtype.itemsize
    if old == new:
        return x.with_dtype(dtype)
    if not x.rank:
        raise ShapeError(
            f"a tensor without dims, {x}, cannot be viewed as {dtype}: it is not as large"
        )
    last = x.dims[-1]
    if new > old and last % (new // old) != 0:
        raise ShapeError(f"the last dim of {x} has no whole number of elements of {dtype}")
    last = last * (old // new) if old > new else last // (new // old)
    return TensorType(dtype, (*x.dims[:-1], last))


def _layout(
    layout: Layout, x: TensorType, results: tuple[TensorType, ...], value: Value, dtype: DType
) -> tuple[Layout] | None:
    old, new = x.dtype.itemsize, results[0].dtype.itemsize
    if old == new:
        return (layout,)
    if layout.strides[-1] != 1 and x.dims[-1] != 1:
        return None
    if old > new:
        return (_scaled(layout, lambda place: place * (old // new)),)
    ratio = new // old
    if all(_dims.gcd_of(place) % ratio == 0 for place in (layout.offset, *layout.strides[:-1])):
        return (_scaled(layout, lambda place: place // ratio),)
    if layout.offset != 0 or not layout.is_contiguous(x.dims):
        return None
    return (Layout.dense(results[0].dims),)


def _scaled(layout: Layout, scale: Callable[[Size], Size]) -> Layout:
    return Layout(scale(layout.offset), (*map(scale, layout.strides[:-1]), 1))


define(VIEW_DTYPE, _shape, View(_layout), names=("aten.view_copy.dtype",), moves=Moves.NO)

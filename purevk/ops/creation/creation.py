"""Tensors made from numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from purevk.dtypes import DType
from purevk.ir import Dim, Node, Scalar, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.creation.shapes import LIKE, TENSOR, like, sized
from purevk.ops.elementwise.program import constant
from purevk.ops.facts import Moves
from purevk.ops.promotion import wide_type
from purevk.ops.registry import Rewrite, ShapeError, define, rewrite_node
from purevk.ops.signatures import signature

Real = Size | float
_DIGITS = 2**20  # largest factor of a size below 2**31 that leaves all digits in a double


def _number_type(number: TensorType | Scalar) -> DType:
    if isinstance(number, bool):
        return DType.bool
    return DType.int64 if isinstance(number, (int, Dim)) else DType.float32


@signature(f"size, fill_value, {TENSOR}")
def _full_shape(
    size: Sequence[Size], fill_value: TensorType | Scalar, dtype: DType | None
) -> TensorType:
    return TensorType(dtype or _number_type(fill_value), tuple(size))


def _filled(builder: Builder, node: Node, number: Value | Scalar) -> Value:
    """The result of a node with the same number everywhere."""
    return constant(builder, number, node.result.type.dims, node.result.type.dtype)


@signature(f"s, {TENSOR}")
def _scalar_tensor_shape(dtype: DType | None) -> TensorType:
    return TensorType(dtype or DType.float32, ())


rewrite_node("aten.scalar_tensor.default", _scalar_tensor_shape)(
    lambda builder, node: _filled(builder, node, node.tensor_or_scalar("s"))
)


@rewrite_node("aten.full_like.default", signature(f"x, fill_value, {LIKE}")(like))
@rewrite_node("aten.full.default", _full_shape)
def _expand_full(builder: Builder, node: Node) -> Value:
    return _filled(builder, node, node.tensor_or_scalar("fill_value"))


def _constant(name: str, number: int) -> None:
    form = Rewrite(lambda builder, node: _filled(builder, node, number))
    define(f"aten.{name}.default", sized, form)
    define(f"aten.{name}_like.default", like, form)


_constant("zeros", 0)
_constant("ones", 1)


@signature(f"start, end, step=1, {TENSOR}")
def _arange_shape(start: Real, end: Real, step: Real, dtype: DType | None) -> TensorType:
    numbers = (start, end, step)
    floats = any(isinstance(number, float) for number in numbers)
    dtype = dtype or (DType.float32 if floats else DType.int64)
    if not floats or dtype is DType.int64:
        low, high, by = (int(number) if isinstance(number, float) else number for number in numbers)
    elif any(isinstance(number, Dim) for number in numbers):
        low, high, by = _as_integers(numbers)
    else:
        first, last, distance = map(float, numbers)
        return TensorType(dtype, (max(math.ceil((last - first) / distance), 0),))
    length = high - low if isinstance(by, int) and by == 1 else -((low - high) // by)
    return TensorType(dtype, (_dims.maximum(length, 0),))


def _as_integers(numbers: Sequence[Real]) -> list[Size]:
    """Sizes and real numbers times what makes all of them integers. It is a power of two, and so
    small that the doubles that torch computes with have all digits."""
    scale = max(Fraction(number).denominator for number in numbers if not isinstance(number, Dim))
    if scale > _DIGITS:
        raise ShapeError(f"arange of a size that is known only at a call, and of {numbers}")
    return [
        number * scale if isinstance(number, Dim) else int(number * scale) for number in numbers
    ]


@rewrite_node("aten.arange.start_step", _arange_shape)
def _expand_arange(builder: Builder, node: Node) -> Value:
    start, step = node.scalar("start"), node.scalar("step")
    out = node.result.type
    if out.dtype.is_int:
        start, step = (
            int(number) if isinstance(number, float) else number for number in (start, step)
        )
    number = builder.purevk.iota(out.dims[0], DType.int32 if out.dtype.is_float else out.dtype)
    floats = isinstance(start, float) or isinstance(step, float)
    if floats:
        number = builder.aten._to_copy(number, wide_type(out.dtype))
    if not (isinstance(step, (int, float)) and step == 1):
        number = builder.aten.mul.Tensor(number, step)
    if not (isinstance(start, (int, float)) and start == 0):
        number = builder.aten.add.Tensor(number, start)
    return builder.aten._to_copy(number, out.dtype)


@signature(f"start, end, {TENSOR}")
def _arange_start_shape(start: Real, end: Real, dtype: DType | None) -> TensorType:
    return _arange_shape(start, end, 1, dtype)


rewrite_node("aten.arange.start", _arange_start_shape)(
    lambda builder, node: builder.aten.arange.start_step(
        node.scalar("start"),
        node.scalar("end"),
        step=1,
        dtype=node.result.type.dtype,
    )
)


@signature(f"end, {TENSOR}")
def _arange_end_shape(end: Real, dtype: DType | None) -> TensorType:
    return _arange_shape(0, end, 1, dtype)


rewrite_node("aten.arange.default", _arange_end_shape)(
    lambda builder, node: builder.aten.arange.start_step(
        0, node.scalar("end"), step=1, dtype=node.result.type.dtype
    )
)


def _repeat_shape(x: TensorType, repeats: Sequence[Size]) -> TensorType:
    lead = len(repeats) - x.rank
    return x.with_dims(
        [count * (x.dims[d - lead] if d >= lead else 1) for d, count in enumerate(repeats)]
    )


@rewrite_node("aten.repeat.default", _repeat_shape, moves=Moves.SOME)
def _expand_repeat(builder: Builder, node: Node) -> Value:
    x, repeats = node.tensor("x"), node.sizes("repeats")
    sizes = ((1,) * (len(repeats) - x.type.rank)) + tuple(x.type.dims)
    split = builder.aten.view(x, tuple(s for size in sizes for s in (1, size)))
    wide = builder.aten.expand(
        split,
        tuple(s for size, count in zip(sizes, repeats) for s in (count, size)),
    )
    return builder.aten.view(wide, node.result.type.dims)

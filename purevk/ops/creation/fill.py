"""More operators that create tensors: empty, new, fill, eye, linspace, stack, triangle indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Arg, Dim, Node, Scalar, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.creation.shapes import LIKE, TENSOR, like, sized
from purevk.ops.elementwise.program import constant
from purevk.ops.facts import Moves
from purevk.ops.map import mapped
from purevk.ops.promotion import promote_types, wide_type
from purevk.ops.registry import ShapeError, rewrite
from purevk.ops.shapes import equal_shapes, wrap
from purevk.ops.signatures import signature


def _all(number: Scalar) -> Callable[..., Value]:
    """Expands to a tensor with the same number everywhere."""
    return lambda builder, node, *_: constant(
        builder, number, node.result.type.dims, node.result.type.dtype
    )


# Nothing says what an empty tensor holds: zeros.
rewrite(
    "aten.empty.memory_format",
    signature(f"size, {LIKE}")(sized),
    "dim_order_ops._empty_dim_order.default",
)(_all(0))
rewrite("aten.empty_strided.default", signature(f"size, stride, {TENSOR}")(sized))(_all(0))
rewrite("aten.empty_like.default", like)(_all(0))


@signature(f"x, size, {TENSOR}")
def _new_shape(x: TensorType, size: Sequence[Size], dtype: DType | None) -> TensorType:
    return TensorType(dtype or x.dtype, tuple(size))


rewrite("aten.new_empty.default", _new_shape)(_all(0))
rewrite("aten.new_zeros.default", _new_shape)(_all(0))
rewrite("aten.new_ones.default", _new_shape)(_all(1))
rewrite("aten.new_empty_strided.default", signature(f"x, size, stride, {TENSOR}")(_new_shape))(
    _all(0)
)
rewrite("aten.new_full.default", signature(f"x, size, fill_value, {TENSOR}")(_new_shape))(
    lambda builder, node, x, size, number, *_: constant(
        builder, number, size, node.result.type.dtype
    )
)


@rewrite("aten.fill.Scalar", lambda x, value: x, "aten.fill.Tensor")
def _fill(builder: Builder, node: Node, x: Value, number: Value | Scalar) -> Value:
    if isinstance(number, Value):
        return builder.aten.expand(
            builder.aten._to_copy(number, x.type.dtype),
            x.type.dims,
        )
    return constant(builder, number, x.type.dims, x.type.dtype)


rewrite("aten.zero.default", lambda x: x)(
    lambda builder, node, x: constant(builder, 0, x.type.dims, x.type.dtype)
)


@rewrite("aten.eye.m", signature(f"n, m, {TENSOR}")(lambda n, m, dtype: sized((n, m), dtype)))
@rewrite("aten.eye.default", signature(f"n, {TENSOR}")(lambda n, dtype: sized((n, n), dtype)))
def _eye(builder: Builder, node: Node, *_: Arg) -> Value:
    return mapped(builder, "r = i0 == i1 ? T_R(1) : T_R(0);", {}, node.result.type)


_MOST_STEPS = 1 << 16  # of integers that are made at load time


def _whole_steps(start: int, end: int, steps: int) -> np.ndarray:
    """`torch.linspace` of whole numbers: in double precision from both ends, then cut off."""
    step = (float(end) - float(start)) / max(steps - 1, 1)
    at = np.arange(steps)
    numbers = np.where(at < steps // 2, start + step * at, end - step * (steps - 1 - at))
    if steps == 1:
        numbers = np.full(1, float(start))
    return np.trunc(numbers).astype(np.int64)


def _linspace_at_call(
    builder: Builder, type: TensorType, start: Value | Scalar, end: Value | Scalar, steps: Size
) -> Value:
    """`torch.linspace` between numbers of which a call gives one."""
    if type.dtype.is_int:
        raise ShapeError("linspace of integers between numbers that are known only at a call")
    dtype = wide_type(type.dtype)
    first, last = (
        builder.aten._to_copy(number, dtype)
        if isinstance(number, Value)
        else builder.aten.scalar_tensor(number, dtype)
        for number in (start, end)
    )
    gaps = _dims.maximum(steps - 1, 1)
    step = builder.aten.div.Tensor(builder.aten.sub.Tensor(last, first), gaps)
    at = builder.purevk.iota(steps, DType.int32)
    rising = builder.aten._to_copy(at, dtype)
    falling = builder.aten.rsub.Scalar(rising, steps - 1)
    from_first = builder.aten.add.Tensor(builder.aten.mul.Tensor(rising, step), first)
    from_last = builder.aten.sub.Tensor(last, builder.aten.mul.Tensor(falling, step))
    is_first = builder.aten.lt.Tensor(at, steps - steps // 2)
    made = builder.aten.where.self(is_first, from_first, from_last)
    return builder.aten._to_copy(made, type.dtype)


@rewrite(
    "aten.linspace.default",
    signature(f"start, end, steps, {TENSOR}")(lambda steps, dtype: sized((steps,), dtype)),
)
def _linspace(
    builder: Builder,
    node: Node,
    start: Value | Scalar,
    end: Value | Scalar,
    steps: Size,
    *_: Arg,
) -> Value:
    type = node.result.type
    if isinstance(start, complex) or isinstance(end, complex):
        raise ShapeError("linspace between complex numbers")
    if isinstance(start, (Value, Dim)) or isinstance(end, (Value, Dim)):
        return _linspace_at_call(builder, type, start, end, steps)
    if type.dtype.is_int:
        start, end = int(start), int(end)
        if isinstance(steps, int) and steps <= _MOST_STEPS:
            return builder.constant(_whole_steps(start, end, steps), type.dtype)
    step = f"float({end!r} - ({start!r})) / float(r_size_0 - 1)"
    # From both ends, as torch does, so that both are exact.
    body = f"float by = r_size_0 > 1 ? {step} : 0.0; float v = i0 * 2 < r_size_0 ? {float(start)!r} + by * float(i0) : {float(end)!r} - by * float(r_size_0 - 1 - i0);"  # noqa: E501
    made = mapped(
        builder,
        body + f" r = r_size_0 > 1 ? v : {float(start)!r};",
        {},
        type.with_dtype(wide_type(type.dtype)),
    )
    return builder.aten._to_copy(made, type.dtype)


# -- joins ---------------------------------------------------------------------------------------
def _stack_shape(tensors: Sequence[TensorType], dim: int = 0) -> TensorType:
    first = tensors[0]
    if not all(equal_shapes(tensor.dims, first.dims) for tensor in tensors[1:]):
        raise ShapeError(f"cannot stack {list(tensors)}")
    at = wrap(dim, first.rank + 1)
    dtype = first.dtype
    for each in tensors[1:]:
        dtype = promote_types(dtype, each.dtype)
    return TensorType(dtype, (*first.dims[:at], len(tensors), *first.dims[at:]))


@rewrite("aten.stack.default", _stack_shape, moves=Moves.TENSORS)
def _stack(builder: Builder, node: Node, tensors: Sequence[Value], dim: int) -> Value:
    return builder.aten.cat(
        tuple(builder.aten.unsqueeze(tensor, dim) for tensor in tensors),
        dim,
    )


# -- triangles -----------------------------------------------------------------------------------
def _triangle(upper: bool) -> None:
    def first_rows(count: int, columns: int) -> int:
        """Elements on and below the diagonal, of as many rows from the top."""
        count = max(count, 0)
        sloping = min(count, columns)
        return sloping * (sloping + 1) // 2 + (count - sloping) * columns

    def count(rows: int, columns: int, offset: int) -> int:
        diagonal = offset - 1 if upper else offset
        below = first_rows(rows + diagonal, columns) - first_rows(diagonal, columns)
        return rows * columns - below if upper else below

    @signature(f"row: int, col: int, offset: int = 0, {TENSOR}")
    def shape(row: int, col: int, offset: int, dtype: DType | None) -> TensorType:
        known = dtype if isinstance(dtype, DType) else None  # the schema's default is a number
        return TensorType(known or DType.int64, (2, count(row, col, offset)))

    def expand(
        builder: Builder, node: Node, rows: int, columns: int, offset: int, *_: Arg
    ) -> Value:
        # A stable sort of all elements by whether they are outside the triangle puts those inside
        # first, in their order.
        number = builder.purevk.iota(rows * columns, DType.int32)
        i = builder.aten.div.Tensor_mode(number, columns, rounding_mode="floor")
        j = builder.aten.remainder.Tensor(number, columns)
        distance = builder.aten.sub.Tensor(j, i)
        outside = builder.emit("aten.lt.Tensor" if upper else "aten.gt.Tensor", distance, offset)
        order = builder.aten.sort.stable.all(
            builder.aten._to_copy(outside, DType.int32),
            stable=True,
            dim=0,
        )[1]
        inside = builder.aten.slice.Tensor(order, dim=0, start=0, end=node.result.type.dims[1])
        made = [
            builder.aten.div.Tensor_mode(inside, columns, rounding_mode="floor"),
            builder.aten.remainder.Tensor(inside, columns),
        ]
        return builder.aten._to_copy(
            builder.aten.stack(tuple(made)),
            node.result.type.dtype,
        )

    rewrite(f"aten.{'triu' if upper else 'tril'}_indices.default", shape)(expand)


_triangle(False)
_triangle(True)

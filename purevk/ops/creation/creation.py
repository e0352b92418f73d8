"""Tensors made from numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Dim, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import constant
from purevk.ops.promotion import wide_type
from purevk.ops.registry import Operator, Rewrite, register


def _number_type(number: Any) -> DType:
    if isinstance(number, bool):
        return DType.bool
    return DType.int64 if isinstance(number, (int, Dim)) else DType.float32


def _full_shape(
    size: Sequence[Size],
    fill_value: Any,
    dtype: DType | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> TensorType:
    return TensorType(dtype or _number_type(fill_value), tuple(size))


def _expand_full(builder: Builder, node: Node) -> Value:
    size, number = node.args[:2]
    return constant(builder, number, size, node.result.type.dtype)


register(Operator("aten.full.default", _full_shape, Rewrite(_expand_full)))


def _scalar_tensor_shape(
    s: Any,
    dtype: DType | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> TensorType:
    return TensorType(dtype or DType.float32, ())


register(
    Operator(
        "aten.scalar_tensor.default",
        _scalar_tensor_shape,
        Rewrite(lambda builder, node: constant(builder, node.args[0], (), node.result.type.dtype)),
    )
)


def _full_like_shape(
    x: TensorType,
    fill_value: Any,
    dtype: DType | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> TensorType:
    return x.with_dtype(dtype or x.dtype)


def _like(node: Node, number: Any, builder: Builder) -> Value:
    return constant(builder, number, node.result.type.dims, node.result.type.dtype)


register(
    Operator(
        "aten.full_like.default",
        _full_like_shape,
        Rewrite(lambda builder, node: _like(node, node.args[1], builder)),
    )
)


def _sized(name: str, number: float) -> None:
    def shape(
        size: Sequence[Size],
        dtype: DType | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> TensorType:
        return TensorType(dtype or DType.float32, tuple(size))

    def like(
        x: TensorType,
        dtype: DType | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> TensorType:
        return x.with_dtype(dtype or x.dtype)

    register(
        Operator(
            f"aten.{name}.default",
            shape,
            Rewrite(lambda builder, node: _like(node, number, builder)),
        )
    )
    register(
        Operator(
            f"aten.{name}_like.default",
            like,
            Rewrite(lambda builder, node: _like(node, number, builder)),
        )
    )


_sized("zeros", 0)
_sized("ones", 1)


def _arange_shape(
    start: Any,
    end: Any,
    step: Any = 1,
    dtype: DType | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> TensorType:
    numbers = (start, end, step)
    if dtype is None:
        dtype = (
            DType.float32 if any(isinstance(number, float) for number in numbers) else DType.int64
        )
    if dtype is DType.int64:
        start, end, step = (
            int(number) if isinstance(number, float) else number for number in numbers
        )
    elif any(isinstance(number, float) for number in numbers):
        return TensorType(dtype, (max(math.ceil((end - start) / step), 0),))
    length = end - start if isinstance(step, int) and step == 1 else -((start - end) // step)
    return TensorType(dtype, (_dims.maximum(length, 0),))


def _expand_arange(builder: Builder, node: Node) -> Value:
    start, _, step = node.args[:3]
    out = node.result.type
    if out.dtype.is_int:
        start, step = (
            int(number) if isinstance(number, float) else number for number in (start, step)
        )
    number = builder.emit(
        "purevk.iota", out.dims[0], DType.int32 if out.dtype.is_float else out.dtype
    )
    floats = isinstance(start, float) or isinstance(step, float)
    if floats:
        number = builder.emit("aten._to_copy.default", number, wide_type(out.dtype))
    if not (isinstance(step, (int, float)) and step == 1):
        number = builder.emit("aten.mul.Tensor", number, step)
    if not (isinstance(start, (int, float)) and start == 0):
        number = builder.emit("aten.add.Tensor", number, start, 1)
    return builder.emit("aten._to_copy.default", number, out.dtype)


register(Operator("aten.arange.start_step", _arange_shape, Rewrite(_expand_arange)))


def _arange_start_shape(
    start: Any,
    end: Any,
    dtype: DType | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> TensorType:
    return _arange_shape(start, end, 1, dtype)


register(
    Operator(
        "aten.arange.start",
        _arange_start_shape,
        Rewrite(
            lambda builder, node: builder.emit(
                "aten.arange.start_step", *node.args[:2], 1, node.result.type.dtype
            )
        ),
    )
)


def _arange_end_shape(
    end: Any,
    dtype: DType | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> TensorType:
    return _arange_shape(0, end, 1, dtype)


register(
    Operator(
        "aten.arange.default",
        _arange_end_shape,
        Rewrite(
            lambda builder, node: builder.emit(
                "aten.arange.start_step", 0, node.args[0], 1, node.result.type.dtype
            )
        ),
    )
)


def _repeat_shape(x: TensorType, repeats: Sequence[Size]) -> TensorType:
    lead = len(repeats) - x.rank
    return x.with_dims(
        count * (x.dims[d - lead] if d >= lead else 1) for d, count in enumerate(repeats)
    )


def _expand_repeat(builder: Builder, node: Node) -> Value:
    x, repeats = node.args
    sizes = ((1,) * (len(repeats) - x.type.rank)) + tuple(x.type.dims)
    split = builder.emit("aten.view.default", x, tuple(s for size in sizes for s in (1, size)))
    wide = builder.emit(
        "aten.expand.default",
        split,
        tuple(s for size, count in zip(sizes, repeats) for s in (count, size)),
    )
    return builder.emit("aten.view.default", wide, node.result.type.dims)


register(Operator("aten.repeat.default", _repeat_shape, Rewrite(_expand_repeat)))

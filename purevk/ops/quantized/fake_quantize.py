"""Fake quantization: numbers are quantized and dequantized, as training for quantization does.

`(clamp(round(x / scale) + zero_point, quant_min, quant_max) - zero_point) * scale`. Zero points that
are floats are added before rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Node, TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.registry import Types, rewrite
from purevk.ops.shapes import wrap


def _fake_quantize(
    builder: Builder, x: Value, scale: Value | float, zero: Value | int, low: int, high: int
) -> tuple[Value, Value]:
    """The numbers, and which of them were not clamped. Scales and zero points broadcast."""
    aten = builder.aten
    wide = DType.float64 if x.type.dtype is DType.float64 else DType.float32
    number: Value = aten._to_copy(x, wide)
    if isinstance(scale, Value):
        scale = aten._to_copy(scale, DType.float32)
        number = aten.mul.Tensor(number, aten.reciprocal(scale))
    else:
        scale = float(np.float32(scale))
        number = aten.mul.Tensor(number, float(np.float32(1) / np.float32(scale)))
    if isinstance(zero, Value) and zero.type.dtype.is_float:
        # torch adds in float32.
        zero = aten._to_copy(zero, DType.float32)
        quantized = aten.round(aten._to_copy(aten.add.Tensor(number, zero), DType.float32))
        quantized = aten._to_copy(quantized, wide)
    else:
        quantized = aten.add.Tensor(aten.round(number), zero)
    inside = aten.logical_and(aten.ge.Tensor(quantized, low), aten.le.Tensor(quantized, high))
    clamped = aten.fmin(aten.fmax(quantized, float(low)), float(high))  # NaN becomes `low`
    if not isinstance(scale, Value) or not scale.type.rank:
        clamped = aten._to_copy(clamped, DType.float32)  # as torch computes without channels
    return aten.mul.Tensor(aten.sub.Tensor(clamped, zero), scale), inside


def _along(builder: Builder, values: Value, x: Value, axis: int) -> Value:
    """Values of the channels of an axis, as they broadcast."""
    at, rank = wrap(axis, x.type.rank), x.type.rank
    sizes = tuple(values.type.numel if d == at else 1 for d in range(rank))
    return builder.aten.view(values, sizes)


def _one(builder: Builder, number: Any) -> Any:
    """A number, or a tensor of one element as one without dims."""
    return builder.aten.view(number, ()) if isinstance(number, Value) else number


@rewrite(
    "aten.fake_quantize_per_tensor_affine_cachemask.default",
    lambda x, scale, zero_point, quant_min, quant_max: _with_mask(x),
)
@rewrite(
    "aten.fake_quantize_per_tensor_affine.default",
    lambda x, scale, zero_point, quant_min, quant_max: x,
    "aten.fake_quantize_per_tensor_affine.tensor_qparams",
)
def _of_tensor(
    builder: Builder, node: Node, x: Value, scale: Any, zero: Any, low: int, high: int
) -> tuple[Value, Value]:
    return _fake_quantize(builder, x, _one(builder, scale), _one(builder, zero), low, high)


@rewrite(
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
    lambda x, scale, zero_point, fake_quant_enabled, quant_min, quant_max: _with_mask(x),
)
def _of_tensor_if(
    builder: Builder,
    node: Node,
    x: Value,
    scale: Value,
    zero: Value,
    enabled: Value,
    low: int,
    high: int,
) -> tuple[Value, ...]:
    made, inside = _of_tensor(builder, node, x, scale, zero, low, high)
    runs = builder.aten.ne.Tensor(_one(builder, enabled), 0)
    made = builder.aten._to_copy(made, x.type.dtype)
    truth = builder.aten.logical_or(inside, builder.aten.logical_not(runs))
    return builder.aten.where.self(runs, made, x), truth


@rewrite(
    "aten.fake_quantize_per_channel_affine_cachemask.default",
    lambda x, scale, zero_point, axis, quant_min, quant_max: _with_mask(x),
)
@rewrite(
    "aten.fake_quantize_per_channel_affine.default",
    lambda x, scale, zero_point, axis, quant_min, quant_max: x,
)
def _of_channels(
    builder: Builder,
    node: Node,
    x: Value,
    scale: Value,
    zero: Value,
    axis: int,
    low: int,
    high: int,
) -> tuple[Value, Value]:
    scale, zero = (_along(builder, each, x, axis) for each in (scale, zero))
    return _fake_quantize(builder, x, scale, zero, low, high)


def _with_mask(x: TensorType) -> Types:
    return x, x.with_dtype(DType.bool)

"""Operators that earlier releases of executorch wrote and later ones dropped: sums and clamps in one."""

from __future__ import annotations

from typing import Any, Sequence

from purevk.ir import Node, TensorType, Value
from purevk.ops.convolution import _convolution_shape, _refuse
from purevk.ops.promotion import result_type
from purevk.ops.registry import Operator, Rewrite, register
from purevk.ops.shapes import broadcast_of

_LARGEST = 3.4028235e38


def _bound(value: float | None, sign: int) -> float | None:
    """A bound of a clamp; the exporter writes the largest double for none."""
    return None if value is None or sign * value >= _LARGEST else float(value)


def _clamped(builder: Any, value: Value, low: float | None, high: float | None) -> Value:
    low, high = _bound(low, -1), _bound(high, 1)
    return value if low is None and high is None else builder.emit("aten.clamp.default", value, low, high)


def _sum_shape(x: TensorType, other: Any, output_min: float | None = None, output_max: float | None = None) -> TensorType:
    return TensorType(result_type((x, other)), broadcast_of((x, other)))


def _clamp_first_shape(x: TensorType, output_min: float | None, output_max: float | None, other: Any) -> TensorType:
    return TensorType(result_type((x, other)), broadcast_of((x, other)))


def _convolved_shape(
    x: TensorType, weight: TensorType, bias: TensorType | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, other: TensorType,
) -> TensorType:  # fmt: skip
    return _convolution_shape(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _register(kind: str) -> None:
    full = f"aten.{kind}.Tensor"

    def then_clamp(builder: Any, node: Node) -> Value:
        x, other, low, high = node.args
        return _clamped(builder, builder.emit(full, x, other), low, high)

    def clamp_first(builder: Any, node: Node) -> Value:
        x, low, high, other = node.args
        return builder.emit(full, _clamped(builder, x, low, high), other)

    def convolved(builder: Any, node: Node) -> Value:
        return builder.emit(full, builder.emit("aten.convolution.default", *node.args[:9]), node.args[9])

    register(Operator(f"et_vk.binary_{kind}_with_clamp.default", _sum_shape, Rewrite(then_clamp)))
    register(Operator(f"et_vk.clamp_with_binary_{kind}.default", _clamp_first_shape, Rewrite(clamp_first)))
    register(Operator(f"et_vk.conv_with_binary_{kind}.default", _convolved_shape, Rewrite(convolved, _refuse)))


for _kind in ("add", "sub", "mul", "div"):
    _register(_kind)

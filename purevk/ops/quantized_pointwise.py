"""Operators on int8 codes, one element at a time: numbers are made of them, and codes of the result."""

from __future__ import annotations

from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, TensorType, Value
from purevk.ops.quantize import Program, code_of, inverse_of
from purevk.ops.registry import Operator, Rewrite, register
from purevk.ops.shapes import broadcast


def _real(program: Program, codes: Value, scale: float, zero: int) -> tuple:
    return program.step("pv_real($0, $1, $2)", program.real(codes), program.real(zero), program.real(scale))


def _codes(program: Program, number: tuple, inverse: tuple, zero: int, low: int, high: int, dtype: DType) -> Value:
    return program.emit((code_of(program, number, inverse, zero, low, high, dtype), dtype))


# -- et_vk -------------------------------------------------------------------------------------------------------------
def _add_shape(
    input_a: TensorType, input_b: TensorType, input_a_scale: float, input_a_zero_point: int, input_b_scale: float,
    input_b_zero_point: int, output_scale: float, output_zero_point: int, alpha: float = 1.0,
) -> TensorType:  # fmt: skip
    return TensorType(DType.int8, broadcast(input_a.dims, input_b.dims))


def _expand_add(builder: Any, node: Node) -> Value:
    a, b, a_scale, a_zero, b_scale, b_zero, scale, zero, alpha = node.args
    program = Program(builder, node.result.type.dims)
    numbers = _real(program, a, a_scale, a_zero), _real(program, b, b_scale, b_zero)
    if alpha == 1:
        total = program.step("($0 + $1)", *numbers)
    else:
        total = program.step("pv_plus($0, $1, $2)", *numbers, program.real(alpha))
    return _codes(program, total, inverse_of(program, scale), zero, -128, 127, DType.int8)


register(
    Operator("et_vk.q8ta_add.default", _add_shape, Rewrite(_expand_add), names=("et_vk.add_q8ta_q8ta_q8to.default",))
)  # fmt: skip


def _relu_shape(
    input: TensorType, input_scale: float, input_zero_point: int, output_scale: float, output_zero_point: int
) -> TensorType:
    return input


def _expand_relu(builder: Any, node: Node) -> Value:
    x, x_scale, x_zero, scale, zero = node.args
    program = Program(builder, x.type.dims)
    number = program.step("max($0, 0.0)", _real(program, x, x_scale, x_zero))
    return _codes(program, number, inverse_of(program, scale), zero, -128, 127, DType.int8)


register(Operator("et_vk.q8ta_relu.default", _relu_shape, Rewrite(_expand_relu)))


def _shuffle_shape(
    input: TensorType, input_scale: float, input_zero_point: int, output_inv_scale: float, output_zero_point: int,
    upscale_factor: int,
) -> TensorType:  # fmt: skip
    r = upscale_factor
    *lead, channels, height, width = input.dims
    return input.with_dims((*lead, channels // (r * r), height * r, width * r))


def _expand_shuffle(builder: Any, node: Node) -> Value:
    """The scale of the result is given as its inverse."""
    x, x_scale, x_zero, inverse, zero, factor = node.args
    program = Program(builder, x.type.dims)
    codes = _codes(program, _real(program, x, x_scale, x_zero), inverse_of(program, 1.0 / inverse), zero, -128, 127, DType.int8)
    return builder.emit("aten.pixel_shuffle.default", codes, factor)


register(Operator("et_vk.q8ta_pixel_shuffle.default", _shuffle_shape, Rewrite(_expand_shuffle)))


# -- quantized_decomposed ----------------------------------------------------------------------------------------------
def _sum_shape(
    a: TensorType, a_scale: float, a_zero_point: int, a_quant_min: int, a_quant_max: int, b: TensorType, b_scale: float,
    b_zero_point: int, b_quant_min: int, b_quant_max: int, out_scale: float, out_zero_point: int, out_quant_min: int,
    out_quant_max: int,
) -> TensorType:  # fmt: skip
    return TensorType(a.dtype, broadcast(a.dims, b.dims))


def _expand_sum(relu: bool) -> Any:
    def expand(builder: Any, node: Node) -> Value:
        a, a_scale, a_zero, _, _, b, b_scale, b_zero, _, _, scale, zero, low, high = node.args
        program = Program(builder, node.result.type.dims)
        numbers = _real(program, a, a_scale, a_zero), _real(program, b, b_scale, b_zero)
        total = program.step("max($0 + $1, 0.0)" if relu else "($0 + $1)", *numbers)
        return _codes(program, total, inverse_of(program, scale), zero, low, high, node.result.type.dtype)

    return expand


register(Operator("quantized_decomposed.add.default", _sum_shape, Rewrite(_expand_sum(False))))
register(Operator("quantized_decomposed.add_relu.default", _sum_shape, Rewrite(_expand_sum(True))))


def _sum_scalar_shape(
    a: TensorType, a_scale: float, a_zero_point: int, a_quant_min: int, a_quant_max: int, a_dtype: Any, b: Any,
    out_scale: float, out_zero_point: int, out_quant_min: int, out_quant_max: int, out_dtype: Any = None,
) -> TensorType:  # fmt: skip
    return a


def _expand_sum_scalar(builder: Any, node: Node) -> Value:
    a, a_scale, a_zero, _, _, _, b, scale, zero, low, high, _ = node.args
    program = Program(builder, a.type.dims)
    total = program.step("($0 + $1)", _real(program, a, a_scale, a_zero), program.real(b))
    return _codes(program, total, inverse_of(program, scale), zero, low, high, node.result.type.dtype)


register(Operator("quantized_decomposed.add.scalar", _sum_scalar_shape, Rewrite(_expand_sum_scalar)))

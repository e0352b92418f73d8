"""Operators on int8 codes, one element at a time: numbers are made of them, and codes of the
result."""

from __future__ import annotations

from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Node, TensorType, Value
from purevk.lower.copies import dense
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import bits_of
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import Program
from purevk.ops.quantized.quantize import inverse_of, quantized_value
from purevk.ops.registry import Kernel, Operator, Rewrite, register
from purevk.ops.shapes import broadcast


def _real(program: Program, codes: Value, scale: float, zero: int) -> tuple:
    return program.step(
        "pv_real($0, $1, $2)", program.real(codes), program.real(zero), program.real(scale)
    )


def _codes(
    program: Program, number: tuple, inverse: tuple, zero: int, low: int, high: int, dtype: DType
) -> Value:
    return program.emit((quantized_value(program, number, inverse, zero, low, high, dtype), dtype))


# -- et_vk ---------------------------------------------------------------------------------------
def _add_shape(
    input_a: TensorType,
    input_b: TensorType,
    input_a_scale: float,
    input_a_zero_point: int,
    input_b_scale: float,
    input_b_zero_point: int,
    output_scale: float,
    output_zero_point: int,
    alpha: float = 1.0,
) -> TensorType:
    return TensorType(DType.int8, broadcast(input_a.dims, input_b.dims))


def _expand_add(builder: Builder, node: Node) -> Value:
    a, b, a_scale, a_zero, b_scale, b_zero, scale, zero, alpha = node.args
    program = Program(builder, node.result.type.dims)
    numbers = _real(program, a, a_scale, a_zero), _real(program, b, b_scale, b_zero)
    if alpha == 1:
        total = program.step("($0 + $1)", *numbers)
    else:
        total = program.step("pv_plus($0, $1, $2)", *numbers, program.real(alpha))
    return _codes(program, total, inverse_of(program, scale), zero, -128, 127, DType.int8)


register(
    Operator(
        "et_vk.q8ta_add.default",
        _add_shape,
        Rewrite(_expand_add),
        names=("et_vk.add_q8ta_q8ta_q8to.default",),
    )
)


def _relu_shape(
    input: TensorType,
    input_scale: float,
    input_zero_point: int,
    output_scale: float,
    output_zero_point: int,
) -> TensorType:
    return input


def _expand_relu(builder: Builder, node: Node) -> Value:
    x, x_scale, x_zero, scale, zero = node.args
    program = Program(builder, x.type.dims)
    number = program.step("max($0, 0.0)", _real(program, x, x_scale, x_zero))
    return _codes(program, number, inverse_of(program, scale), zero, -128, 127, DType.int8)


register(Operator("et_vk.q8ta_relu.default", _relu_shape, Rewrite(_expand_relu)))


def _shuffle_shape(
    input: TensorType,
    input_scale: float,
    input_zero_point: int,
    output_inv_scale: float,
    output_zero_point: int,
    upscale_factor: int,
) -> TensorType:
    r = upscale_factor
    *lead, channels, height, width = input.dims
    return input.with_dims((*lead, channels // (r * r), height * r, width * r))


def _expand_shuffle(builder: Builder, node: Node) -> Value:
    """The scale of the result is given as its inverse."""
    x, x_scale, x_zero, inverse, zero, factor = node.args
    static = all(isinstance(size, int) for size in x.type.dims)
    if (
        factor == 2
        and static
        and x.type.dims[-1] % 8 == 0
        and 0 not in x.type.dims
        and builder.traits.profile.prefers_word_access
    ):
        numbers = x_zero, x_scale, 1.0 / (1.0 / inverse), zero
        return builder.emit(
            SHUFFLED, x, tuple(bits_of(float(np.float32(each))) for each in numbers)
        )
    program = Program(builder, x.type.dims)
    codes = _codes(
        program,
        _real(program, x, x_scale, x_zero),
        inverse_of(program, 1.0 / inverse),
        zero,
        -128,
        127,
        DType.int8,
    )
    return builder.emit("aten.pixel_shuffle.default", codes, factor)


register(Operator("et_vk.q8ta_pixel_shuffle.default", _shuffle_shape, Rewrite(_expand_shuffle)))

SHUFFLED = "purevk.shuffled_codes"


def _shuffled_lower(lowering: Lowering, node: Node) -> None:
    """Pixels shuffled by 2 and their codes moved to another scale: 16 neighbours of the result an
    invocation, from 8 of each of two channels."""
    value, (x_zero, x_scale, inverse, zero) = node.args
    x, out = lowering.operand(value), lowering.operand(node.result)
    if x.offset != 0 or not x.layout.is_contiguous(x.dims):
        x = dense(lowering, x)
    height, eights = x.dims[-2], x.dims[-1] // 8
    work = x.type.numel // 16
    local = min(256, lowering.traits.max_invocations)
    pairs = " ".join(
        f"made[2 * w + {n}] = pv_pack(ivec4(moved(a.{c}), moved(b.{c}), moved(a.{d}), moved(b.{d})));"
        for n, (c, d) in enumerate(("xy", "zw"))
    )
    lowering.dispatch(
        "elementwise/pointwise.comp",
        [(x, "r"), (out, "w")],
        macros={
            "BUFFERS": "layout(set = 0, binding = 0) readonly buffer Buffer0 { uvec2 b0[]; };"
            " layout(set = 0, binding = 1) writeonly buffer Buffer1 { uvec4 b1[]; };",
            "DECLARE": "SPEC_CONSTANT(0, height) SPEC_CONSTANT(1, eights) PUSH_CONSTANT(1, x_zero)"
            " PUSH_CONSTANT(2, x_scale) PUSH_CONSTANT(3, out_inverse) PUSH_CONSTANT(4, out_zero)"
            " int moved(int code) { float number = pv_real(float(code), intBitsToFloat(x_zero),"
            " intBitsToFloat(x_scale)); return pv_code_byte(number, intBitsToFloat(out_inverse),"
            " intBitsToFloat(out_zero), -128.0, 127.0); }",
            "BODY": "int line = int(id) / eights, h = line / 2 % height, channel = line / 2 /"
            " height * 4 + line % 2 * 2;"
            " int at = (channel * height + h) * eights + int(id) % eights;"
            " uvec2 even = b0[at], odd = b0[at + height * eights]; uvec4 made;"
            f" UNROLL for (int w = 0; w < 2; w++) {{ ivec4 a = pv_signed(even[w]), b = pv_signed(odd[w]); {pairs} }}"
            " b1[id] = made;",
        },
        params={
            "work": work,
            "x_zero": x_zero,
            "x_scale": x_scale,
            "out_inverse": inverse,
            "out_zero": zero,
        },
        constants={"height": height, "eights": eights, "local_size_x": local},
        grid=lowering.linear_grid(work, local),
        flops=10 * x.type.numel,
    )


register(
    Operator(
        SHUFFLED,
        lambda x, numbers: x.with_dims(
            (*x.dims[:-3], x.dims[-3] // 4, 2 * x.dims[-2], 2 * x.dims[-1])
        ),
        Kernel(_shuffled_lower),
    )
)


# -- quantized_decomposed ------------------------------------------------------------------------
def _sum_shape(
    a: TensorType,
    a_scale: float,
    a_zero_point: int,
    a_quant_min: int,
    a_quant_max: int,
    b: TensorType,
    b_scale: float,
    b_zero_point: int,
    b_quant_min: int,
    b_quant_max: int,
    out_scale: float,
    out_zero_point: int,
    out_quant_min: int,
    out_quant_max: int,
) -> TensorType:
    return TensorType(a.dtype, broadcast(a.dims, b.dims))


def _expand_sum(relu: bool) -> Any:
    def expand(builder: Builder, node: Node) -> Value:
        a, a_scale, a_zero, _, _, b, b_scale, b_zero, _, _, scale, zero, low, high = node.args
        program = Program(builder, node.result.type.dims)
        numbers = _real(program, a, a_scale, a_zero), _real(program, b, b_scale, b_zero)
        total = program.step("max($0 + $1, 0.0)" if relu else "($0 + $1)", *numbers)
        return _codes(
            program, total, inverse_of(program, scale), zero, low, high, node.result.type.dtype
        )

    return expand


register(Operator("quantized_decomposed.add.default", _sum_shape, Rewrite(_expand_sum(False))))
register(Operator("quantized_decomposed.add_relu.default", _sum_shape, Rewrite(_expand_sum(True))))


def _sum_scalar_shape(
    a: TensorType,
    a_scale: float,
    a_zero_point: int,
    a_quant_min: int,
    a_quant_max: int,
    a_dtype: Any,
    b: Any,
    out_scale: float,
    out_zero_point: int,
    out_quant_min: int,
    out_quant_max: int,
    out_dtype: Any = None,
) -> TensorType:
    return a


def _expand_sum_scalar(builder: Builder, node: Node) -> Value:
    a, a_scale, a_zero, _, _, _, b, scale, zero, low, high, _ = node.args
    program = Program(builder, a.type.dims)
    total = program.step("($0 + $1)", _real(program, a, a_scale, a_zero), program.real(b))
    return _codes(
        program, total, inverse_of(program, scale), zero, low, high, node.result.type.dtype
    )


register(
    Operator("quantized_decomposed.add.scalar", _sum_scalar_shape, Rewrite(_expand_sum_scalar))
)

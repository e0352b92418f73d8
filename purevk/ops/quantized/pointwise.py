"""Pointwise operators on quantized tensors: they dequantize, compute in float32 and quantize the
result."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Node, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.expression import Term
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import bits_of
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import Program
from purevk.ops.quantized.arithmetic import inverse_of, quantized_value, real_number
from purevk.ops.quantized.operands import INT8
from purevk.ops.registry import Kernel, define, rewrite_node
from purevk.ops.shapes import broadcast
from purevk.ops.signatures import signature


class _Output(NamedTuple):
    """How the result is quantized."""

    scale: float
    zero_point: int
    low: int
    high: int
    dtype: DType

    def emit(self, program: Program, number: Term) -> Value:
        """The program's result: the quantized value of a number."""
        inverse = inverse_of(program, self.scale)
        value = quantized_value(
            program, number, inverse, self.zero_point, self.low, self.high, self.dtype
        )
        return program.emit((value, self.dtype))


# -- et_vk ---------------------------------------------------------------------------------------
def _int8_output(node: Node) -> _Output:
    return _Output(node.float("output_scale"), node.int("output_zero_point"), *INT8, DType.int8)


def _input_number(program: Program, node: Node) -> Term:
    """The number of the quantized input, of operators that have one."""
    return real_number(
        program, node.tensor("input"), node.float("input_scale"), node.int("input_zero_point")
    )


@signature(
    "input_a, input_b, input_a_scale, input_a_zero_point: int, input_b_scale, "
    "input_b_zero_point: int, output_scale, output_zero_point: int, alpha=1.0"
)
def _add_shape(input_a: TensorType, input_b: TensorType) -> TensorType:
    return TensorType(DType.int8, broadcast(input_a.dims, input_b.dims))


def _real_numbers(program: Program, node: Node, *names: str) -> list[Term]:
    """The numbers that quantized operands stand for."""
    return [
        real_number(
            program, node.tensor(name), node.float(f"{name}_scale"), node.int(f"{name}_zero_point")
        )
        for name in names
    ]


@rewrite_node("et_vk.q8ta_add.default", _add_shape, "et_vk.add_q8ta_q8ta_q8to.default")
def _expand_add(builder: Builder, node: Node) -> Value:
    program = Program(builder, node.result.type.dims)
    a, b = _real_numbers(program, node, "input_a", "input_b")
    alpha = node.float("alpha")
    if alpha == 1:
        total = program.step("($0 + $1)", a, b)
    else:
        total = program.step("pv_plus($0, $1, $2)", a, b, program.real(alpha))
    return _int8_output(node).emit(program, total)


@signature("input, input_scale, input_zero_point: int, output_scale, output_zero_point: int")
def _relu_shape(input: TensorType) -> TensorType:
    return input


@rewrite_node("et_vk.q8ta_relu.default", _relu_shape)
def _expand_relu(builder: Builder, node: Node) -> Value:
    program = Program(builder, node.result.type.dims)
    number = program.step("max($0, 0.0)", _input_number(program, node))
    return _int8_output(node).emit(program, number)


@signature(
    "input, input_scale, input_zero_point: int, output_inv_scale, output_zero_point: int, "
    "upscale_factor: int"
)
def _shuffle_shape(input: TensorType, upscale_factor: int) -> TensorType:
    r = upscale_factor
    *lead, channels, height, width = input.dims
    return input.with_dims((*lead, channels // (r * r), height * r, width * r))


@rewrite_node("et_vk.q8ta_pixel_shuffle.default", _shuffle_shape)
def _expand_shuffle(builder: Builder, node: Node) -> Value:
    """The scale of the result is given as its inverse."""
    x, factor = node.tensor("input"), node.int("upscale_factor")
    scale, zero = 1.0 / node.float("output_inv_scale"), node.int("output_zero_point")
    if (
        factor == 2
        and x.type.is_static
        and x.type.dims[-1] % 8 == 0
        and 0 not in x.type.dims
        and builder.traits.profile.prefers_word_access
    ):
        return builder.emit(
            SHUFFLE,
            x,
            node.float("input_scale"),
            node.int("input_zero_point"),
            1.0 / scale,
            zero,
        )
    program = Program(builder, x.type.dims)
    output = _Output(scale, zero, *INT8, DType.int8)
    quantized = output.emit(program, _input_number(program, node))
    return builder.aten.pixel_shuffle(quantized, factor)


SHUFFLE = "purevk.quantized_pixel_shuffle"


def _shuffle_by_two_shape(
    x: TensorType, x_scale: float, x_zero: int, out_inverse: float, out_zero: int
) -> TensorType:
    *lead, channels, height, width = x.dims
    return x.with_dims((*lead, channels // 4, 2 * height, 2 * width))


def _shuffle_by_two_lower(lowering: Lowering, node: Node) -> None:
    """Pixels shuffled by 2 and requantized. An invocation computes 16 neighbours of the result,
    from 8 of each of two channels."""
    x, out = lowering.operand(node.tensor("x")), lowering.operand(node.result)
    if x.offset != 0 or not x.layout.is_contiguous(x.dims):
        x = dense(lowering, x)
    height, eights = (_dims.specialize(size) for size in (x.dims[-2], x.dims[-1] // 8))
    work = x.type.numel // 16
    local = min(256, lowering.traits.max_invocations)
    lowering.dispatch(
        "movement/shuffle_pixels.comp",
        {"x": x, "out": out},
        params={
            "work": work,
            "x_zero": _bits(node.int("x_zero")),
            "x_scale": _bits(node.float("x_scale")),
            "out_inverse": _bits(node.float("out_inverse")),
            "out_zero": _bits(node.int("out_zero")),
        },
        constants={"height": height, "eights": eights, "local_size_x": local},
        grid=lowering.linear_grid(work, local),
        flops=10 * x.type.numel,
        specialize=(),
    )


def _bits(number: float) -> int:
    """The bits of a number rounded to float32."""
    return bits_of(float(np.float32(number)))


define(SHUFFLE, _shuffle_by_two_shape, Kernel(_shuffle_by_two_lower))


# -- quantized_decomposed ------------------------------------------------------------------------
@signature(
    "a, a_scale, a_zero_point: int, a_quant_min: int, a_quant_max: int, b, b_scale, "
    "b_zero_point: int, b_quant_min: int, b_quant_max: int, out_scale, out_zero_point: int, "
    "out_quant_min: int, out_quant_max: int"
)
def _sum_shape(a: TensorType, b: TensorType) -> TensorType:
    return TensorType(a.dtype, broadcast(a.dims, b.dims))


@rewrite_node("quantized_decomposed.add.default", _sum_shape)
def _expand_sum(builder: Builder, node: Node, total: str = "($0 + $1)") -> Value:
    program = Program(builder, node.result.type.dims)
    a, b = _real_numbers(program, node, "a", "b")
    return _decomposed_output(node).emit(program, program.step(total, a, b))


@rewrite_node("quantized_decomposed.add_relu.default", _sum_shape)
def _expand_sum_relu(builder: Builder, node: Node) -> Value:
    return _expand_sum(builder, node, "max($0 + $1, 0.0)")


def _decomposed_output(node: Node) -> _Output:
    return _Output(
        node.float("out_scale"),
        node.int("out_zero_point"),
        node.int("out_quant_min"),
        node.int("out_quant_max"),
        node.result.type.dtype,
    )


@signature(
    "a, a_scale, a_zero_point: int, a_quant_min: int, a_quant_max: int, a_dtype, b, "
    "out_scale, out_zero_point: int, out_quant_min: int, out_quant_max: int, out_dtype=None"
)
def _sum_scalar_shape(a: TensorType) -> TensorType:
    return a


@rewrite_node("quantized_decomposed.add.scalar", _sum_scalar_shape)
def _expand_sum_scalar(builder: Builder, node: Node) -> Value:
    program = Program(builder, node.result.type.dims)
    a = real_number(program, node.tensor("a"), node.float("a_scale"), node.int("a_zero_point"))
    total = program.step("($0 + $1)", a, program.real(node.float("b")))
    return _decomposed_output(node).emit(program, total)

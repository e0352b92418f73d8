"""Quantization and dequantization of an element, as steps of a pointwise program.

Scales and zero points broadcast. Those that are numbers are parameters of the kernel and not part of
its text, so that layers with different scales share one kernel.
"""

from __future__ import annotations

from typing import TypeAlias

from purevk.dtypes import DType
from purevk.ir import Value
from purevk.lower.expression import Term, convert
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import REAL, Program

Number: TypeAlias = Value | float  # a tensor that broadcasts, or a number

_FAR = 2**20  # zero points and bounds of `pv_quantize_byte` are below it


def inverse_of(program: Program, scale: Number) -> Term:
    """1 / scale, as torch computes it: of a number in double precision and then rounded, of a
    tensor in float32."""
    if isinstance(scale, Value):
        return program.step("pv_inverse($0)", program.real(scale))
    return program.real(1.0 / scale if scale else float("inf"))


def real_number(program: Program, quantized: Value, scale: Number, zero: Number) -> Term:
    """(quantized - zero) * scale."""
    operands = (program.real(each) for each in (quantized, zero, scale))
    return program.step("pv_dequantize($0, $1, $2)", *operands)


def quantized_value(
    program: Program,
    number: Term,
    inverse: Term,
    zero: Number | None,
    low: Number,
    high: Number,
    dtype: DType,
    zero_first: bool = False,
) -> Term:
    """The quantized value of a number, as int32; see `emit_quantize`. `inverse` is 1 / scale."""
    zero = 0.0 if zero is None else zero
    known = [each for each in (zero, low, high) if not isinstance(each, Value)]
    byte = dtype.itemsize == 1 and all(abs(each) < _FAR and each == int(each) for each in known)
    byte = byte and not any(isinstance(each, Value) for each in (low, high))
    byte = byte and not (isinstance(zero, Value) and zero.type.dtype.is_float)
    zero_term = program.real(zero)
    if byte and isinstance(zero, Value) and zero.type.dtype.itemsize > 1:
        zero_term = program.step(f"clamp($0, {-_FAR}.0, {_FAR}.0)", zero_term)
    name = f"pv_quantize{'_byte' if byte else ''}{'_zero_first' if zero_first else ''}"
    operands = (number, inverse, zero_term, program.real(low), program.real(high))
    return program.step(f"{name}($0, $1, $2, $3, $4)", *operands, dtype=DType.int32)


def emit_quantize(
    builder: Builder,
    x: Value,
    scale: Number,
    zero: Number | None,
    low: Number,
    high: Number,
    dtype: DType,
    zero_first: bool = False,
) -> Value:
    """clamp(round(x / scale) + zero, low, high); `zero_first`: clamp(round(x / scale + zero), ...)."""
    program = Program(builder, x.type.dims)
    if isinstance(scale, Value) and scale.type.dtype is DType.float64:
        return _quantize_double(program, x, scale, zero, low, high, dtype, zero_first)
    number, inverse = program.real(x), inverse_of(program, scale)
    value = quantized_value(program, number, inverse, zero, low, high, dtype, zero_first)
    return program.emit((value, dtype))


def _quantize_double(
    program: Program,
    x: Value,
    scale: Value,
    zero: Number | None,
    low: Number,
    high: Number,
    dtype: DType,
    zero_first: bool,
) -> Value:
    """The same in double precision, in which torch computes if the scale is float64."""
    steps = program.steps

    def double(term: Term, source: DType) -> Term:
        return steps.step(convert("$0", source, DType.float64), [term], DType.float64)

    number, factor = (
        double(steps.input(each, each.type.dtype), each.type.dtype) for each in (x, scale)
    )
    offset = double(program.real(0.0 if zero is None else zero), REAL)
    text = "pv_round($0 * (1.0lf / $1) + $2)" if zero_first else "pv_round($0 * (1.0lf / $1)) + $2"
    value = steps.step(text, [number, factor, offset], DType.float64)
    bounds = [double(program.real(each), REAL) for each in (low, high)]
    clamped = steps.step("int(clamp($0, $1, $2))", [value, *bounds], DType.int32)
    return program.emit((clamped, dtype))


def emit_dequantize(
    builder: Builder, quantized: Value, scale: Number, zero: Number | None, dtype: DType
) -> Value:
    """(quantized - zero) * scale."""
    program = Program(builder, quantized.type.dims)
    number = real_number(program, quantized, scale, 0.0 if zero is None else zero)
    return program.emit((number, dtype))

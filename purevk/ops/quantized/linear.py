"""Products with quantized weights: 8 or 4 bits, scales by row or by group, activations as floats or
as int8 codes.

All of them are one operator of purevk's own, `purevk.quantized_matmul`, whose weight lies by rows
and whose scales lie as [N, groups]. Constants are brought into that form once, at load.
"""

from __future__ import annotations

from typing import Any

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, emit_copy
from purevk.lower.epilogue import make_epilogue
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4
from purevk.lower.operands import slice_of
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import REAL
from purevk.ops.quantized.choice import choose
from purevk.ops.quantized.quantize import emit_quantize
from purevk.ops.registry import Kernel, Operator, Rewrite, ShapeError, register

NAME = "purevk.quantized_matmul"


def _shape(
    x: TensorType,
    weight: TensorType,
    scales: TensorType,
    sums: TensorType | None = None,
    x_scale: Any = 1.0,
    x_zero: Any = 0,
    bias: TensorType | None = None,
    bits: int = 8,
    high_first: bool = False,
    group: int = 0,
    dtype: DType = REAL,
    out: tuple[float, int, int] | None = None,
    epilogue: Any = None,
    extras: tuple = (),
) -> TensorType:
    """x [M, K] float, or int8 with `sums`; weight [N, bytes]; scales and sums [N, groups]; `out`:
    scale, zero point and least code of an int8 result."""
    if x.rank != 2 or weight.rank != 2 or scales.rank != 2:
        raise ShapeError(f"cannot multiply {x} by {weight} with scales {scales}")
    if isinstance(x.dims[1], int) and x.dims[1] * bits > weight.dims[1] * 8:
        raise ShapeError(
            f"a row of {weight} holds {weight.dims[1] * 8 // bits} codes, {x.dims[1]} are needed"
        )
    if epilogue is not None:
        dtype = epilogue.dtypes[epilogue.outputs[0]]
    return TensorType(DType.int8 if out is not None else dtype, (x.dims[0], weight.dims[0]))


def _lower(lowering: Lowering, node: Node) -> None:
    (
        x_value,
        w_value,
        scale_value,
        sum_value,
        x_scale,
        x_zero,
        bias_value,
        bits,
        high_first,
        group,
        _,
        out_codes,
        epilogue,
        extras,
    ) = node.args
    out = lowering.operand(node.result)
    m, n = out.dims
    x, k = _rows(lowering, lowering.operand(x_value)), x_value.type.dims[1]
    weight, scales = _rows(lowering, lowering.operand(w_value)), _dense(lowering, scale_value)
    groups = scales.dims[1]
    integers = sum_value is not None
    grouped = not (isinstance(groups, int) and groups == 1)
    macros: dict[str, Any] = {
        "BITS": bits,
        "HIGH_FIRST": int(high_first),
        "ACT": int(integers),
        "GROUPED": int(grouped),
        "T_SCALE": scales.dtype.glsl,
        "T_OUT": out.dtype.glsl,
        "BIAS": int(bias_value is not None),
        "VEC4_OUT": int(gcd4(n, out.offset)),
        "REQUANT": int(out_codes is not None),
    }
    buffers: list[tuple[Operand, str]] = [(x, "r"), (weight, "r"), (scales, "r")]
    if integers:
        buffers.append((_dense(lowering, sum_value), "r"))
        if isinstance(x_scale, Value):
            macros["ROW_PARAMETERS"] = 1
            buffers += [(_dense(lowering, x_scale), "r"), (_dense(lowering, x_zero), "r")]
            macros["T_ZERO"] = x_zero.type.dtype.glsl
            if x_zero.type.dtype.itemsize == 1:
                macros["HAS_8BIT"] = "1"
            x_scale, x_zero = 1.0, 0
        macros |= {"DOT": int(lowering.traits.has("integer_dot_product")), "VEC4_A": int(gcd4(k))}
    else:
        macros |= {"T_A": x.dtype.glsl, "VEC4_A": int(gcd4(k, x.strides[0], x.offset))}
        x_scale, x_zero = 1.0, 0
    if bias_value is not None:
        bias = _dense(lowering, bias_value)
        macros["T_BIAS"] = bias.dtype.glsl
        buffers.append((bias, "r"))
    buffers.append((out, "w"))
    made = make_epilogue(
        lowering,
        epilogue,
        extras,
        out,
        len(buffers),
        "b, m, n",
        "m * N + n",
        (1, "n"),
        bool(macros["VEC4_OUT"]),
        (0, "m"),
    )
    macros |= made.macros
    if out.dtype.itemsize == 1 and not macros["VEC4_OUT"]:
        macros["HAS_8BIT"] = "1"
    buffers += made.buffers
    scale, zero, low = out_codes if out_codes is not None else (1.0, 0, -128)
    words = weight.strides[0] // 4
    lengths: dict[str, Size] = {
        "M": m,
        "N": n,
        "K": k,
        "lda": x.strides[0],
        "ldw": words,
        "ldo": n,
        "groups": groups,
        "group": group or k,
        "offset_a": x.offset,
        "offset_w": weight.offset // 4,
        "offset_o": out.offset,
    }
    codes: dict[str, Size] = {
        "x_scale": bits_of(x_scale),
        "x_zero": x_zero,
        "out_inverse": bits_of(inverse(scale)),
        "out_zero": zero,
        "out_low": low,
    }
    halves = x.dtype is DType.float16
    form = choose(
        lowering.traits,
        m,
        n,
        k,
        bits,
        words,
        weight.offset // 4,
        group if grouped else 0,
        integers,
        halves,
    )
    # On GPUs known lengths make the loops and indices of the vector kernel constant: a pipeline for
    # each shape.
    constant = (
        form.template in ("quantized/qmatvec.comp", "quantized/qmatmul_coopmat.comp")
        and lowering.traits.profile.specialize_sizes
    )
    lowering.dispatch(
        form.template,
        buffers,
        macros={**macros, **form.macros},
        params={**lengths, **codes},
        grid=form.grid,
        specialize=lengths if constant else (),
        subgroup_size=form.subgroup_size,
        flops=2 * m * n * k,
    )


def inverse(scale: float) -> float:
    """1 / scale as quantization multiplies by it: in double precision, then rounded to float32."""
    import numpy as np

    return float(np.float32(1.0 / float(scale)))


def _rows(lowering: Lowering, operand: Operand) -> Operand:
    """Rows that are dense in themselves and, for codes, start at multiples of 4 bytes."""
    rows, columns = operand.dims
    unit = (isinstance(columns, int) and columns == 1) or (
        isinstance(operand.strides[1], int) and operand.strides[1] == 1
    )
    one = isinstance(rows, int) and rows == 1
    known = isinstance(operand.offset, int)
    if operand.dtype.itemsize == 1:
        pitch = columns if one else operand.strides[0]
        if unit and known and gcd4(operand.offset, pitch) and (not one or gcd4(columns)):
            return Operand(operand.storage, Layout(operand.offset, (pitch, 1)), operand.type)
        return align_rows(lowering, operand, 4)
    if unit and known:
        return operand
    return dense(lowering, operand)


def align_rows(lowering: Lowering, operand: Operand, multiple: int) -> Operand:
    """A copy of a matrix whose rows start at multiples of `multiple` elements; what lies between
    them is undefined."""
    rows, columns = operand.dims
    pitch = _dims.align(columns, multiple)
    room = lowering.temporary(TensorType(operand.dtype, (rows, pitch)))
    copy = Operand(room.storage, Layout(0, (pitch, 1)), operand.type)
    emit_copy(lowering, operand, copy, label="layout")
    return copy


def _dense(lowering: Lowering, value: Value) -> Operand:
    operand = lowering.operand(value)
    start = isinstance(operand.offset, int) and operand.offset == 0
    return (
        operand
        if start and operand.layout.is_contiguous(operand.dims)
        else dense(lowering, operand)
    )


def _supports(node: Node, traits: Any) -> str | None:
    """Activations and scales are float32 or float16, activations may be int8 codes."""
    for value in node.inputs:
        if value.type.dtype in (DType.float64, DType.bfloat16):
            return f"no kernel for {value.type.dtype.name}"
    return None


register(Operator(NAME, _shape, Kernel(_lower, supports=_supports, epilogue=True)))


def _align_lower(lowering: Lowering, node: Node) -> None:
    source, target = lowering.operand(node.args[0]), lowering.operand(node.result)
    emit_copy(lowering, source, slice_of(target, 1, 0, source.dims[1]))


register(
    Operator(
        "purevk.align_rows",
        lambda x, multiple: x.with_dims((x.dims[0], _dims.align(x.dims[1], multiple))),
        Kernel(_align_lower),
    )
)


# -- into this form ------------------------------------------------------------------------------
def by_rows(builder: Builder, parameters: Value, rows: Size, transposed: bool = False) -> Value:
    """Scales or sums as [rows, groups]: from [rows or more], or [rows or more, groups], or if
    `transposed` [groups, rows or more]."""
    if parameters.type.rank == 1:
        parameters = builder.emit("aten.view.default", parameters, (parameters.type.dims[0], 1))
    elif transposed:
        parameters = builder.emit("aten.permute.default", parameters, (1, 0))
    if parameters.type.dims[0] != rows:
        parameters = builder.emit("aten.slice.Tensor", parameters, 0, 0, rows, 1)
    if parameters.type.dtype in (DType.float64, DType.bfloat16):
        parameters = builder.emit("aten._to_copy.default", parameters, REAL)
    return builder.emit("purevk.copy", parameters)


def emit_linear(
    builder: Builder,
    x: Value,
    weight: Value,
    scales: Value,
    *,
    bits: int = 8,
    high_first: bool = False,
    group: int = 0,
    bias: Value | None = None,
    sums: Value | None = None,
    x_scale: Any = 1.0,
    x_zero: Any = 0,
    dtype: DType = REAL,
    out: tuple[float, int, int] | None = None,
) -> Value:
    """x [..., K] times the weight: [..., N]. Scales and sums are [N, groups]; those of rows of x,
    if tensors, have one element a row."""
    k, rows = x.type.dims[-1], _dims.product(x.type.dims[:-1])
    flat = builder.emit("aten.view.default", x, (rows, k))
    if isinstance(x_scale, Value):
        x_scale = _row_parameter(builder, x_scale, rows, REAL, REAL)
        x_zero = _row_parameter(builder, x_zero, rows, DType.int32, DType.int8)
    n, pitch = weight.type.dims
    if (
        weight in builder.graph.constants
        and pitch % 16
        and weight.type.nbytes <= builder.traits.max_storage_range
    ):
        weight = builder.emit("purevk.align_rows", weight, 16)
    # A weight that one binding cannot span goes by parts.
    most = (
        n
        if not weight.type.is_static
        else max(builder.traits.max_storage_range // pitch // 64 * 64, 64)
    )
    parts = []
    for start in range(0, n, most):
        end = start + most
        part = builder.emit(
            NAME,
            flat,
            _part(builder, weight, start, end, False),
            _part(builder, scales, start, end),
            _part(builder, sums, start, end),
            x_scale,
            x_zero,
            _part(builder, bias, start, end),
            bits,
            high_first,
            group,
            dtype,
            out,
            None,
            (),
        )
        parts.append(part)
    product = parts[0] if len(parts) == 1 else builder.emit("aten.cat.default", tuple(parts), 1)
    return builder.emit("aten.view.default", product, (*x.type.dims[:-1], n))


def _part(
    builder: Builder, value: Value | None, start: int, end: int, copy: bool = True
) -> Value | None:
    """Some rows of a tensor, copied (once, if they are constant) or where they are; None if there
    is no tensor."""
    if value is None or (start == 0 and end >= value.type.dims[0]):
        return value
    part = builder.emit("aten.slice.Tensor", value, 0, start, min(end, value.type.dims[0]), 1)
    return builder.emit("purevk.copy", part) if copy else part


def _row_parameter(builder: Builder, value: Value, rows: Size, dtype: DType, other: DType) -> Value:
    """As a vector of `dtype`, or of the `other` that the kernels read too."""
    if value.type.dtype not in (dtype, other):
        value = builder.emit("aten._to_copy.default", value, dtype)
    return builder.emit("aten.view.default", value, (rows,))


def _result(x: TensorType, weights: TensorType) -> TensorType:
    if x.rank < 1 or weights.rank != 2:
        raise ShapeError(f"cannot apply a linear layer with weight {weights} to {x}")
    return x.with_dims((*x.dims[:-1], weights.dims[0]))


def _linear_shape(
    x: TensorType,
    weight: TensorType,
    scales: TensorType,
    group: int,
    bias: TensorType | None = None,
) -> TensorType:
    return _result(x, weight)


def _expand_linear(builder: Builder, node: Node) -> Value:
    x, weight, scales, group, bias = node.args
    scales = by_rows(builder, scales, weight.type.dims[0])
    return emit_linear(
        builder, x, weight, scales, group=group, bias=bias, dtype=node.result.type.dtype
    )


# A linear layer with an int8 weight, scales [N] or [N, groups], and numbers for activations.
register(Operator("purevk.quantized_linear", _linear_shape, Rewrite(_expand_linear, _supports)))


# -- float activations ---------------------------------------------------------------------------
def _int8pack_shape(x: TensorType, weight: TensorType, scales: TensorType) -> TensorType:
    return _result(x, weight)


def _expand_int8pack(builder: Builder, node: Node) -> Value:
    x, weight, scales = node.args
    scales = by_rows(builder, scales, weight.type.dims[0])
    return emit_linear(builder, x, weight, scales, dtype=node.result.type.dtype)


def _expand_qcs4w(builder: Builder, node: Node) -> Value:
    x, weight, scales = node.args
    scales = by_rows(builder, scales, weight.type.dims[0])
    return emit_linear(
        builder, x, weight, scales, bits=4, high_first=True, dtype=node.result.type.dtype
    )


register(
    Operator(
        "aten._weight_int8pack_mm.default", _int8pack_shape, Rewrite(_expand_int8pack, _supports)
    )
)
register(Operator("et_vk.linear_qcs4w.default", _int8pack_shape, Rewrite(_expand_qcs4w, _supports)))


def _q4gsw_shape(
    x: TensorType,
    weights: TensorType,
    weight_scales: TensorType,
    group_size: int,
    bias: TensorType | None = None,
) -> TensorType:
    return _result(x, weights)


def _expand_q4gsw(builder: Builder, node: Node) -> Value:
    x, weight, scales, group, bias = node.args
    scales = by_rows(builder, scales, weight.type.dims[0], transposed=True)
    return emit_linear(
        builder, x, weight, scales, bits=4, group=group, bias=bias, dtype=node.result.type.dtype
    )


register(Operator("et_vk.linear_q4gsw.default", _q4gsw_shape, Rewrite(_expand_q4gsw, _supports)))


def _mixed_shape(
    x: TensorType,
    weight: TensorType,
    weight_scales: TensorType,
    weight_zero_points: TensorType | None,
    dtype: Any = None,
) -> TensorType:
    made = _result(x, weight)
    return made.with_dtype(dtype) if isinstance(dtype, DType) else made


def _refuse_zeros(node: Node, traits: Any) -> str | None:
    return (
        "no kernel for zero points of the weight"
        if node.args[3] is not None
        else _supports(node, traits)
    )


def _expand_mixed_linear(builder: Builder, node: Node) -> Value:
    x, weight, scales = node.args[:3]
    scales = by_rows(builder, scales, weight.type.dims[0])
    group = weight.type.dims[1] // scales.type.dims[1]
    return emit_linear(builder, x, weight, scales, group=group, dtype=node.result.type.dtype)


def _mixed_mm_shape(
    x: TensorType,
    weight: TensorType,
    weight_scales: TensorType,
    weight_zero_points: TensorType | None,
) -> TensorType:
    return x.with_dims((*x.dims[:-1], weight.dims[1]))


def _expand_mixed_mm(builder: Builder, node: Node) -> Value:
    """The scales are those of the rows of [K, N], which go into x."""
    x, weight, scales = node.args[:3]
    scaled = builder.emit("aten.mul.Tensor", x, scales)
    return builder.emit(
        "aten.mm.default", scaled, builder.emit("aten._to_copy.default", weight, scaled.type.dtype)
    )


_SPACE = "quantized_decomposed"
register(
    Operator(
        f"{_SPACE}.mixed_linear.default", _mixed_shape, Rewrite(_expand_mixed_linear, _refuse_zeros)
    )
)
register(
    Operator(
        f"{_SPACE}.mixed_mm.default", _mixed_mm_shape, Rewrite(_expand_mixed_mm, _refuse_zeros)
    )
)


# -- activations as codes ------------------------------------------------------------------------
def _dq8ca_shape(
    x: TensorType,
    input_scales: TensorType,
    input_zp: TensorType,
    weights: TensorType,
    weight_sums: TensorType,
    weight_scales: TensorType,
    group_size: int,
    bias: TensorType | None = None,
) -> TensorType:
    return _result(x, weights)


def _expand_dq8ca(builder: Builder, node: Node) -> Value:
    x, x_scale, x_zero, weight, sums, scales, group, bias = node.args
    n, lead = weight.type.dims[0], (*x.type.dims[:-1], 1)
    of_rows = [builder.emit("aten.view.default", each, lead) for each in (x_scale, x_zero)]
    codes = emit_quantize(builder, x, *of_rows, -128, 127, DType.int8)
    return emit_linear(
        builder,
        codes,
        weight,
        by_rows(builder, scales, n, transposed=True),
        bits=4,
        group=group,
        bias=bias,
        sums=by_rows(builder, sums, n, transposed=True),
        x_scale=x_scale,
        x_zero=x_zero,
        dtype=node.result.type.dtype,
    )


register(
    Operator("et_vk.linear_dq8ca_q4gsw.default", _dq8ca_shape, Rewrite(_expand_dq8ca, _supports))
)


def _q8csw_shape(
    x: TensorType,
    input_scale: float,
    input_zero_point: int,
    weights: TensorType,
    weight_sums: TensorType,
    weight_scales: TensorType,
    bias: TensorType | None = None,
) -> TensorType:
    made = _result(x, weights)
    return made.with_dtype(REAL) if x.dtype is DType.int8 else made


def _expand_q8csw(builder: Builder, node: Node) -> Value:
    x, x_scale, x_zero, weight, sums, scales, bias = node.args
    n = weight.type.dims[0]
    codes = (
        x
        if x.type.dtype is DType.int8
        else emit_quantize(builder, x, x_scale, x_zero, -128, 127, DType.int8)
    )
    return emit_linear(
        builder,
        codes,
        weight,
        by_rows(builder, scales, n),
        bias=bias,
        sums=by_rows(builder, sums, n),
        x_scale=x_scale,
        x_zero=x_zero,
        dtype=node.result.type.dtype,
    )


register(
    Operator("et_vk.linear_q8ta_q8csw.default", _q8csw_shape, Rewrite(_expand_q8csw, _supports))
)


def _q8ta_shape(
    x: TensorType,
    input_scale: float,
    input_zero_point: int,
    weights: TensorType,
    weight_sums: TensorType,
    weight_scales: TensorType,
    output_scale: float,
    output_zero_point: int,
    bias: TensorType | None = None,
    activation: str = "none",
) -> TensorType:
    least_code(activation, output_zero_point)
    return _result(x, weights).with_dtype(DType.int8)


def least_code(activation: str, zero: int) -> int:
    """The least code of a result: that of 0 after a relu."""
    if activation not in ("none", "relu"):
        raise ShapeError(f"activation {activation!r} is neither 'none' nor 'relu'")
    return max(zero, -128) if activation == "relu" else -128


def _expand_q8ta(builder: Builder, node: Node) -> Value:
    x, x_scale, x_zero, weight, sums, scales, out_scale, out_zero, bias, activation = node.args
    n = weight.type.dims[0]
    return emit_linear(
        builder,
        x,
        weight,
        by_rows(builder, scales, n),
        bias=bias,
        sums=by_rows(builder, sums, n),
        x_scale=x_scale,
        x_zero=x_zero,
        out=(out_scale, out_zero, least_code(activation, out_zero)),
    )


register(
    Operator(
        "et_vk.q8ta_linear.default",
        _q8ta_shape,
        Rewrite(_expand_q8ta, _supports),
        names=("et_vk.q8ta_linear_gemv.default",),
    )
)

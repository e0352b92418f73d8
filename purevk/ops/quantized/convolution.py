"""Convolutions of int8 codes: general, pointwise, depthwise and transposed. Activations lie
channels last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4
from purevk.ops.builder import Builder
from purevk.ops.conv.convolution import CHANNELS_LAST, pixels
from purevk.ops.conv.shapes import _transposed_window, _window
from purevk.ops.elementwise.program import REAL
from purevk.ops.quantized.choice import integer_tile
from purevk.ops.quantized.linear import align_rows, by_rows, inverse, least_code
from purevk.ops.quantized.quantize import emit_quantize
from purevk.ops.registry import Kernel, Operator, Rewrite, ShapeError, register

NAME = "purevk.quantized_conv2d"


def _shape(
    x: TensorType,
    weight: TensorType,
    sums: TensorType,
    scales: TensorType,
    bias: TensorType | None,
    x_scale: float,
    x_zero: int,
    out: tuple[float, int, int] | None,
    kernel: tuple,
    stride: tuple,
    padding: tuple,
    dilation: tuple,
    groups: int,
    transposed: bool = False,
    output_padding: tuple = (0, 0),
    dtype: DType = REAL,
) -> TensorType:
    """x [B, C, H, W] int8; weight [OC, KH * KW * IC or more], or [KH, KW, C] of a depthwise
    convolution; `out`: scale, zero point and least code of an int8 result, which is of `dtype`
    otherwise."""
    if x.rank != 4:
        raise ShapeError(f"cannot convolve {x}")
    channels = weight.dims[-1] if weight.rank == 3 else weight.dims[0]
    if weight.rank == 2:
        depth = kernel[0] * kernel[1] * (x.dims[1] // groups)
        if isinstance(depth, int) and (
            weight.dims[1] < depth or channels % groups or x.dims[1] % groups
        ):
            raise ShapeError(
                f"convolution of {x} with {weight} in {groups} groups by a window of {list(kernel)}"
            )
    elif channels != x.dims[1] or tuple(weight.dims[:2]) != tuple(kernel):
        raise ShapeError(
            f"depthwise convolution of {x} with {weight} by a window of {list(kernel)}"
        )
    sizes: list[Size] = []
    for d in range(2):
        one = (x.dims[2 + d], kernel[d], stride[d], padding[d], dilation[d])
        sizes.append(_transposed_window(*one, output_padding[d]) if transposed else _window(*one))
    return TensorType(DType.int8 if out is not None else dtype, (x.dims[0], channels, *sizes))


def _lower(lowering: Lowering, node: Node) -> None:
    (
        x_value,
        w_value,
        sum_value,
        scale_value,
        bias_value,
        x_scale,
        x_zero,
        out_codes,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        transposed,
        _,
        _,
    ) = node.args
    out = lowering.operand(node.result)
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    x, pixel = pixels(lowering, lowering.operand(x_value))
    batches, channels, height, width = x.dims
    _, out_channels, out_height, out_width = out.dims
    depthwise = w_value.type.rank == 3
    weight = _weight(lowering, w_value)
    group_in, group_out = channels // groups, out_channels // groups
    vector = gcd4(group_out if not depthwise else out_channels, out.offset)
    macros: dict[str, Any] = {
        "T_OUT": out.dtype.glsl,
        "VEC4_OUT": int(vector),
        "REQUANT": int(out_codes is not None),
        "BIAS": int(bias_value is not None),
        "TRANSPOSED": int(transposed),
        "DOT": int(lowering.traits.has("integer_dot_product")),
    }
    if out.dtype.itemsize == 1 and not vector:
        macros["HAS_8BIT"] = "1"
    buffers: list[tuple[Operand, str]] = [(x, "r"), (weight, "r")]
    for value, macro in ((scale_value, "T_SCALE"), (sum_value, ""), (bias_value, "T_BIAS")):
        if value is not None:
            operand = _whole(lowering, value)
            buffers.append((operand, "r"))
            macros |= {macro: operand.dtype.glsl} if macro else {}
    buffers.append((out, "w"))
    scale, zero, low = out_codes if out_codes is not None else (1.0, 0, -128)
    row = out_channels if depthwise else weight.strides[0] // 4
    window = {
        "KH": kernel[0],
        "KW": kernel[1],
        "stride_y": stride[0],
        "stride_x": stride[1],
        "pad_y": padding[0],
        "pad_x": padding[1],
        "dilation_y": dilation[0],
        "dilation_x": dilation[1],
    }
    params: dict[str, Size] = {
        "batches": batches,
        "H": height,
        "W": width,
        "IC": 1 if depthwise else group_in,
        "OH": out_height,
        "OW": out_width,
        "OC": group_out,
        "pixel_a": pixel,
        "ldw": row,
        "channels_out": out_channels,
        **window,
        "x_scale": bits_of(x_scale),
        "x_zero": x_zero,
        "out_inverse": bits_of(inverse(scale)),
        "out_zero": zero,
        "out_low": low,
        "offset_a": x.offset,
        "offset_w": weight.offset // 4,
        "offset_o": out.offset,
    }
    rows = batches * out_height * out_width
    flops = 2 * rows * out_channels * kernel[0] * kernel[1] * (1 if depthwise else group_in)
    if depthwise:
        macros |= {"ALIGNED": 4 if gcd4(pixel, x.offset, out_channels) else 1, "PX": 2}
        work = _dims.ceil_div(out_channels, 4) * _dims.ceil_div(out_width, 2)
        grid = (_dims.ceil_div(work, 64), out_height, batches)
        template = "quantized/qconv2d_dw.comp"
    else:
        aligned = gcd4(pixel, x.offset, group_in)
        macros["ALIGNED"] = (
            16 if aligned and _dims.gcd_of(group_in) % 16 == 0 else 4 if aligned else 1
        )
        tile = _tile(lowering, rows, group_out, groups)
        macros |= tile
        grid = (
            _dims.ceil_div(group_out, tile["TILE_N"]),
            _dims.ceil_div(rows, tile["TILE_M"]),
            groups,
        )
        template = "quantized/qconv2d.comp"
    lowering.dispatch(
        template,
        buffers,
        macros=macros,
        params=params,
        specialize=window,
        grid=grid,
        flops=flops,
    )


def _tile(lowering: Lowering, rows: Size, columns: Size, groups: int) -> dict[str, int]:
    if not lowering.traits.profile.has_fast_shared_memory:
        return {"SHARED": 0, "TILE_M": 64, "TILE_N": 8, "CHUNKS": 1, "THREAD_M": 2, "THREAD_N": 8}
    for tile_m, tile_n in ((64, 64), (32, 64), (32, 32)):
        tiles = -(-_dims.upper(rows) // tile_m) * -(-_dims.upper(columns) // tile_n) * groups
        if tiles >= max(lowering.traits.cores, 16) and _dims.upper(columns) > tile_n // 2:
            break
    return integer_tile(tile_m, tile_n)


def _weight(lowering: Lowering, value: Value) -> Operand:
    """Rows that start at multiples of 4 bytes; the weight of a depthwise convolution is dense."""
    operand = lowering.operand(value)
    known = isinstance(operand.offset, int) and operand.offset % 4 == 0
    if value.type.rank == 3:
        return (
            operand
            if known and operand.layout.is_contiguous(operand.dims)
            else dense(lowering, operand)
        )
    if (
        known
        and gcd4(operand.strides[0])
        and isinstance(operand.strides[1], int)
        and operand.strides[1] == 1
    ):
        return operand
    return align_rows(lowering, operand, 4)


def _whole(lowering: Lowering, value: Value) -> Operand:
    operand = lowering.operand(value)
    start = isinstance(operand.offset, int) and operand.offset == 0
    return (
        operand
        if start and operand.layout.is_contiguous(operand.dims)
        else dense(lowering, operand)
    )


def _supports(node: Node, traits: Any) -> str | None:
    for value in node.inputs:
        if value.type.dtype in (DType.float64, DType.bfloat16):
            return f"no kernel for {value.type.dtype.name}"
    return None


register(
    Operator(
        NAME,
        _shape,
        Kernel(_lower, layouts=lambda node, layout_of: (CHANNELS_LAST,), supports=_supports),
    )
)


# -- et_vk ---------------------------------------------------------------------------------------
def emit_convolution(
    builder: Builder,
    x: Value,
    x_scale: float,
    x_zero: int,
    weight: Value,
    sums: Value,
    scales: Value,
    bias: Value | None,
    window: Sequence[Sequence[int]],
    groups: int,
    *,
    out: tuple[float, int, int] | None = None,
    transposed: bool = False,
    output_padding: Sequence[int] = (0, 0),
    dtype: DType = REAL,
) -> Value:
    """One convolution; `window`: kernel, stride, padding and dilation. Sums, scales and bias may
    have more elements than there are output channels. Executorch 1.1 leaves the sums of a depthwise
    weight, [KH, OC], to be added up."""
    if sums.type.rank == 2:
        sums = builder.emit("aten.sum.dim_IntList", sums, (0,), False, DType.int32)
    channels = weight.type.dims[-1] if weight.type.rank == 3 else weight.type.dims[0]
    if sums.type.dtype is not DType.int32:
        sums = builder.emit("aten._to_copy.default", sums, DType.int32)
    if scales.type.dims[0] < channels:
        scales = builder.emit(
            "aten.cat.default", (by_rows(builder, scales, channels // groups),) * groups, 0
        )
    sums, scales = by_rows(builder, sums, channels), by_rows(builder, scales, channels)
    return builder.emit(
        NAME,
        x,
        weight,
        sums,
        scales,
        bias,
        float(x_scale),
        int(x_zero),
        out,
        *(tuple(each) for each in window),
        groups,
        transposed,
        tuple(output_padding),
        dtype,
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
    bias: TensorType | None,
    kernel_size: tuple,
    stride: tuple,
    padding: tuple,
    dilation: tuple,
    groups: int,
    activation: str = "none",
) -> TensorType:
    out = (output_scale, output_zero_point, least_code(activation, output_zero_point))
    return _shape(
        x,
        weights,
        weight_sums,
        weight_scales,
        bias,
        input_scale,
        input_zero_point,
        out,
        kernel_size,
        stride,
        padding,
        dilation,
        groups,
    )


def _expand_q8ta(builder: Builder, node: Node) -> Value:
    (
        x,
        x_scale,
        x_zero,
        weight,
        sums,
        scales,
        out_scale,
        out_zero,
        bias,
        *window,
        groups,
        activation,
    ) = node.args
    out = (out_scale, out_zero, least_code(activation, out_zero))
    return emit_convolution(
        builder, x, x_scale, x_zero, weight, sums, scales, bias, window, groups, out=out
    )


register(
    Operator(
        "et_vk.q8ta_conv2d.default",
        _q8ta_shape,
        Rewrite(_expand_q8ta, _supports),
        names=(
            "et_vk.q8ta_conv2d_pw.default",
            "et_vk.q8ta_conv2d_dw.default",
            "et_vk.conv2d_q8ta_q8csw_q8to.default",
            "et_vk.conv2d_q8ta_q8csw_q8to_dw.default",
        ),
    )
)


def _transposed_shape(
    x: TensorType,
    input_scale: float,
    input_zero_point: int,
    weights: TensorType,
    weight_sums: TensorType,
    weight_scales: TensorType,
    output_scale: float,
    output_zero_point: int,
    bias: TensorType | None,
    kernel_size: tuple,
    stride: tuple,
    padding: tuple,
    output_padding: tuple,
    dilation: tuple,
    groups: int,
    activation: str = "none",
) -> TensorType:
    out = (output_scale, output_zero_point, least_code(activation, output_zero_point))
    return _shape(
        x,
        weights,
        weight_sums,
        weight_scales,
        bias,
        input_scale,
        input_zero_point,
        out,
        kernel_size,
        stride,
        padding,
        dilation,
        groups,
        True,
        output_padding,
    )


def _expand_transposed(builder: Builder, node: Node) -> Value:
    (
        x,
        x_scale,
        x_zero,
        weight,
        sums,
        scales,
        out_scale,
        out_zero,
        bias,
        kernel,
        stride,
        padding,
        extra,
        dilation,
        groups,
        activation,
    ) = node.args
    window, out = (
        (kernel, stride, padding, dilation),
        (out_scale, out_zero, least_code(activation, out_zero)),
    )
    if groups > 1:  # the scales are those of one group, and hold for all
        scales = builder.emit("aten.slice.Tensor", scales, 0, 0, weight.type.dims[0] // groups, 1)
    return emit_convolution(
        builder,
        x,
        x_scale,
        x_zero,
        weight,
        sums,
        scales,
        bias,
        window,
        groups,
        out=out,
        transposed=True,
        output_padding=extra,
    )


register(
    Operator(
        "et_vk.q8ta_conv2d_transposed.default",
        _transposed_shape,
        Rewrite(_expand_transposed, _supports),
    )
)


def _float_shape(
    x: TensorType,
    input_scale: float,
    input_zero_point: int,
    weights: TensorType,
    weight_sums: TensorType,
    weight_scales: TensorType,
    bias: TensorType | None,
    kernel_size: tuple,
    stride: tuple,
    padding: tuple,
    dilation: tuple,
    groups: int,
) -> TensorType:
    return _shape(
        x,
        weights,
        weight_sums,
        weight_scales,
        bias,
        input_scale,
        input_zero_point,
        None,
        kernel_size,
        stride,
        padding,
        dilation,
        groups,
        dtype=x.dtype,
    )


def _expand_float(builder: Builder, node: Node) -> Value:
    x, x_scale, x_zero, weight, sums, scales, bias, *window, groups = node.args
    codes = emit_quantize(builder, x, x_scale, x_zero, -128, 127, DType.int8)
    return emit_convolution(
        builder,
        codes,
        x_scale,
        x_zero,
        weight,
        sums,
        scales,
        bias,
        window,
        groups,
        dtype=node.result.type.dtype,
    )


register(
    Operator("et_vk.conv2d_q8ta_q8csw.default", _float_shape, Rewrite(_expand_float, _supports))
)

"""Convolutions. Activations lie channels last; a pointwise convolution is then a matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, packed
from purevk.lower.epilogue import make_epilogue
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4
from purevk.ops.builder import Builder
from purevk.ops.conv.choice import choose, choose_depthwise, is_short
from purevk.ops.conv.convolution_nd import expand as expand_others
from purevk.ops.conv.nchw import (
    adapt,
    is_matmul,
    lower_groups,
    lower_matmul,
    reads_nchw,
    runs_in_nchw,
    spread_last,
)
from purevk.ops.conv.nchw_tiles import lower_tiles, tiles_of
from purevk.ops.conv.shapes import _convolution_shape, _refuse, _window, window_parameters
from purevk.ops.image_layout import LayoutQuery, is_nchw_operand, keeps_nchw
from purevk.ops.matmul.choice import (
    Batches,
    add_parts,
    bind,
    emit,
    first_extra,
    parts_of,
    split_size,
)
from purevk.ops.matmul.choice import choose as choose_matmul
from purevk.ops.matmul.matmul import supports_float
from purevk.ops.registry import Kernel, Operator, Rewrite, register
from purevk.ops.shapes import pair

NAME = "purevk.conv2d"
CHANNELS_LAST = (0, 2, 3, 1)


def _expand_convolution(builder: Builder, node: Node) -> Value:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args[:9]
    spatial = weight.type.rank - 2
    if transposed or spatial > 2:
        return expand_others(builder, node)
    stride, padding, dilation = (pair(values, spatial) for values in (stride, padding, dilation))
    if spatial == 1:
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        weight = builder.emit("aten.unsqueeze.default", weight, 2)
    sizes = x.type.dims if x.type.rank == spatial + 2 else (1, *x.type.dims)
    if spatial == 1:
        sizes = (*sizes[:2], 1, sizes[2])
    if tuple(sizes) != tuple(x.type.dims):
        x = builder.emit("aten.view.default", x, sizes)
    packed = builder.emit("purevk.copy", builder.emit("aten.permute.default", weight, (2, 3, 1, 0)))
    result = builder.emit(NAME, x, packed, bias, stride, padding, dilation, groups, None, ())
    if result.type.dims != node.result.type.dims:
        result = builder.emit("aten.view.default", result, node.result.type.dims)
    return result


register(
    Operator(
        "aten.convolution.default",
        _convolution_shape,
        Rewrite(_expand_convolution, _refuse),
        names=("aten._convolution.default",),
    )
)


def _clamped_shape(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_min: float | None = None,
    output_max: float | None = None,
) -> TensorType:
    return _convolution_shape(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )


def _expand_clamped(builder: Builder, node: Node) -> Value:
    low, high = node.args[9:]
    result = builder.emit("aten.convolution.default", *node.args[:9])
    # The exporter writes the largest double for "no bound".
    low = None if low is None or low <= -3.4028235e38 else float(low)
    high = None if high is None or high >= 3.4028235e38 else float(high)
    if low is None and high is None:
        return result
    return builder.emit("aten.clamp.default", result, low, high)


register(
    Operator("et_vk.conv_with_clamp.default", _clamped_shape, Rewrite(_expand_clamped, _refuse))
)


# -- the kernel ----------------------------------------------------------------------------------
def _conv2d_shape(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None,
    stride: tuple,
    padding: tuple,
    dilation: tuple,
    groups: int,
    epilogue: Any = None,
    extras: tuple = (),
    spread: tuple = (1, 1),
) -> TensorType:
    """With `spread` (y, x), which only 1 x 1 windows take, the channels (dy, dx, c) of an output
    are the channels c of y * x pixels."""
    kh, kw, _, out = weight.dims
    height = _window(x.dims[2], kh, stride[0], padding[0], dilation[0])
    width = _window(x.dims[3], kw, stride[1], padding[1], dilation[1])
    dtype = x.dtype if epilogue is None else epilogue.dtypes[epilogue.outputs[0]]
    return TensorType(
        dtype, (x.dims[0], out // (spread[0] * spread[1]), height * spread[0], width * spread[1])
    )


def pixels(lowering: Lowering, x: Operand) -> tuple[Operand, Size]:
    """An operand [B, C, H, W] whose pixels follow one another in memory, channels dense, and the
    elements from one pixel to the next; copied if it is not so."""
    _, channels, height, width = x.dims
    batch, channel, row, pixel = x.strides
    one = lambda size: isinstance(size, int) and size == 1  # noqa: E731
    if one(width):
        pixel = row if not one(height) else (batch if not one(x.dims[0]) else channels)
    fits = isinstance(x.offset, int) and (
        one(channels) or (isinstance(channel, int) and channel == 1)
    )
    fits = (
        fits
        and (one(height) or row == width * pixel)
        and (one(x.dims[0]) or batch == height * width * pixel)
    )
    fits = fits and not (isinstance(pixel, int) and pixel == 0)
    if not fits:
        x = dense(lowering, x, CHANNELS_LAST)
        pixel = channels
    return x, pixel


def _conv2d_lower(lowering: Lowering, node: Node) -> None:
    (
        x_value,
        weight_value,
        bias_value,
        stride,
        padding,
        dilation,
        groups,
        epilogue,
        extras,
        spread,
    ) = node.args
    out = lowering.operand(node.result)
    plain = is_matmul(tuple(weight_value.type.dims[:2]), stride, padding, groups)
    bias = packed(lowering, bias_value)
    x = lowering.operand(x_value)
    planes = is_nchw_operand(x) and is_nchw_operand(out) and runs_in_nchw(node, lowering.traits)
    if planes or reads_nchw(lowering.traits, node, x):
        tiles = tiles_of(lowering.traits, node) if planes else None
        if tiles is not None:
            weight = packed(lowering, weight_value)
            lower_tiles(
                lowering,
                tiles,
                x,
                weight,
                bias,
                out,
                epilogue,
                extras,
                (stride, padding, dilation),
                groups,
                spread,
            )
        elif plain:
            lower_matmul(lowering, x, weight_value, bias, out, epilogue, extras, spread)
        else:
            weight = packed(lowering, weight_value)
            lower_groups(
                lowering,
                x,
                weight,
                bias,
                out,
                epilogue,
                extras,
                (stride, padding, dilation),
                groups,
            )
        return
    weight = packed(lowering, weight_value)
    x, pixel = pixels(lowering, x)
    batches, channels, height, width = x.dims
    kh, kw, group_in, out_channels = weight.dims
    _, _, out_height, out_width = out.dims
    rows = batches * out_height * out_width // (spread[0] * spread[1])
    depthwise = groups == channels and out_channels == channels and group_in == 1 and groups > 1
    group_out = out_channels if depthwise else out_channels // groups
    vector_out = gcd4(group_out)
    vector_a = gcd4(pixel, x.offset, channels if depthwise else group_in)
    vector_b = gcd4(group_out, out_channels)
    half = x.dtype is weight.dtype is DType.float16
    if plain:
        choice = choose_matmul(
            lowering.traits, rows, out_channels, channels, 1, half, False, (vector_a, vector_b)
        )
    elif depthwise:
        choice = choose_depthwise(
            lowering.traits, channels, out_width, batches * out_height, dilation[1]
        )
    else:
        choice = choose(
            lowering.traits, rows, group_out, kh * kw, group_in, groups, half, (vector_a, vector_b)
        )
    columns = "N" if plain or choice.splits > 1 else "pixel_o"
    place, channel = (
        (f"m * {columns} + n", "n") if spread == (1, 1) else spread_last(x, out, spread)
    )
    made = make_epilogue(
        lowering,
        epilogue,
        extras,
        out,
        first_extra(choice, bias),
        "b, m, n",
        place,
        (1, channel),
        vector_out,
    )
    if plain:
        if spread != (1, 1):
            made.macros["PLACE(b, m, n)"] = f"({place})"
        _as_matmul(lowering, choice, x, pixel, weight, bias, out, made, rows)
        return
    if choice.splits > 1:
        _in_parts(
            lowering,
            choice,
            x,
            pixel,
            weight,
            bias,
            out,
            made,
            (stride, padding, dilation),
            (vector_a, vector_b, vector_out),
        )
        return
    macros, buffers = bind(lowering, x, weight, bias, out, (vector_a, vector_b, vector_out))
    macros |= made.macros
    buffers += made.buffers
    window = window_parameters((kh, kw), stride, padding, dilation)
    common: dict[str, Size] = {
        "batches": batches,
        "H": height,
        "W": width,
        "OH": out_height,
        "OW": out_width,
        "pixel_a": pixel,
        "pixel_o": out_channels,
        "ldb": out_channels,
        **window,
        "offset_a": x.offset,
        "offset_b": weight.offset,
        "offset_o": out.offset,
        "offset_bias": bias.offset if bias is not None else 0,
    }
    flops = 2 * rows * out_channels * kh * kw * group_in
    if depthwise:
        params = {**common, "C": channels}
        lowering.dispatch(
            "conv/conv2d_dw.comp",
            buffers,
            macros={**macros, **choice.macros()},
            params=params,
            specialize=lowering.fixed(params, window),
            grid=choice.grid(batches, channels, out_height, out_width),
            flops=flops,
        )
        return
    template = (
        "conv/conv2d.comp" if choice.template == "matmul/matmul.comp" else "conv/conv2d_tiled.comp"
    )
    params = {**common, "IC": group_in, "OC": group_out}
    lowering.dispatch(
        template,
        buffers,
        macros={**macros, **choice.macros()},
        params=params,
        specialize=lowering.fixed(params, ("IC", *window) if is_short(group_in) else window),
        grid=choice.grid(rows, group_out, groups),
        subgroup_size=choice.subgroup,
        flops=flops,
    )


def _in_parts(
    lowering: Lowering,
    choice: Any,
    x: Operand,
    pixel: Size,
    weight: Operand,
    bias: Operand | None,
    out: Operand,
    epilogue: Any,
    window: tuple,
    vectors: tuple[bool, bool, bool],
) -> None:
    """A convolution of one group with the depth split among workgroups, and a second dispatch that
    adds the parts up."""
    batches, channels, height, width = x.dims
    kh, kw, _, columns = weight.dims
    _, _, out_height, out_width = out.dims
    rows = batches * out_height * out_width
    depth = kh * kw * (channels if vectors[0] else _dims.ceil_div(channels, 4) * 4)
    parts = parts_of(lowering, choice.splits, 1, rows, columns)
    macros, buffers = bind(lowering, x, weight, None, parts, vectors)
    params: dict[str, Size] = {
        "batches": batches,
        "H": height,
        "W": width,
        "IC": channels,
        "OH": out_height,
        "OW": out_width,
        "OC": columns,
        "pixel_a": pixel,
        "pixel_o": columns,
        "ldb": columns,
        **window_parameters((kh, kw), *window),
        "offset_a": x.offset,
        "offset_b": weight.offset,
        "offset_o": 0,
        "offset_bias": 0,
        "splits": choice.splits,
        "split_size": split_size(depth, choice),
    }
    lowering.dispatch(
        "conv/conv2d_tiled.comp",
        buffers,
        macros={**macros, "SPLIT_K": 1, **choice.macros()},
        params=params,
        specialize=lowering.fixed(params),
        grid=choice.grid(rows, columns, 1),
        subgroup_size=choice.subgroup,
        flops=2 * rows * columns * kh * kw * channels,
    )
    add_parts(
        lowering,
        parts,
        bias,
        out,
        epilogue,
        choice.splits,
        (rows, columns, columns),
        Batches(),
        vectors[2],
    )


def _as_matmul(
    lowering: Lowering,
    choice: Any,
    x: Operand,
    pixel: Size,
    weight: Operand,
    bias: Operand | None,
    out: Operand,
    epilogue: Any,
    rows: Size,
) -> None:
    """A 1 x 1 window: rows are pixels."""
    k, n = weight.dims[2], weight.dims[3]
    a = Operand(x.storage, Layout(x.offset, (pixel, 1)), TensorType(x.dtype, (rows, k)))
    b = Operand(weight.storage, Layout(weight.offset, (n, 1)), TensorType(weight.dtype, (k, n)))
    flat = Operand(out.storage, Layout(out.offset, (n, 1)), TensorType(out.dtype, (rows, n)))
    emit(
        choice,
        lowering,
        a=a,
        b=b,
        bias=bias,
        out=flat,
        epilogue=epilogue,
        sizes=(rows, n, k),
        strides=(pixel, n, n),
        batches=Batches(),
        transposed=False,
        vectors=(gcd4(k, pixel, x.offset), gcd4(n), gcd4(n)),
    )


def _conv2d_layouts(node: Node, query: LayoutQuery) -> tuple:
    planes = query.traits is not None and runs_in_nchw(node, query.traits)
    planes = planes and keeps_nchw(node, node.args[0], query, True, runs_in_nchw)
    return (None if planes else CHANNELS_LAST,)


register(
    Operator(
        NAME,
        _conv2d_shape,
        Kernel(
            _conv2d_lower,
            layouts=_conv2d_layouts,
            supports=supports_float,
            epilogue=True,
            bfloat16=False,
            adapt=adapt,
        ),
    )
)

"""Convolutions of NCHW images: those of 1 x 1 windows, which are matmuls in this order too, those
in groups of few channels, and those of few channels in all, such as the colours of an image."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.epilogue import make_epilogue
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4, gcd8
from purevk.ops.conv.arguments import Conv2d, Window
from purevk.ops.conv.nchw_tiles import tiles_of
from purevk.ops.image_layout import LayoutQuery, column_rows, is_nchw_operand
from purevk.ops.matmul.choice import Batches, both_half, choose, emit, may_overlap, stored_vectors
from purevk.ops.registry import Order
from purevk.tuning import DeviceTraits

MOST_IMAGES = 65535  # a dim of a grid, on any device
FEW = 4  # input channels of which a convolution reads NCHW and writes NHWC
WIDE = 32  # channels of a group for which tiles of matmuls are worth a conversion
_MOST_ALONG_X = 4  # outputs of a row that an invocation makes: 8 are slower on an NVIDIA H200
ROWS_FIRST = (0, 1, 3, 2)  # a packed weight [1, 1, in, out] whose input channels are dense


def runs_in_nchw(node: Node, traits: DeviceTraits) -> bool:
    """Whether a convolution node can read and write NCHW as well as it can work on NHWC."""
    conv = Conv2d.of(node)
    if tiles_of(traits, conv, node.result.type) is not None:
        return True
    _, _, group_in, out = conv.weight.type.dims
    if conv.is_matmul:
        batches, _, height, width = conv.x.type.dims
        return (
            gcd4(height * width if conv.spread == (1, 1) else width)
            and _dims.upper(batches) <= MOST_IMAGES
        )
    return (
        conv.groups > 1
        and (group_in < WIDE or out // conv.groups < WIDE)
        and conv.column_loads <= traits.profile.max_window_elements
    )


def reads_nchw(traits: DeviceTraits, conv: Conv2d, x: Operand, result: TensorType) -> bool:
    """Whether the convolution of a few channels should read NCHW images as they are, and write
    NHWC."""
    _, _, group_in, out = conv.weight.type.dims
    if (
        not traits.profile.coalesces_accesses
        or conv.groups != 1
        or group_in > FEW
        or not is_nchw_operand(x)
        or conv.column_loads > traits.profile.max_window_elements
    ):
        return False
    coopmat = traits.coopmat_shape is not None and x.dtype in (DType.float16, DType.bfloat16)
    work = _dims.upper(_dims.product((x.dims[0], *result.dims[1:])))
    many = work * 2 * conv.window.taps * group_in > traits.profile.max_direct_flops
    return out % FEW == 0 and not conv.is_matmul and not (coopmat and many)


def adapt(node: Node, orders: tuple[Order | None, ...], query: LayoutQuery) -> Node:
    """The node with the weight in the order that a matmul of NCHW images reads."""
    if orders[0] is not None or query.traits is None:
        return node
    conv = Conv2d.of(node)
    if not conv.is_matmul or tiles_of(query.traits, conv, node.result.type) is not None:
        return node
    args = (node.args[0], query.copied(conv.weight, ROWS_FIRST), *node.args[2:])
    return Node(node.op, args, node.results, node.source, node.alias)


def spread_last(x: Operand, out: Operand, spread: tuple[int, int]) -> tuple[str, str]:
    """The element of an NHWC result for row m (a pixel of the input) and column n (dy, dx, channel)
    of a matmul, and its channel."""
    channels, width = out.dims[1], x.dims[3]
    phase, source = f"(n) / {channels}", f"(m) / {width}"
    row, column = (
        f"({source}) * {spread[0]} + ({phase}) / {spread[1]}",
        f"(m) % {width} * {spread[1]} + ({phase}) % {spread[1]}",
    )
    return (
        f"(({row}) * {width * spread[1]} + {column}) * {channels} + (n) % {channels}",
        f"(n) % {channels}",
    )


def _spread_nchw(x: Operand, out: Operand, spread: tuple[int, int]) -> tuple[str, str]:
    """The same for row m (dy, dx, channel) and column n (a pixel) of image b of an NCHW result."""
    _, channels, height, width = out.dims
    phase, across = f"(m) / {channels}", x.dims[3]
    row, column = (
        f"(n) / {across} * {spread[0]} + ({phase}) / {spread[1]}",
        f"(n) % {across} * {spread[1]} + ({phase}) % {spread[1]}",
    )
    return (
        f"(((b) * {channels} + (m) % {channels}) * {height} + {row}) * {width} + {column}",
        f"(m) % {channels}",
    )


def lower_matmul(
    lowering: Lowering, conv: Conv2d, x: Operand, bias: Operand | None, out: Operand
) -> None:
    """[out channels, channels] x [channels, pixels] for each image."""
    batches, channels, height, width = x.dims
    pixels = height * width
    one_row = isinstance(height, int) and height == 1
    if (not one_row and x.strides[2] != width) or not isinstance(x.offset, int):
        x = dense(lowering, x)
    weight = lowering.operand(conv.weight)
    if not (
        isinstance(weight.strides[2], int)
        and weight.strides[2] == 1
        and isinstance(weight.offset, int)
    ):
        weight = dense(lowering, weight, ROWS_FIRST)
    rows, pitch, channel_step = weight.dims[3], weight.strides[3], x.strides[1]
    a = Operand(
        weight.storage,
        Layout(weight.offset, (pitch, 1)),
        TensorType(weight.dtype, (rows, channels)),
    )
    b = Operand(
        x.storage,
        Layout(x.offset, (x.strides[0], channel_step, 1)),
        TensorType(x.dtype, (batches, channels, pixels)),
    )
    vectors = (
        gcd4(channels, pitch, weight.offset),
        gcd4(pixels, channel_step, x.strides[0], x.offset),
    )
    plain = conv.spread == (1, 1)
    vector_out = plain and gcd4(pixels, out.offset)
    half = both_half(x.dtype, weight.dtype)
    aligned = plain and may_overlap(lowering, out, conv.extras)
    aligned = aligned and gcd8(pixels, pitch, channel_step, x.strides[0], weight.offset, x.offset)
    choice = choose(
        lowering.traits,
        rows,
        pixels,
        channels,
        batches,
        half,
        False,
        vectors,
        aligned and gcd8(out.offset),
        bfloat16=half and x.dtype is DType.bfloat16,
    )
    vector_out = stored_vectors(choice, vector_out)
    element, channel = ("(b * M + m) * N + n", "m") if plain else _spread_nchw(x, out, conv.spread)
    epilogue = make_epilogue(
        lowering,
        conv.epilogue,
        conv.extras,
        out,
        "b, m, n",
        element,
        None,
        vector_out,
        (1, channel),
    )
    if not plain:
        epilogue.macros |= {"ELEMENT(b, m, n)": f"({element})", "ELEMENT_STEP": str(conv.spread[1])}
    if bias is not None:
        epilogue.macros["BIAS_OF_ROWS"] = "1"
    emit(
        choice,
        lowering,
        a=a,
        b=b,
        bias=bias,
        out=out,
        epilogue=epilogue,
        sizes=(rows, pixels, channels),
        strides=(pitch, channel_step, pixels),
        batches=Batches(batches, batches, batch_b=x.strides[0], batch_o=rows * pixels),
        transposed=False,
        vectors=(*vectors, vector_out),
    )


def _outputs(
    traits: DeviceTraits, window: Window, out: Sequence[Size], each: int
) -> tuple[bool, int]:
    """Whether an invocation makes outputs of a row rather than of a column, and how many. Those
    along the dim in which windows are long share more of what it reads."""
    kernel, stride, dilation = window.kernel, window.stride, window.dilation
    if kernel[0] == 1 < kernel[1]:
        turned = (*out[:2], out[3], out[2])
        outputs = column_rows(traits, turned, kernel[::-1], stride[::-1], dilation[::-1], each)
        if outputs:
            return True, min(outputs, _MOST_ALONG_X)
    return False, column_rows(traits, out, kernel, stride, dilation, each)


def lower_groups(
    lowering: Lowering,
    conv: Conv2d,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    out: Operand,
) -> None:
    """The kernel for few channels; the result is NCHW or NHWC."""
    batches, _, height, width = x.dims
    _, _, group_in, channels = weight.dims
    group_out = channels // conv.groups
    window = conv.window
    each = next(count for count in (8, 4, 2, 1) if group_out % count == 0)
    along_x, outputs = _outputs(lowering.traits, window, out.dims, each)
    nhwc = not is_nchw_operand(out)
    vector = nhwc and gcd4(each, channels, out.offset)
    epilogue = make_epilogue(
        lowering,
        conv.epilogue,
        conv.extras,
        out,
        "at, n",
        "at",
        (1, "n"),
        vector,
    )
    macros = {
        "OUTPUTS": outputs,
        "ALONG_X": int(along_x),
        "EACH": each,
        "VEC4_B": int(gcd4(each, group_out, weight.offset)),
        "NHWC": int(nhwc),
        "VEC4_OUT": int(vector),
    }
    _, _, out_height, out_width = out.dims
    params: dict[str, Size] = {
        "batches": batches,
        "IC": group_in,
        "OC": group_out,
        "channels": channels,
        "H": height,
        "W": width,
        "OH": out_height,
        "OW": out_width,
        **{name: x.strides[d] for d, name in enumerate(("image_a", "channel_a", "row_a"))},
    }
    local = min(256, lowering.traits.max_invocations)
    lines, line = (out_height, out_width) if along_x else (out_width, out_height)
    work = batches * (channels // each) * lines * _dims.ceil_div(line, outputs)
    lowering.dispatch(
        "conv/conv2d_nchw.comp",
        {"a": x, "b": weight, "bias": bias, "out": out},
        params,
        macros,
        epilogue=epilogue,
        specialize=True,
        constants=window.params,
        local=local,
        grid=lowering.linear_grid(work, local),
        flops=2 * out.type.numel * window.taps * group_in,
    )

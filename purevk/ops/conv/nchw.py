"""Convolutions over planes (NCHW): those of 1 x 1 windows, which are matrix products in this order
too, those in groups of few channels, and those of few channels in all, such as the colours of an
image."""

from __future__ import annotations

from typing import Any

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.epilogue import make_epilogue
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4
from purevk.ops.conv.nchw_tiles import tiles_of
from purevk.ops.conv.shapes import window_parameters
from purevk.ops.image_layout import LayoutQuery, column_rows, is_nchw_operand
from purevk.ops.matmul.choice import Batches, choose, emit, first_extra
from purevk.tuning import DeviceTraits

MOST_IMAGES = 65535  # a dim of a grid, on any device
FEW = 4  # input channels of which a convolution reads planes and writes channels last
WIDE = 32  # channels of a group for which tiles of matrix products are worth a conversion
ROWS_FIRST = (0, 1, 3, 2)  # a packed weight [1, 1, in, out] whose input channels are dense


def is_matmul(kernel: tuple, stride: tuple, padding: tuple, groups: int) -> bool:
    """Whether a convolution is a matrix product."""
    return kernel == (1, 1) and stride == (1, 1) and padding == (0, 0) and groups == 1


def is_matmul_node(node: Node) -> bool:
    """`is_matmul` of a node."""
    return is_matmul(
        tuple(node.args[1].type.dims[:2]), *(tuple(node.args[at]) for at in (3, 4)), node.args[6]
    )


def runs_in_nchw(node: Node, traits: DeviceTraits) -> bool:
    """Whether a convolution node can read and write planes as well as it can work channels last."""
    if tiles_of(traits, node) is not None:
        return True
    x, weight, groups = node.args[0], node.args[1], node.args[6]
    kh, kw, group_in, out = weight.type.dims
    if is_matmul_node(node):
        batches, _, height, width = x.type.dims
        return (
            gcd4(height * width if node.args[9] == (1, 1) else width)
            and _dims.upper(batches) <= MOST_IMAGES
        )
    dilation = node.args[5]
    return (
        groups > 1
        and min(group_in, out // groups) < WIDE
        and ((kh - 1) * dilation[0] + 1) * kw <= traits.profile.max_window_elements
    )


def reads_nchw(traits: DeviceTraits, node: Node, x: Operand) -> bool:
    """Whether the convolution of a few planes should read them as they lie, and write channels
    last."""
    weight, groups, dilation = node.args[1], node.args[6], node.args[5]
    kh, kw, group_in, out = weight.type.dims
    if (
        not traits.profile.coalesces_accesses
        or groups != 1
        or group_in > FEW
        or not is_nchw_operand(x)
        or ((kh - 1) * dilation[0] + 1) * kw > traits.profile.max_window_elements
    ):
        return False
    units = traits.matrix_shape is not None and x.dtype is DType.float16
    work = (
        _dims.upper(_dims.product((x.dims[0], *node.result.type.dims[1:]))) * 2 * kh * kw * group_in
    )
    most = traits.profile.max_direct_flops
    return out % FEW == 0 and not is_matmul_node(node) and not (units and work > most)


def adapt(node: Node, orders: tuple, query: LayoutQuery) -> Node:
    """The node with the weight that a product over planes reads."""
    if (
        orders[0] is not None
        or not is_matmul_node(node)
        or tiles_of(query.traits, node) is not None
    ):
        return node
    args = (node.args[0], query.copied(node.args[1], ROWS_FIRST), *node.args[2:])
    return Node(node.op, args, node.results, node.source, node.alias)


def spread_last(x: Operand, out: Operand, spread: tuple[int, int]) -> tuple[str, str]:
    """Where a product's row m (a pixel of the input) and column n (dy, dx, channel) go channels
    last, and the channel."""
    channels, width = out.dims[1], x.dims[3]
    phase, line = f"(n) / {channels}", f"(m) / {width}"
    row, column = (
        f"({line}) * {spread[0]} + ({phase}) / {spread[1]}",
        f"(m) % {width} * {spread[1]} + ({phase}) % {spread[1]}",
    )
    return (
        f"(({row}) * {width * spread[1]} + {column}) * {channels} + (n) % {channels}",
        f"(n) % {channels}",
    )


def _spread_planes(x: Operand, out: Operand, spread: tuple[int, int]) -> tuple[str, str]:
    """The same for row m (dy, dx, channel) and column n (a pixel) of image b, as planes."""
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
    lowering: Lowering,
    x: Operand,
    weight_value: Value,
    bias: Operand | None,
    out: Operand,
    epilogue: Any,
    extras: tuple,
    spread: tuple[int, int],
) -> None:
    """[out channels, channels] x [channels, pixels] for each image."""
    batches, channels, height, width = x.dims
    pixels = height * width
    one_row = isinstance(height, int) and height == 1
    if (not one_row and x.strides[2] != width) or not isinstance(x.offset, int):
        x = dense(lowering, x)
    weight = lowering.operand(weight_value)
    if not (
        isinstance(weight.strides[2], int)
        and weight.strides[2] == 1
        and isinstance(weight.offset, int)
    ):
        weight = dense(lowering, weight, ROWS_FIRST)
    rows, pitch, plane = weight.dims[3], weight.strides[3], x.strides[1]
    a = Operand(
        weight.storage,
        Layout(weight.offset, (pitch, 1)),
        TensorType(weight.dtype, (rows, channels)),
    )
    b = Operand(
        x.storage,
        Layout(x.offset, (x.strides[0], plane, 1)),
        TensorType(x.dtype, (batches, channels, pixels)),
    )
    vectors = (gcd4(channels, pitch, weight.offset), gcd4(pixels, plane, x.strides[0], x.offset))
    plain = spread == (1, 1)
    vector_out = plain and gcd4(pixels, out.offset)
    half = x.dtype is weight.dtype is DType.float16
    choice = choose(lowering.traits, rows, pixels, channels, batches, half, False, vectors)
    place, channel = ("(b * M + m) * N + n", "m") if plain else _spread_planes(x, out, spread)
    made = make_epilogue(
        lowering,
        epilogue,
        extras,
        out,
        first_extra(choice, bias),
        "b, m, n",
        place,
        None,
        vector_out,
        (1, channel),
    )
    if not plain:
        made.macros |= {"PLACE(b, m, n)": f"({place})", "PLACE_STEP": str(spread[1])}
    if bias is not None:
        made.macros["BIAS_OF_ROWS"] = "1"
    emit(
        choice,
        lowering,
        a=a,
        b=b,
        bias=bias,
        out=out,
        epilogue=made,
        sizes=(rows, pixels, channels),
        strides=(pitch, plane, pixels),
        batches=Batches(batches, batches, batch_b=x.strides[0], batch_o=rows * pixels),
        transposed=False,
        vectors=(*vectors, vector_out),
    )


def lower_groups(
    lowering: Lowering,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    out: Operand,
    epilogue: Any,
    extras: tuple,
    window: tuple[tuple, tuple, tuple],
    groups: int,
) -> None:
    """The kernel for few channels; the result lies as planes or channels last."""
    batches, _, height, width = x.dims
    kh, kw, group_in, channels = weight.dims
    group_out = channels // groups
    stride, padding, dilation = window
    each = next(count for count in (8, 4, 2, 1) if group_out % count == 0)
    rows = column_rows(lowering.traits, out.dims, (kh, kw), stride, dilation, each)
    last = not is_nchw_operand(out)
    vector = last and gcd4(each, channels, out.offset)
    made = make_epilogue(
        lowering, epilogue, extras, out, 3 + (bias is not None), "at, n", "at", (1, "n"), vector
    )
    macros = {
        "T_A": x.dtype.glsl,
        "T_B": weight.dtype.glsl,
        "T_OUT": out.dtype.glsl,
        "BIAS": int(bias is not None),
        "ROWS": rows,
        "EACH": each,
        "VEC4_B": int(gcd4(each, group_out, weight.offset)),
        "LAST": int(last),
        "VEC4_OUT": int(vector),
        **made.macros,
    }
    buffers = [(x, "r"), (weight, "r")]
    if bias is not None:
        macros["T_BIAS"] = bias.dtype.glsl
        buffers.append((bias, "r"))
    _, _, out_height, out_width = out.dims
    params: dict[str, Size] = {
        "offset_a": x.offset,
        "offset_b": weight.offset,
        "offset_o": out.offset,
        **({"offset_bias": bias.offset} if bias is not None else {}),
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
    work = batches * (channels // each) * _dims.ceil_div(out_height, rows) * out_width
    lowering.dispatch(
        "conv/conv2d_nchw.comp",
        [*buffers, (out, "w"), *made.buffers],
        macros=macros,
        params=params,
        specialize=params,
        constants={
            "local_size_x": local,
            **window_parameters((kh, kw), stride, padding, dilation),
        },
        grid=lowering.linear_grid(work, local),
        flops=2 * out.type.numel * kh * kw * group_in,
    )

"""Convolutions of 16 bits whose weight is in the order of the fragments of matrix cores
(`glsl/matmul/fragment_blocks.glslh`). Their kernel loads pixels and weight directly, without shared
memory.

Such a weight is a tensor [out / 16, in / 32 * taps, 512]: for 16 output channels and a tap of 32
channels, 512 elements in the order that RIGHT_ELEMENT gives.
"""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, packed
from purevk.lower.epilogue import matrix_epilogue
from purevk.lower.expression import Expression
from purevk.lower.gpu_tiles import choose_convolution_tile
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.matrix_core_kernels import FragmentConvolution
from purevk.lower.numbers import gcd8
from purevk.ops.builder import Builder
from purevk.ops.conv.arguments import Conv2d, Window
from purevk.ops.conv.convolution import pixels
from purevk.ops.conv.shapes import convolved_size
from purevk.ops.image_layout import FRAGMENT_CONVOLUTION, NHWC, LayoutQuery
from purevk.ops.map import mapped
from purevk.ops.matmul.fragments import BLOCK, has_fragments, problem_of
from purevk.ops.movement.rearrange import glsl_number, pad
from purevk.ops.registry import Kernel, Order, ShapeError, define
from purevk.tuning import DeviceTraits

NAME = FRAGMENT_CONVOLUTION
GROUP = 32  # channels that are read together
MOST_TAPS = 31  # a row has a bit for each
_FEW, _JOINED = 4, 8  # channels of a pixel, and pixels, that are read as 32 channels
_MOST_ELEMENTS = 1 << 30  # of a copy with joined pixels


def takes(conv: Conv2d, result: TensorType) -> bool:
    """Whether the kernel's conditions hold, but for those on the device, as the convolution is, with
    joined pixels, or with output channels of zeros (up to 16 in all)."""
    x, weight = conv.x.type, conv.weight.type
    if x.dtype not in (DType.float16, DType.bfloat16) or weight.dtype is not x.dtype:
        return False
    if conv.groups != 1 or conv.spread != (1, 1) or not weight.is_static:
        return False
    if result.dtype not in (x.dtype, DType.float32):
        return False
    if conv.bias is not None and conv.bias.type.dims != weight.dims[3:]:
        return False
    channels, columns = (_dims.specialize(size) for size in weight.dims[2:])
    if joins_pixels(conv):
        return columns % BLOCK == 0 and conv.window.kernel[0] <= MOST_TAPS
    if columns % BLOCK and (columns > BLOCK or conv.extras):
        return False
    return channels % GROUP == 0 and conv.window.taps <= MOST_TAPS


def tile_of(
    traits: DeviceTraits, dtype: DType, rows: Size, columns: Size, terms: Size, window: bool
) -> FragmentConvolution | None:
    """The tile for a convolution; None if another kernel is faster, or runs while this one does not.

    Args:
        rows: pixels of the result.
        terms: channels of all taps.
        window: whether a row is more than one pixel of the input.
    """
    if not has_fragments(traits, dtype):
        return None
    return choose_convolution_tile(traits, problem_of(dtype, rows, columns, terms, window))


def right_blocks(builder: Builder, weight: Value) -> Value:
    """A weight [kernel rows, kernel columns, in, out] in the order of fragments."""
    height, width, channels, columns = weight.type.dims
    taps, groups = height * width, channels // GROUP
    split = (taps, groups, 4, 8, columns // BLOCK, 4, 2, 2)
    made = builder.aten.view(weight, split)
    made = builder.aten.permute(made, (4, 1, 0, 6, 5, 7, 2, 3))
    made = builder.purevk.copy(made)
    return builder.aten.view(made, (columns // BLOCK, groups * taps, BLOCK * GROUP))


def pad_columns(builder: Builder, value: Value) -> Value:
    """A weight or bias with zeros behind the last output channel, up to a multiple of 16."""
    missing = -_dims.specialize(value.type.dims[-1]) % BLOCK
    return pad(builder, value, (0, missing)) if missing else value


def joins_pixels(conv: Conv2d) -> bool:
    """Whether pixels of few channels may take the place of channels: 8 neighbours, of 4 channels with
    those of zeros, are read together. Windows are of 5 to 8 columns, as in the first layers of
    ResNets; with fewer, most of what is multiplied would be zeros."""
    _, columns = conv.window.kernel
    return (
        _dims.specialize(conv.x.type.dims[1]) <= _FEW
        and _JOINED // 2 < columns <= _JOINED
        and conv.window.stride[1] % 2 == 0  # loads of 16 bytes
        and conv.window.dilation[1] == 1
        and all(isinstance(size, int) for size in conv.x.type.dims[2:])
        # The copy has 4 channels, and must not be too large where the images are not.
        and _FEW * _dims.upper(conv.x.type.numel) <= _MOST_ELEMENTS
    )


def join_pixels(builder: Builder, conv: Conv2d, columns: int) -> tuple[Value, Value, Window, int]:
    """Images, weight and window of the same convolution, with 8 pixels of 4 channels as 32 channels,
    and how many of these are used.

    A column of these images is a window of the others, of which neighbours overlap. They are a view of
    one copy, which has zeros beside the images. Pixels behind the window must not be used, since they
    may be infinite.

    Args:
        columns: of the result.
    """
    x, window = conv.x, conv.window
    batches, channels, height = (x.type.dims[0], *map(_dims.specialize, x.type.dims[1:3]))
    step, before = window.stride[1], window.padding[1]
    width = step * (columns - 1) + _JOINED
    width += width % 2
    fill = glsl_number(0, x.type.dtype)
    inside = "i3 < x_size_1 && i2 >= before && i2 - before < x_size_3"
    rows = mapped(
        builder,
        f"r = T_R({fill}); if ({inside}) {{ r = X(i0, i3, i1, i2 - before); }}",
        {"X": x},
        x.type.with_dims((batches, height, width, _FEW)),
        numbers={"before": before},
    )
    row = width * _FEW
    image = builder.aten.as_strided(
        rows,
        (batches, GROUP, height, columns),
        (height * row, 1, row, step * _FEW),
        storage_offset=0,
    )
    weight, more = conv.weight, (0, 0, 0, _FEW - channels, 0, _JOINED - window.kernel[1])
    if any(more):
        weight = pad(builder, weight, more)
    sizes = (window.kernel[0], 1, GROUP, weight.type.dims[3])
    weight = builder.aten.view(weight, sizes)
    return (
        image,
        weight,
        Window(
            (window.kernel[0], 1),
            (window.stride[0], 1),
            (window.padding[0], 0),
            (window.dilation[0], 1),
        ),
        _FEW * window.kernel[1],
    )


def _shape(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    epilogue: Expression | None = None,
    extras: tuple[TensorType, ...] = (),
    used: int = GROUP,
) -> TensorType:
    """`used`: of 32 channels of `x`, how many are used; the others are read as zeros."""
    units = kernel[0] * kernel[1] * (x.dims[1] // GROUP)
    if x.rank != 4 or weight.rank != 3 or weight.dtype is not x.dtype or weight.dims[1] != units:
        raise ShapeError(f"cannot convolve {x} with {weight} in the order of fragments")
    height, width = (
        convolved_size(x.dims[2 + d], kernel[d], stride[d], padding[d], dilation[d])
        for d in range(2)
    )
    dtype = x.dtype if epilogue is None else epilogue.dtypes[epilogue.outputs[0]]
    return TensorType(dtype, (x.dims[0], weight.dims[0] * BLOCK, height, width))


def _lower(lowering: Lowering, node: Node) -> None:
    out, bias = lowering.operand(node.result), packed(lowering, node.optional_tensor("bias"))
    weight = lowering.operand(node.tensor("weight"))
    if not weight.layout.is_contiguous(weight.dims) or not gcd8(weight.offset):
        weight = dense(lowering, weight)
    window = Window.make(*(node.ints(name, 2) for name in _WINDOW))
    one = window == Window((1, 1), (1, 1), (0, 0), window.dilation)
    x, pixel, row = _image(lowering, lowering.operand(node.tensor("x")), one)
    batches, channels, height, width = x.dims
    _, columns, out_height, out_width = out.dims
    rows, terms = batches * out_height * out_width, window.taps * channels
    tile = tile_of(lowering.traits, x.dtype, rows, columns, terms, not one)
    if tile is None:  # the pass has seen one
        raise ShapeError(f"{node.op} of {x.type} and {weight.type}")
    made = matrix_epilogue(lowering, node, out, True, "m * pixel_o + n", None, ahead=True)
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
        "row_a": row,
        **window.params,
    }
    lowering.dispatch(
        tile.template,
        {"a": x, "b": weight, "bias": bias, "out": out},
        params,
        {
            **dict.fromkeys(("VEC8_A", "VEC8_B", "VEC4_OUT"), 1),
            "WINDOW": int(not one),
            "CHANNELS": node.int("used"),
            "BFLOAT16": int(x.dtype is DType.bfloat16),
            "TURN": tile.turn(_dims.specialize(terms)),
            "EXTRAS_EARLY": int(tile.reads_extras_early(_dims.specialize(terms))),
        },
        form=tile,
        epilogue=made,
        always=("IC", *window.params),
        grid=tile.grid(rows, columns, 1),
        flops=2 * rows * columns * terms,
    )


def _image(lowering: Lowering, x: Operand, one: bool) -> tuple[Operand, Size, Size]:
    """An image whose channels are dense, and the elements from one pixel, and from one row, to the
    next; copied if it is not one that the kernel reads.

    Args:
        one: a row of the matmul is a pixel, so that rows follow one another.
    """
    channels, height = x.dims[1:3]
    batch, channel, row, pixel = x.strides
    reads = channel == 1 and isinstance(x.offset, int) and gcd8(pixel, row, x.offset)
    if reads and not one and batch == height * row:
        return x, pixel, row
    x, pixel = pixels(lowering, x)
    if not gcd8(pixel, x.offset):
        x, pixel = dense(lowering, x, NHWC), channels
    return x, pixel, x.dims[3] * pixel


_WINDOW = ("kernel", "stride", "padding", "dilation")


def _layouts(node: Node, query: LayoutQuery) -> tuple[Order | None]:
    return (NHWC,)


define(NAME, _shape, Kernel(_lower, layouts=_layouts))

"""Convolutions with a window of 3 x 3 by Winograd's algorithm F(2 x 2, 3 x 3): 16 multiplications make
four outputs, where the window needs 36.

It multiplies transformed blocks of 4 x 4 pixels by a transformed weight, a tensor [16, panels, in, 32]
with panels of 32 output channels.

Errors are about 1e-6 of the largest result. An infinite input makes NaN of all outputs of its blocks,
also of those whose window does not contain it. The weight takes 16/9 of its memory. On lavapipe,
ResNet-18 takes 21 % more processor time without it (bench/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, dense_operand, packed
from purevk.lower.epilogue import matrix_epilogue
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import gcd4
from purevk.lower.register_tiles import RatedTile, tiles_by_cost
from purevk.ops.conv.arguments import Conv2d
from purevk.ops.conv.convolution import pixels
from purevk.ops.conv.shapes import convolved_size
from purevk.ops.image_layout import NHWC, LayoutQuery
from purevk.ops.matmul.choice import Registers
from purevk.ops.registry import Kernel, Order, ShapeError, define
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits

NAME = "purevk.conv2d_winograd"
WEIGHT = "purevk.winograd_weight"
PANEL = 32  # output channels whose weights are in one piece
PRODUCTS = 16
_BLOCK = 2  # rows and columns of outputs that are made together
_WORKGROUP = 64
_MOST_BYTES = 1 << 28  # of the transformed input, and of the weight
_GAIN = 0.8  # part of the time of the other kernel for which a larger weight is worth it


def takes(conv: Conv2d, result: TensorType, traits: DeviceTraits) -> bool:
    """Whether a convolution has the window and the operands that the kernel takes, and is large enough
    for it to be faster."""
    weight, window, profile = conv.weight.type, conv.window, traits.profile
    if profile.has_fast_shared_memory or not traits.has("subgroup_shuffle"):
        return False
    if window.kernel != (3, 3) or conv.groups != 1 or conv.spread != (1, 1):
        return False
    if window.stride != (1, 1) or window.dilation != (1, 1) or not weight.is_static:
        return False
    if {conv.x.type.dtype, weight.dtype, result.dtype} != {DType.float32}:
        return False
    if conv.bias is not None and conv.bias.type.dims != weight.dims[3:]:
        return False
    channels, columns = (_dims.specialize(size) for size in weight.dims[2:])
    if not gcd4(channels, columns) or traits.too_long(PRODUCTS * (channels // 4 + 3)):
        return False
    image, most = _input_type(result, channels), min(_MOST_BYTES, traits.max_storage_range)
    if max(_dims.upper(image.nbytes), _dims.upper(_weight_shape(weight).nbytes)) > most:
        return False
    return _is_faster(conv, result, image, traits)


def _is_faster(conv: Conv2d, result: TensorType, image: TensorType, traits: DeviceTraits) -> bool:
    """Whether it saves a fifth of the time by the cost models. `image`: the transformed input."""
    costs, cores = traits.profile.registers, max(traits.cores, 1)
    batches, columns, height, width = map(_dims.upper, result.dims)
    _, blocks, channels = map(_dims.upper, image.dims)
    rows, terms = batches * height * width, conv.window.taps * channels
    window = tiles_by_cost(
        costs,
        traits.profile.tiles.registers,
        traits.subgroup_size,
        cores,
        rows,
        columns,
        terms,
        1,
    )
    transform = -(-blocks * channels // (4 * traits.subgroup_size)) * costs.winograd_block / cores
    cost = _tiles(traits, blocks, columns, channels)[0].cost + transform
    return cost < _GAIN * window[0].cost


def _tiles(traits: DeviceTraits, blocks: int, columns: int, channels: int) -> tuple[RatedTile, ...]:
    """The tiles that multiply transformed blocks by a transformed weight, the fastest first."""
    return tiles_by_cost(
        traits.profile.registers,
        traits.profile.tiles.winograd,
        traits.subgroup_size,
        max(traits.cores, 1),
        blocks,
        columns,
        channels,
        1,
        products=PRODUCTS,
        outputs=_BLOCK * _BLOCK,
    )


def _choose(traits: DeviceTraits, blocks: int, columns: int, channels: int) -> Registers:
    problem = (blocks, columns, channels)
    return traits.choices.take("winograd", problem, map(Registers.of, _tiles(traits, *problem)))


def _weight_shape(weight: TensorType) -> TensorType:
    channels, columns = (_dims.specialize(size) for size in weight.dims[2:])
    if weight.dims[:2] != (3, 3) or columns % 4:
        raise ShapeError(f"no weight of Winograd's algorithm from {weight}")
    return weight.with_dims((PRODUCTS, -(-columns // PANEL), channels, PANEL))


def _lower_weight(lowering: Lowering, node: Node) -> None:
    weight, out = dense_operand(lowering, node.tensor("weight")), lowering.operand(node.result)
    if not gcd4(weight.offset):
        weight = dense(lowering, weight)
    texel = lowering.texel(weight, True)
    lowering.dispatch(
        "conv/conv2d_winograd_weight.comp",
        {"b": (weight, "r" + texel), "out": out},
        {"IC": weight.dims[2], "OC": weight.dims[3]},
        {"TEXEL_B": int(bool(texel)), "LX": _WORKGROUP},
        grid=(_dims.ceil_div(out.type.numel, 4 * PRODUCTS * _WORKGROUP), 1, 1),
        flops=42 * weight.dims[2] * weight.dims[3],
    )


define(WEIGHT, _weight_shape, Kernel(_lower_weight))


def _input_type(result: TensorType, channels: Size) -> TensorType:
    batches, _, height, width = result.dims
    blocks = batches * _dims.ceil_div(height, _BLOCK) * _dims.ceil_div(width, _BLOCK)
    return TensorType(DType.float32, (PRODUCTS, blocks, channels))


@signature("x, weight, bias, padding, columns: int, epilogue=None, extras=()")
def _shape(x: TensorType, weight: TensorType, padding: tuple[int, int], columns: int) -> TensorType:
    """`columns`: output channels; the last panel of the weight may have more."""
    panels = -(-columns // PANEL)
    if x.rank != 4 or weight.dims != (PRODUCTS, panels, x.dims[1], PANEL):
        raise ShapeError(f"cannot convolve {x} with {weight} by Winograd's algorithm")
    height, width = (convolved_size(x.dims[2 + d], 3, 1, padding[d], 1) for d in range(2))
    return x.with_dims((x.dims[0], columns, height, width))


def _lower(lowering: Lowering, node: Node) -> None:
    out, bias = lowering.operand(node.result), packed(lowering, node.optional_tensor("bias"))
    weight = lowering.operand(node.tensor("weight"))
    if not weight.layout.is_contiguous(weight.dims) or not gcd4(weight.offset):
        weight = dense(lowering, weight)
    x, pixel = pixels(lowering, lowering.operand(node.tensor("x")))
    if not gcd4(pixel, x.offset):
        x, pixel = dense(lowering, x, NHWC), x.dims[1]
    _, channels, height, width = x.dims
    _, columns, out_height, out_width = out.dims
    padding: Sequence[int] = node.ints("padding", 2)
    blocks_type = _input_type(node.result.type, channels)
    blocks = blocks_type.dims[1]
    counts = {
        "BLOCKS": blocks,
        "BLOCKS_Y": _dims.ceil_div(out_height, _BLOCK),
        "BLOCKS_X": _dims.ceil_div(out_width, _BLOCK),
    }
    image = lowering.temporary(blocks_type)
    texel = lowering.texel(x, True)
    lowering.dispatch(
        "conv/conv2d_winograd_input.comp",
        {"a": (x, "r" + texel), "out": image},
        {
            **counts,
            **{"H": height, "W": width, "C": channels, "pixel_a": pixel},
            **{"pad_y": padding[0], "pad_x": padding[1]},
        },
        {"TEXEL_A": int(bool(texel)), "LX": _WORKGROUP},
        grid=(_dims.ceil_div(blocks * channels, 4 * _WORKGROUP), 1, 1),
        flops=8 * blocks * channels * _BLOCK * _BLOCK,
    )
    made = matrix_epilogue(lowering, node, out, True, "m * OC + n", None)
    choice = _choose(lowering.traits, *map(_dims.upper, (blocks, columns, channels)))
    lowering.dispatch(
        "conv/conv2d_winograd.comp",
        {"a": image, "b": weight, "bias": bias, "out": out},
        {**counts, "IC": channels, "OH": out_height, "OW": out_width, "OC": columns},
        dict.fromkeys(("VEC4_A", "VEC4_B", "VEC4_OUT"), 1),
        form=choice,
        epilogue=made,
        grid=choice.grid(blocks, columns, 1),
        flops=2 * PRODUCTS * blocks * columns * channels,
    )


def _layouts(node: Node, query: LayoutQuery) -> tuple[Order | None]:
    return (NHWC,)


define(NAME, _shape, Kernel(_lower, layouts=_layouts))

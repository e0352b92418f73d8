"""The operators of torch that become `purevk.conv2d`, or one of the other convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.ir import Node, Size, Value
from purevk.ops.builder import Builder
from purevk.ops.conv.convolution import NAME
from purevk.ops.conv.convolution_nd import expand as expand_others
from purevk.ops.conv.shapes import CONVOLUTION, convolution_shape, refuse_convolution
from purevk.ops.conv.whole import expand_whole
from purevk.ops.registry import rewrite_node
from purevk.ops.signatures import signature

_FEW_CHANNELS = 4  # up to which windows side by side become channels


@rewrite_node(
    "aten.convolution.default",
    convolution_shape,
    "aten._convolution.default",
    supports=refuse_convolution,
)
def _expand_convolution(builder: Builder, node: Node) -> Value:
    x, weight, bias = node.tensor("x"), node.tensor("weight"), node.optional_tensor("bias")
    spatial = weight.type.rank - 2
    if x.type.dtype.is_int:
        return expand_whole(builder, node)
    if node.bool("transposed") or spatial > 2:
        return expand_others(builder, node)
    stride, padding, dilation = (
        node.ints(name, spatial) for name in ("stride", "padding", "dilation")
    )
    if spatial == 1:
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        weight = builder.aten.unsqueeze(weight, dim=2)
    sizes = x.type.dims if x.type.rank == spatial + 2 else (1, *x.type.dims)
    if spatial == 1:
        sizes = (*sizes[:2], 1, sizes[2])
    if tuple(sizes) != tuple(x.type.dims):
        x = builder.aten.view(x, sizes)
    groups = node.int("groups")
    if groups == 1 and _are_patches(sizes, weight, stride, padding, dilation):
        x, weight = _patches_as_channels(builder, x, weight)
        stride = (1, 1)
    dense = builder.purevk.copy(builder.aten.permute(weight, (2, 3, 1, 0)))
    result = builder.emit(NAME, x, dense, bias, stride, padding, dilation, groups, None, ())
    if result.type.dims != node.result.type.dims:
        result = builder.aten.view(result, node.result.type.dims)
    return result


def _are_patches(
    sizes: Sequence[Size],
    weight: Value,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    """Whether a window reads each pixel once, of few channels: the first layer of a vision
    transformer."""
    window = tuple(weight.type.dims[2:])
    return (
        tuple(stride) == window
        and not any(padding)
        and all(each == 1 for each in dilation)
        and weight.type.dims[1] <= _FEW_CHANNELS
        and window[0] > 1
        and all(isinstance(size, int) and size % each == 0 for size, each in zip(sizes[2:], window))
    )


def _patches_as_channels(builder: Builder, x: Value, weight: Value) -> tuple[Value, Value]:
    """The input with the pixels of each window as channels of one pixel, and the weight of the 1 x 1
    convolution that computes the same. A window of 3 channels reads a few bytes at a time; this reads
    rows, after one copy of the image."""
    batch, channels, height, width = x.type.dims
    out, _, kh, kw = weight.type.dims
    grid = (batch, channels, height // kh, kh, width // kw, kw)
    split = builder.aten.view(x, grid)
    turned = builder.aten.permute(split, (0, 2, 4, 1, 3, 5))
    rows = builder.purevk.copy(turned)
    merged = builder.aten.view(rows, (batch, height // kh, width // kw, channels * kh * kw))
    image = builder.aten.permute(merged, (0, 3, 1, 2))
    return image, builder.aten.view(weight, (out, channels * kh * kw, 1, 1))


@rewrite_node(
    "et_vk.conv_with_clamp.default",
    signature(f"{CONVOLUTION}, output_min=None, output_max=None")(convolution_shape),
    supports=refuse_convolution,
)
def _expand_clamped(builder: Builder, node: Node) -> Value:
    low, high = node.optional_float("output_min"), node.optional_float("output_max")
    result = builder.aten.convolution(*node.args[:9])
    # The exporter writes the largest double for "no bound".
    low = None if low is None or low <= -3.4028235e38 else low
    high = None if high is None or high >= 3.4028235e38 else high
    if low is None and high is None:
        return result
    return builder.aten.clamp(result, low, high)

"""Convolutions read constant weights in the order of the fragments of matrix cores.

The pass takes convolutions of one group with a multiple of 32 input channels, up to 31 taps, and a
multiple of 16 output channels (or fewer than 16, to which channels of zeros are added), if they are
cheaper by the cost model. Its costs of starts and of code are fitted to times with the code of a kernel
in the caches and without, since a network runs some kernels once and others in each of its blocks.

The first layer of a ResNet has 3 channels. Windows of 5 to 8 columns with an even stride along x take
part too (`join_pixels`): one dispatch writes the image as pixels of 4 channels, and a view makes 8
neighbouring pixels the channels of one. What is read beyond the window is set to zero, since it may be
infinite.
"""

from __future__ import annotations

from purevk.ir import Graph, Node, Size, Value
from purevk.ir import dims as _dims
from purevk.ops.conv.arguments import Conv2d
from purevk.ops.conv.convolution import NAME as CONVOLUTION
from purevk.ops.conv.fragments import (
    GROUP,
    join_pixels,
    joins_pixels,
    pad_columns,
    right_blocks,
    takes,
    tile_of,
)
from purevk.ops.conv.fragments import NAME as FRAGMENTS
from purevk.ops.matmul.fragments import BLOCK
from purevk.passes.rewrite import Rewriter, changing, constants_of, each_node
from purevk.tuning import DeviceTraits


def pack_convolutions(graph: Graph, traits: DeviceTraits) -> Graph:
    """Has convolutions of halves and bfloat16 read pixels and weight without shared memory, where
    that is faster.

    A weight that other convolutions read too, for images of other sizes, may be on the device in two
    orders: weights of convolutions are small beside the images.
    """
    weights: dict[tuple[Value, bool], Value] = {}

    def visit(rewriter: Rewriter, node: Node) -> Value:
        conv = Conv2d.of(node)
        x, weight, window, used = conv.x, conv.weight, conv.window, GROUP
        if joined := joins_pixels(conv):
            width = _dims.specialize(node.result.type.dims[3])
            x, weight, window, used = join_pixels(rewriter, conv, width)
        if (conv.weight, joined) not in weights:
            weights[conv.weight, joined] = right_blocks(rewriter, pad_columns(rewriter, weight))
        bias, result = conv.bias, node.result.type
        if bias is not None:
            bias = pad_columns(rewriter, bias)
        columns = _padded(result.dims[1])
        convolution = rewriter.emit(
            FRAGMENTS,
            x,
            weights[conv.weight, joined],
            bias,
            window.kernel,
            window.stride,
            window.padding,
            window.dilation,
            conv.epilogue,
            conv.extras,
            used,
            # An epilogue that only converts has no step that says so.
            results=(result.with_dims((result.dims[0], columns, *result.dims[2:])),),
        )
        if columns == result.dims[1]:
            return convolution
        return rewriter.aten.slice.Tensor(convolution, dim=1, start=0, end=result.dims[1])

    return each_node(graph, visit, _chosen(graph, traits))


def _padded(columns: Size) -> int:
    """Output channels with those of zeros."""
    return -(-_dims.specialize(columns) // BLOCK) * BLOCK


def _chosen(graph: Graph, traits: DeviceTraits) -> set[Node]:
    """The convolutions that take part."""
    nodes = [node for node in graph.nodes if node.op == CONVOLUTION]
    if not nodes:
        return set()
    constant, written = constants_of(graph), changing(graph.nodes)
    chosen = set()
    for node in nodes:
        conv, result = Conv2d.of(node), node.result.type
        if conv.weight not in constant or written & set(node.inputs) or not takes(conv, result):
            continue
        batches, columns, height, width = result.dims
        terms = conv.window.taps * conv.weight.type.dims[2]
        if joins_pixels(conv):
            terms = conv.window.kernel[0] * GROUP
        dtype, rows = conv.x.type.dtype, batches * height * width
        if tile_of(traits, dtype, rows, _padded(columns), terms, not conv.is_matmul) is not None:
            chosen.add(node)
    return chosen

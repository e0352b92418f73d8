"""Convolutions of constant weights run by Winograd's algorithm where this is faster."""

from __future__ import annotations

from purevk.ir import Graph, Node, Value
from purevk.ir import dims as _dims
from purevk.ops.conv.arguments import Conv2d
from purevk.ops.conv.convolution import NAME as CONVOLUTION
from purevk.ops.conv.winograd import NAME as WINOGRAD
from purevk.ops.conv.winograd import WEIGHT, takes
from purevk.passes.rewrite import Rewriter, changing, constants_of, each_node
from purevk.tuning import DeviceTraits


def use_winograd(graph: Graph, traits: DeviceTraits) -> Graph:
    """Replaces convolutions with a window of 3 x 3. Their weights are transformed once, at load."""
    convolutions = [node for node in graph.nodes if node.op == CONVOLUTION]
    if not convolutions or traits.profile.has_fast_shared_memory:
        return graph
    constant, written = constants_of(graph), changing(graph.nodes)
    chosen = {
        node
        for node in convolutions
        if node.tensor("weight") in constant
        and not written & set(node.inputs)
        and takes(Conv2d.of(node), node.result.type, traits)
    }
    weights: dict[Value, Value] = {}

    def visit(rewriter: Rewriter, node: Node) -> Value:
        conv = Conv2d.of(node)
        if conv.weight not in weights:
            weights[conv.weight] = rewriter.emit(WEIGHT, conv.weight)
        return rewriter.emit(
            WINOGRAD,
            conv.x,
            weights[conv.weight],
            conv.bias,
            conv.window.padding,
            _dims.specialize(node.result.type.dims[1]),
            conv.epilogue,
            conv.extras,
        )

    return each_node(graph, visit, chosen)

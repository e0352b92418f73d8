"""flex_attention that no kernel takes, by other operators."""

from __future__ import annotations

from purevk.ir import Graph, Node, Value
from purevk.ops.attention.flex import NAME, composed, fits_kernel
from purevk.passes.placement import refusal
from purevk.passes.rewrite import Rewriter, each_node
from purevk.tuning import DeviceTraits


def compose_flex(graph: Graph, traits: DeviceTraits) -> Graph:
    """Writes out each flex_attention that the kernel of the device does not take. Those of the new
    nodes that the device cannot run, such as those of int64, then run on the CPU."""

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != NAME or (fits_kernel(node, traits) and refusal(node, traits) is None):
            return None
        return (composed(rewriter, node),)

    return each_node(graph, visit)

"""Constant weights of software devices in panels of columns.

With few rows, such as the tokens of a language model, a matmul takes as long as reading its weight. In
rows of all columns, a tile reads a short piece of each row, which is a page of memory for each term.
"""

from __future__ import annotations

from purevk.ir import Graph, Node, Value
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.ops.matmul.matmul import PANEL, panels_type
from purevk.passes.rewrite import Rewriter, changing, constants_of, each_node
from purevk.tuning import DeviceTraits


def pack_panels(graph: Graph, traits: DeviceTraits) -> Graph:
    """Has matmuls read constant weights in panels of columns. The rows do not matter, since methods for
    prompts and for tokens share weights."""
    if traits.profile.has_fast_shared_memory:
        return graph
    constant = constants_of(graph) - changing(graph.nodes)
    chosen = {node.result for node in graph.nodes if _takes(node, constant)}
    if not chosen:
        return graph
    producers = graph.producers()
    weights: dict[Value, Value] = {}

    def read_panels(rewriter: Rewriter, node: Node) -> Value | None:
        if chosen.isdisjoint(node.results):
            return None
        b = node.tensor("b")
        if b not in weights:
            weights[b] = _packed(rewriter, producers.get(b), b)
        arguments = node.with_arguments(b=weights[b], panels=True).args
        return rewriter.emit(MATMUL, *arguments, results=(node.result.type,))

    return each_node(graph, read_panels)


def _takes(node: Node, constant: set[Value]) -> bool:
    if node.op != MATMUL or node.tensor("b") not in constant:
        return False
    type = node.tensor("b").type
    if type.rank != 2 or not type.is_static:
        return False
    terms, columns = type.dims
    return terms % 4 == 0 and columns % PANEL == 0


def _packed(rewriter: Rewriter, copy: Node | None, b: Value) -> Value:
    """A right operand in panels, of what a copy in rows is made of."""
    if copy is not None and copy.op == "purevk.copy":
        b = copy.tensor("x")
    panels, terms, columns = panels_type(b.type).dims
    parts = rewriter.aten.view(b, (terms, panels, columns))
    return rewriter.purevk.copy(rewriter.aten.permute(parts, (1, 0, 2)))

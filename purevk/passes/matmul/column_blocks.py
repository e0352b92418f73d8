"""Constant weights of software devices in blocks of columns.

With few rows, such as the tokens of a language model, a matmul takes as long as reading its weight. In
rows of all columns, a tile reads a short piece of each row, which is a page of memory for each term.
"""

from __future__ import annotations

from purevk.ir import Graph, Node, Value
from purevk.ops.matmul.matmul import BLOCK, column_blocks
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.passes.rewrite import Rewriter, changing, constants_of
from purevk.tuning import DeviceTraits


def order_column_blocks(graph: Graph, traits: DeviceTraits) -> Graph:
    """Has matmuls read constant weights in blocks of columns. The rows do not matter, since methods for
    prompts and for tokens share weights."""
    matmuls = [node for node in graph.nodes if node.op == MATMUL]
    if not matmuls or traits.profile.has_fast_shared_memory:
        return graph
    constant = constants_of(graph) - changing(graph.nodes)
    chosen = {node for node in matmuls if _takes(node.tensor("b"), constant)}
    if not chosen:
        return graph
    made = graph.producers()
    rewriter = Rewriter(graph)
    weights: dict[Value, Value] = {}
    for node in graph.nodes:
        current = rewriter.current(node)
        rewriter.source = node.source
        if node not in chosen:
            rewriter.keep(current)
            continue
        b = current.tensor("b")
        if b not in weights:
            weights[b] = _blocks(rewriter, made.get(b), b)
        arguments = current.with_arguments(b=weights[b], blocks=True).args
        rewriter.replace(node, rewriter.emit(MATMUL, *arguments, results=(node.result.type,)))
    return rewriter.finish()


def _takes(b: Value, constant: set[Value]) -> bool:
    type = b.type
    if b not in constant or type.rank != 2 or not type.is_static:
        return False
    terms, columns = type.dims
    return terms % 4 == 0 and columns % BLOCK == 0


def _blocks(rewriter: Rewriter, copy: Node | None, b: Value) -> Value:
    """A right operand in blocks, of what a copy in rows is made of."""
    if copy is not None and copy.op == "purevk.copy":
        b = copy.tensor("x")
    blocks, terms, columns = column_blocks(b.type).dims
    parts = rewriter.aten.view(b, (terms, blocks, columns))
    return rewriter.purevk.copy(rewriter.aten.permute(parts, (1, 0, 2)))

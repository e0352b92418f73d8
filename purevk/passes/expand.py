"""Replaces operators that are expressed by others, until none is left."""

from __future__ import annotations

from purevk.ir import Graph, Node, Value
from purevk.ops import registry
from purevk.passes.rewrite import Rewriter
from purevk.tuning import DeviceTraits


def expand_rewrites(graph: Graph, traits: DeviceTraits) -> Graph:
    """Expands what other operators express, recursively."""
    rewriter = Rewriter(graph, traits)
    for node in graph.nodes:
        _expand(rewriter, rewriter.current(node), traits)
    return rewriter.finish()


def _expand(rewriter: Rewriter, node: Node, traits: DeviceTraits) -> None:
    expand = registry.expansion(node, traits)
    if expand is None:
        rewriter.keep(node)
        return
    start = len(rewriter.nodes)
    rewriter.source = node.source
    results = expand(rewriter, node)
    added = rewriter.nodes[start:]
    del rewriter.nodes[start:]
    for new_node in added:
        _expand(rewriter, rewriter.current(new_node), traits)
    if results is not None:
        values = (results,) if isinstance(results, Value) else results
        rewriter.replace(node, [rewriter.resolve(value) for value in values])

"""Attention whose keys and values are repeated for several heads of queries reads them as they
are."""

from __future__ import annotations

from purevk.ir import Graph, Node, Size, Value
from purevk.ops import registry
from purevk.ops.attention.attention import NAME
from purevk.passes.rewrite import Rewriter, changing, each_node
from purevk.tuning import DeviceTraits


def share_heads(graph: Graph, traits: DeviceTraits) -> Graph:
    """Attention over `x[:, :, None].expand(B, G, n, T, D).reshape(B, G * n, T, D)` for both keys and
    values, as models of transformers write it, takes x [B, G, T, D]."""
    producers, written = graph.producers(), changing(graph.nodes)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node.op != NAME or node.arg("functions") is not None:
            return None
        repeats = [_repeated(producers, node.tensor(name)) for name in "kv"]
        keys, values = repeats
        if keys is None or values is None or keys[1] != values[1]:
            return None
        if written & {keys[0], values[0]}:
            return None  # the copies may be of what they were before
        changed = node.with_arguments(k=keys[0], v=values[0])
        return rewriter.emit(NAME, *(rewriter.resolve(arg) for arg in changed.args))

    return each_node(graph, visit)


def _repeated(producers: dict[Value, Node], value: Value) -> tuple[Value, Size] | None:
    """x [B, G, T, D] and n, if a value is x with each head n times."""
    joined = producers.get(value)
    if joined is None or joined.op != "aten.view.default":
        return None
    expanded = producers.get(joined.tensor("x"))
    if expanded is None or expanded.op != "aten.expand.default":
        return None
    split = producers.get(expanded.tensor("x"))
    if split is None or not registry.is_reshape(split):
        return None
    x = split.tensor("x")
    if x.type.rank != 4 or expanded.result.type.rank != 5 or value.type.rank != 4:
        return None
    batch, groups, rows, width = x.type.dims
    repeats = expanded.result.type.dims[2]
    if split.result.type.dims != (batch, groups, 1, rows, width):
        return None
    if expanded.result.type.dims != (batch, groups, repeats, rows, width):
        return None
    return (x, repeats) if value.type.dims == (batch, groups * repeats, rows, width) else None

"""Attention whose keys and values are repeated for several heads of queries reads them as they
are."""

from __future__ import annotations

from purevk.ir import Graph, Node, Size, Value
from purevk.ops import registry
from purevk.ops.attention.attention import NAME
from purevk.passes.matching import Matcher, Var, op
from purevk.passes.rewrite import Rewriter, changing, each_node
from purevk.tuning import DeviceTraits

_SWAP = (0, 2, 1, 3)
_SPLIT = op(x=Var("x"), when=registry.is_reshape)
_REPEATED = op("aten.view.default", x=op("aten.expand.default", x=_SPLIT))


def share_heads(graph: Graph, traits: DeviceTraits) -> Graph:
    """Attention over `x[:, :, None].expand(B, G, n, T, D).reshape(B, G * n, T, D)` for both keys and
    values, as models of transformers write it, takes x [B, G, T, D]."""
    matcher, written = Matcher(graph), changing(graph.nodes)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node.op != NAME or node.arg("functions") is not None:
            return None
        repeats = [_repeated(matcher, node.tensor(name)) for name in "kv"]
        keys, values = repeats
        if keys is None or values is None or keys[1] != values[1]:
            return None
        if written & {keys[0], values[0]}:
            return None  # the copies may be of what they were before
        changed = node.with_arguments(k=keys[0], v=values[0])
        return rewriter.emit(NAME, *(rewriter.resolve(arg) for arg in changed.args))

    return each_node(graph, visit)


def _repeated(matcher: Matcher, value: Value) -> tuple[Value, Size] | None:
    """x [B, G, T, D] and n, if a value is x with each head n times."""
    match = matcher.match(_REPEATED, value, shared=True)
    if match is None:
        return None
    x, (_, expanded, split) = match.value("x"), (node.result.type.dims for node in match.nodes)
    if x.type.rank != 4 or len(expanded) != 5:
        return None
    (batch, groups, rows, width), repeats = x.type.dims, expanded[2]
    fits = split == (batch, groups, 1, rows, width)
    fits = fits and expanded == (batch, groups, repeats, rows, width)
    return (
        (x, repeats) if fits and value.type.dims == (batch, groups * repeats, rows, width) else None
    )


def swaps_heads(node: Node) -> bool:
    """Whether a node is the view of [B, S, H, D] as [B, H, S, D]; of one row, or one head, a reshape is
    too."""
    if node.op == "aten.permute.default":
        return tuple(dim % 4 for dim in node.ints("dims")) == _SWAP
    if node.op != "aten.view.default" or node.tensor("x").type.rank != 4:
        return False
    dims = node.tensor("x").type.dims
    swapped = tuple(dims[dim] for dim in _SWAP)
    return node.result.type.dims == swapped and 1 in (dims[1], dims[2])

"""Checks of indices. Those that a call brings are checked on the host. Those that the model computes
are checked with PUREVK_CHECK_INDICES=1; without it, kernels clamp an index that is out of range, where
torch raises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from purevk import knobs
from purevk.dtypes import DType
from purevk.ir import Dim, Graph, Guard, Node, Size, Symbol, SymbolSource, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ir.binding import input_symbols
from purevk.ops.shapes import wrap
from purevk.passes.rewrite import changing

# Operators with one index along a dim, and those of them that count negative indices from the end.
_ALONG = {
    f"aten.{name}"
    for name in (
        "gather.default",
        "index_add.default",
        "index_copy.default",
        "index_fill.int_Scalar",
        "index_reduce.default",
        "index_select.default",
        "scatter.reduce",
        "scatter.src",
        "scatter.value",
        "scatter.value_reduce",
        "scatter_add.default",
        "scatter_reduce.two",
    )
}
_FROM_END = {"aten.index_fill.int_Scalar"}
_BY_TENSORS = {"aten.index.Tensor", "aten.index_put.default"}
_FLAT = {"aten.take.default", "aten.put.default"}
_TABLES = {
    "aten.embedding.default",
    "aten._embedding_bag.default",
    "aten._embedding_bag_forward_only.default",
}


_SIGNED = (DType.int8, DType.int16, DType.int32, DType.int64)
# Operators whose results have all elements of their first argument, and no others.
_SAME_ELEMENTS = {
    f"aten.{name}"
    for name in (
        "_to_copy.default",
        "alias.default",
        "clone.default",
        "contiguous.default",
        "permute.default",
        "reshape.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "transpose.int",
        "unsqueeze.default",
        "view.default",
    )
}


@dataclass(frozen=True)
class IndexRange:
    """The indices that an operator takes: from `lowest` to `below`, without it, once they are of
    `dtype`. Sizes that vary are known at a call."""

    lowest: Size
    below: Size
    dtype: DType
    op: str
    source: str


def ranges_of_inputs(graph: Graph) -> dict[int, tuple[IndexRange, ...]]:
    """The inputs of a graph, as the front end made it, that are indices as they are: their positions,
    and what they have to be within. Sizes that become known only during a call are left out, and so
    are sub-graphs, which may not run."""
    inputs = {value: at for at, value in enumerate(graph.inputs) if isinstance(value, Value)}
    moving = changing(graph.nodes)
    known = {symbol for symbol, _, _ in input_symbols(graph)}
    made: dict[Value, Node] | None = None
    found: dict[int, dict[IndexRange, None]] = {}
    for node in graph.nodes:
        for index, size, lowest in _indices(node):
            if not _dims.symbols(size) <= known:
                continue
            if made is None:
                made = graph.producers()
            narrowest = index.type.dtype
            while index not in inputs and index in made and made[index].op in _SAME_ELEMENTS:
                before = made[index].args[0]
                if not isinstance(before, Value) or before.type.dtype not in _SIGNED:
                    break
                if index in moving:
                    break
                index = before
                narrowest = min(narrowest, index.type.dtype, key=lambda dtype: dtype.itemsize)
            if index in inputs and index not in moving and narrowest in _SIGNED:
                place = IndexRange(lowest, size, narrowest, node.op, node.source)
                found.setdefault(inputs[index], {})[place] = None
    return {position: tuple(ranges) for position, ranges in found.items()}


def check_indices(graph: Graph) -> Graph:
    """With PUREVK_CHECK_INDICES=1, has every call check the least and the greatest element of each
    index; else the graph itself.

    A call with an index that is out of range raises `InputError` with the operator, its place and the
    index.
    """
    if not knobs.CHECK_INDICES():
        return graph
    nodes: list[Node] = []
    symbols = dict(graph.symbols)
    checks = list(graph.checks)
    for node in graph.nodes:
        for index, size, lowest in _indices(node):
            for name, op in (("least", "aten.amin.default"), ("greatest", "aten.amax.default")):
                found = Value(f"{name}_index_{len(symbols)}", TensorType(index.type.dtype, ()))
                nodes.append(Node(op, (index, (), False), (found,), node.source))
                symbol = Symbol(found.name, lower=-_dims.UNBOUNDED, is_size=False, unbacked=True)
                symbols[symbol] = SymbolSource(found)
                sides = (">=", lowest) if name == "least" else ("<", size)
                place = f" at {node.source}" if node.source else ""
                text = f"an index of {node.op}{place} is not within {lowest} to {size - 1}"
                checks.append((Guard(Dim.of(symbol), *sides, True), text))
        nodes.append(node)
    return graph.with_nodes(nodes, symbols=symbols, checks=tuple(checks))


def _indices(node: Node) -> Iterator[tuple[Value, Size, Size]]:
    """The indices of a node: the tensor, the size that they are below, and the least index."""
    if node.op in _ALONG:
        x = node.args[0]
        assert isinstance(x, Value)
        dim = wrap(node.int("dim"), x.type.rank)
        size = x.type.dims[dim] if x.type.rank else 1
        yield from _checked(node.tensor("index"), size, node.op in _FROM_END)
    elif node.op in _BY_TENSORS:
        x, given = node.args[0], node.args[1]
        assert isinstance(x, Value) and isinstance(given, tuple)
        at = 0
        for index in given:
            if not isinstance(index, Value):
                at += 1
            elif index.type.dtype in (DType.bool, DType.uint8):
                at += max(index.type.rank, 1)  # a mask
            else:
                yield from _checked(index, x.type.dims[at], True)
                at += 1
    elif node.op in _FLAT:
        x, index = node.args[0], node.args[1]
        assert isinstance(x, Value) and isinstance(index, Value)
        yield from _checked(index, _dims.product(x.type.dims), True)
    elif node.op in _TABLES:
        yield from _checked(node.tensor("indices"), node.tensor("weight").type.dims[0], False)


def _checked(index: Value, size: Size, from_end: bool) -> Iterator[tuple[Value, Size, Size]]:
    if index.type.numel != 0:
        yield index, size, -size if from_end else 0

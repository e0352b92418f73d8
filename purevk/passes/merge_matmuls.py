"""Matmuls of one matrix with several constant ones become a single matmul."""

from __future__ import annotations

from typing import TypeAlias

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Size, Value
from purevk.ops.matmul.matmul import NAME
from purevk.passes.rewrite import Rewriter, changing

# What matmuls must have in common: the matrix, the rows and the dtype of the weight, and the dtype of
# the bias.
_Key: TypeAlias = tuple[Value, Size, DType, DType | None]


def merge_matmuls(graph: Graph) -> Graph:
    """`x a`, `x b`, `x c` with constant a, b, c of the same rows become slices of `x [a b c]`.

    The projections to queries, keys and values, or the gate and the value of a gated layer: one
    kernel with enough columns to fill the device, instead of several that wait for one another.
    """
    constant = _constant_values(graph)
    moving = changing(graph.nodes)
    groups: dict[_Key, list[Node]] = {}
    for node in graph.nodes:
        if (
            node.op == NAME
            and node.arg("epilogue") is None
            and node.tensor("a") not in moving
            and _fits(node, constant)
        ):
            a, b, bias = node.tensor("a"), node.tensor("b"), node.optional_tensor("bias")
            key = (a, b.type.dims[0], b.type.dtype, None if bias is None else bias.type.dtype)
            groups.setdefault(key, []).append(node)
    leaders = {nodes[0]: nodes for nodes in groups.values() if len(nodes) > 1}
    if not leaders:
        return graph
    merged = {node for nodes in leaders.values() for node in nodes}
    rewriter = Rewriter(graph)
    made_late = _late(graph, constant)
    for node in made_late:
        rewriter.keep(node)
    for node in graph.nodes:
        if node in made_late:
            continue
        node_now = rewriter.current(node)
        if node not in merged:
            rewriter.keep(node_now)
        elif node in leaders:
            _merge(rewriter, leaders[node])
    return rewriter.finish()


def _constant_values(graph: Graph) -> set[Value]:
    """Values that depend on constants alone."""
    found = set(graph.constants)
    for node in graph.nodes:
        if (
            node.op in ("purevk.copy", "aten.permute.default", "aten.view.default")
            and node.tensor("x") in found
        ):
            found.update(node.results)
    return found


def _late(graph: Graph, constant: set[Value]) -> dict[Node, None]:
    """The nodes that make those values; they move to the front, so that weights are there for the
    first matmul."""
    return {
        node: None
        for node in graph.nodes
        if node.results and all(value in constant for value in node.results)
    }


def _fits(node: Node, constant: set[Value]) -> bool:
    a, b, bias = node.tensor("a"), node.tensor("b"), node.optional_tensor("bias")
    if a.type.rank != 2 or b.type.rank != 2 or b not in constant or not b.type.is_static:
        return False
    return bias is None or (bias in constant and bias.type.rank == 1)


def _merge(rewriter: Rewriter, nodes: list[Node]) -> None:
    rewriter.source = " | ".join(node.source for node in nodes)
    first = nodes[0]
    weights = [node.tensor("b") for node in nodes]
    weight = rewriter.emit("aten.cat.default", tuple(map(rewriter.resolve, weights)), 1)
    bias = None
    if first.optional_tensor("bias") is not None:
        biases = [node.tensor("bias") for node in nodes]
        bias = rewriter.emit("aten.cat.default", tuple(map(rewriter.resolve, biases)), 0)
    matmul = rewriter.emit(NAME, rewriter.resolve(first.tensor("a")), weight, bias, None, ())
    start: Size = 0
    for node, matrix in zip(nodes, weights):
        end = start + matrix.type.dims[1]
        rewriter.replace(node, rewriter.emit("aten.slice.Tensor", matmul, 1, start, end, 1))
        start = end

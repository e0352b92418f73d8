"""Matmuls of one matrix with several constant ones become a single matmul."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Size, Value
from purevk.ops import registry
from purevk.ops.matmul.matmul import NAME
from purevk.ops.quantized.matmul import ALIGN_ROWS
from purevk.ops.quantized.matmul import NAME as QUANTIZED
from purevk.passes.rewrite import Rewriter, changing
from purevk.tuning import DeviceTraits

# What matmuls must have in common: the matrix, the rows and the dtype of the weight, and the dtype of
# the bias.
_Key: TypeAlias = tuple[Value, Size, DType, DType | None]
_QUANTIZED_CONSTANTS = ("weight", "scales", "minimums", "bias")
# Operators that bring constants into the form that kernels of quantized weights read.
_PACKING = (
    "purevk.copy",
    ALIGN_ROWS,
    "aten.permute.default",
    "aten.view.default",
    "aten.slice.Tensor",
    "aten._to_copy.default",
)


def merge_matmuls(graph: Graph, traits: DeviceTraits) -> Graph:
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
    several = [nodes for nodes in groups.values() if len(nodes) > 1]
    return _merge_all(
        graph, several, _late(graph, constant), functools.partial(_merge, graph.producers())
    )


def _merge_all(
    graph: Graph,
    groups: Sequence[list[Node]],
    late: Collection[Node],
    merge: Callable[[Rewriter, list[Node]], Value],
) -> Graph:
    """The graph with one matmul for each group of them: `merge` emits it, and they become slices of its
    result. `late`: nodes that move to the front."""
    if not groups:
        return graph
    leaders = {nodes[0]: nodes for nodes in groups}
    merged = {node for nodes in groups for node in nodes}
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node in late:
            rewriter.keep(node)
    for node in graph.nodes:
        if node in leaders:
            rewriter.source = " | ".join(part.source for part in leaders[node])
            matmul = merge(rewriter, leaders[node])
            start: Size = 0
            for part in leaders[node]:
                end = start + part.result.type.dims[1]
                columns = rewriter.aten.slice.Tensor(matmul, dim=1, start=start, end=end)
                rewriter.replace(part, columns)
                start = end
        elif node not in merged and node not in late:
            rewriter.keep(rewriter.current(node))
    return rewriter.finish()


def _constant_values(graph: Graph) -> set[Value]:
    """Values that depend on constants alone."""
    constants = set(graph.constants)
    for node in graph.nodes:
        if (
            node.op in ("purevk.copy", "aten.permute.default", "aten.view.default")
            and node.tensor("x") in constants
        ):
            constants.update(node.results)
        elif node.op == "aten.cat.default" and all(operand in constants for operand in node.inputs):
            constants.update(node.results)
    return constants


def _late(graph: Graph, constant: set[Value]) -> set[Node]:
    """The nodes that make those values; they move to the front, so that weights are there for the
    first matmul."""
    return {
        node
        for node in graph.nodes
        if node.results and all(value in constant for value in node.results)
    }


def _fits(node: Node, constant: set[Value]) -> bool:
    a, b, bias = node.tensor("a"), node.tensor("b"), node.optional_tensor("bias")
    if a.type.rank != 2 or b.type.rank != 2 or b not in constant or not b.type.is_static:
        return False
    return bias is None or (bias in constant and bias.type.rank == 1)


def merge_quantized(graph: Graph, traits: DeviceTraits) -> Graph:
    """The same for matmuls with quantized weights, whose rows follow one another in the joint one.

    On a software device, those that pointwise operators follow take these as epilogues instead.
    """
    epilogues = set() if traits.profile.has_fast_shared_memory else _with_epilogues(graph)
    producers, moving = graph.producers(), changing(graph.nodes)
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if (
            node.op == QUANTIZED
            and node.tensor("a") not in moving
            and node.result not in epilogues
            and _is_plain(graph, producers, node)
        ):
            groups.setdefault(_quantized_key(node), []).append(node)
    limit = traits.max_storage_range
    several = [
        nodes
        for nodes in groups.values()
        if len(nodes) > 1 and sum(node.tensor("weight").type.nbytes for node in nodes) <= limit
    ]
    late = {
        producer
        for nodes in several
        for node in nodes
        for name in _QUANTIZED_CONSTANTS
        for producer in _chain(graph, producers, node.optional_tensor(name)) or ()
    }
    return _merge_all(graph, several, late, _merge_quantized)


def _with_epilogues(graph: Graph) -> set[Value]:
    """What a pointwise operator reads, through views."""
    read: set[Value] = set()
    for node in reversed(graph.nodes):
        definition = registry.find(node.op)
        is_pointwise = definition is not None and isinstance(definition.form, registry.Pointwise)
        if is_pointwise or (registry.is_view(node) and not read.isdisjoint(node.results)):
            read.update(node.inputs)
    return read


def _chain(
    graph: Graph, producers: dict[Value, Node], value: Value | None
) -> tuple[Node, ...] | None:
    """The nodes that make a value of one constant, the first one first; None if others do."""
    nodes: list[Node] = []
    while value is not None and value not in graph.constants:
        node = producers.get(value)
        if node is None or node.op not in _PACKING or len(node.inputs) != 1:
            return None
        nodes.append(node)
        value = node.inputs[0]
    return tuple(reversed(nodes))


def _is_plain(graph: Graph, producers: dict[Value, Node], node: Node) -> bool:
    """Whether a matmul has float activations, constant parameters and no epilogue."""
    if any(node.arg(name) is not None for name in ("sums", "out", "epilogue")):
        return False
    rows = node.tensor("weight").type.dims[0]
    values = [node.optional_tensor(name) for name in _QUANTIZED_CONSTANTS]
    return all(
        value.type.is_static
        and value.type.dims[0] == rows
        and _chain(graph, producers, value) is not None
        for value in values
        if value is not None
    )


def _quantized_key(node: Node) -> tuple[object, ...]:
    """What matmuls with quantized weights must have in common."""
    constants = (node.optional_tensor(name) for name in _QUANTIZED_CONSTANTS)
    return (
        node.tensor("a"),
        *(node.arg(name) for name in ("bits", "high_first", "group", "dtype")),
        *((value.type.dtype, value.type.dims[1:]) if value else None for value in constants),
    )


def _merge_quantized(rewriter: Rewriter, nodes: list[Node]) -> Value:
    joint = nodes[0]
    for name in _QUANTIZED_CONSTANTS:
        if joint.optional_tensor(name) is not None:
            parts = tuple(node.tensor(name) for node in nodes)
            joined = rewriter.aten.cat(parts)
            joint = joint.with_arguments(**{name: joined})
    return rewriter.emit(QUANTIZED, *(rewriter.resolve(arg) for arg in joint.args))


def _merge(producers: dict[Value, Node], rewriter: Rewriter, nodes: list[Node]) -> Value:
    first = nodes[0]
    weight = _joined(rewriter, producers, [node.tensor("b") for node in nodes])
    bias = None
    if first.optional_tensor("bias") is not None:
        biases = [node.tensor("bias") for node in nodes]
        bias = rewriter.aten.cat(tuple(map(rewriter.resolve, biases)))
    return rewriter.emit(NAME, rewriter.resolve(first.tensor("a")), weight, bias, None, ())


def _joined(rewriter: Rewriter, producers: dict[Value, Node], weights: list[Value]) -> Value:
    """Matrices side by side, dense along the same dim as they are."""
    nodes = [producers.get(weight) for weight in weights]
    turned = [node.tensor("x") for node in nodes if node is not None and is_transpose(node)]
    if len(turned) < len(weights):
        return rewriter.aten.cat(tuple(map(rewriter.resolve, weights)), dim=1)
    joint = rewriter.aten.cat(tuple(map(rewriter.resolve, turned)))
    return rewriter.aten.permute(joint, (1, 0))


def is_transpose(node: Node) -> bool:
    """Whether a node swaps the dims of a matrix."""
    return node.op == "aten.permute.default" and node.arg("dims") == (1, 0)

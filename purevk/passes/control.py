"""Control flow that needs no host.

A condition that is known selects its branch, two small branches are both computed, and a short loop is
unrolled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Arg, Constant, Graph, Node, Value, map_values
from purevk.ir import dims as _dims
from purevk.ops import registry
from purevk.ops.control import output_type
from purevk.passes.rewrite import Rewriter
from purevk.passes.simplify import static_value
from purevk.tuning import DeviceTraits

# Both branches are computed if each has at most so many nodes, and if those of them that are neither
# pointwise nor views make at most so many elements.
_NODES, _ELEMENTS = 24, 1 << 16
_UNROLLED = 128  # nodes of an unrolled loop
# Kernels that read within their inputs whatever the numbers in them are.
_SAFE = {
    f"aten.{name}"
    for name in (
        "linear.default",
        "mm.default",
        "addmm.default",
        "bmm.default",
        "matmul.default",
        "sum.default",
        "sum.dim_IntList",
        "mean.default",
        "mean.dim",
        "amax.default",
        "amin.default",
        "softmax.int",
        "_softmax.default",
        "cat.default",
        "native_layer_norm.default",
        "layer_norm.default",
        "full.default",
        "full_like.default",
        "scalar_tensor.default",
        "ones.default",
        "zeros.default",
        "zeros_like.default",
        "ones_like.default",
        "clone.default",
        "stack.default",
    )
}


def settle_control(graph: Graph, traits: DeviceTraits) -> Graph:
    """Replaces control flow, innermost first, by the nodes of its sub-graphs where these can be part
    of the graph around it."""
    if not any(node.graphs for node in graph.nodes):
        return graph
    return _Settler(graph, traits).run()


class _Settler(Rewriter):
    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        super().__init__(graph, traits)
        self.constants: dict[Value, Constant] = dict(graph.constants)
        self.states: dict[Value, Constant | None] = dict(graph.states)
        self.checks = dict(graph.checks)

    def run(self) -> Graph:
        for node in self.graph.nodes:
            node = self.current(node)
            self.source = node.source
            if not node.graphs:
                self.keep(node)
                continue
            node = _with_graphs(node, lambda inner: settle_control(inner, self.traits))
            replacement = None
            if node.op == "purevk.cond":
                replacement = self._cond(node)
            elif node.op == "purevk.for":
                replacement = self._for(node)
            if replacement is None:
                self.keep(node)
            else:
                self.replace(node, replacement)
        return self.finish(
            constants=self.constants, states=self.states, checks=tuple(self.checks.items())
        )

    def _cond(self, node: Node) -> list[Value] | None:
        predicate = node.tensor_or_scalar("predicate")
        true, true_operands = node.graph("true"), node.arg_list("true_operands")
        false, false_operands = node.graph("false"), node.arg_list("false_operands")
        value = (
            static_value(self.constants, predicate) if isinstance(predicate, Value) else predicate
        )
        if isinstance(value, (bool, int, float)):
            graph, operands = (true, true_operands) if value else (false, false_operands)
            return self._tensors(self.inline(graph, operands)) if can_inline(graph) else None
        if not isinstance(predicate, Value) or predicate.type.numel != 1:
            return None
        if node.tensors("writes"):
            return None
        if not (_is_small(true, self.graph) and _is_small(false, self.graph)):
            return None
        left = self._tensors(self.inline(true, true_operands))
        right = self._tensors(self.inline(false, false_operands))
        if predicate.type.dtype is not DType.bool:
            predicate = self.aten._to_copy(predicate, DType.bool)
        if predicate.type.rank:
            predicate = self.aten.view(predicate, ())
        return [self.aten.where.self(predicate, a, b) for a, b in zip(left, right)]

    def _for(self, node: Node) -> list[Value] | None:
        body, length = node.graph("body"), node.size("length")
        if not isinstance(length, int) or not 0 < length * (len(body.nodes) + 1) <= _UNROLLED:
            return None
        carried_in = node.arg_list("carried")
        carried = [arg for arg in carried_in if isinstance(arg, Value)]
        if not can_inline(body) or len(carried) != len(carried_in):
            return None
        iteration_outputs: list[list[Value]] = []  # by each iteration, to be stacked
        for iteration in range(length):
            slices = [
                self.aten.select.int(tensor, dim=0, index=iteration)
                for tensor in node.tensors("scanned")
            ]
            operands = node.arg_list("operands")
            outputs = self._tensors(self.inline(body, (*carried, *slices, *operands)))
            carried, others = outputs[: len(carried)], outputs[len(carried) :]
            iteration_outputs.append(others)
        stacked = [self.aten.stack(column) for column in zip(*iteration_outputs)]
        return [*carried, *stacked]

    def inline(self, graph: Graph, operands: Sequence[Arg]) -> list[Arg]:
        """Puts the nodes of a sub-graph here, with its checks; returns its outputs."""
        self.constants.update(graph.constants)
        self.states.update(graph.states)
        self.checks.update(graph.checks)
        mapping: dict[object, Arg] = dict(zip(graph.inputs, operands))
        swap = lambda value: mapping.get(value, value)  # noqa: E731
        for node in graph.nodes:
            results = tuple(
                Value(self.names.fresh(value.name.rpartition("_")[0] or value.name), value.type)
                for value in node.results
            )
            args = tuple(map_values(arg, swap) for arg in node.args)
            self.keep(Node(node.op, args, results, node.source, node.alias))
            mapping.update(zip(node.results, results))
        return [map_values(output, swap) for output in graph.outputs]

    def _tensors(self, outputs: Sequence[Arg]) -> list[Value]:
        """Outputs of a sub-graph as the results of its node are."""
        results = []
        for output in outputs:
            if not isinstance(output, Value):
                output = self.aten.full((), output, output_type(output).dtype)
            results.append(output)
        return results


def can_inline(graph: Graph) -> bool:
    """Whether the nodes of a sub-graph can be part of the graph around it: all inputs are tensors,
    and it has no symbols of its own."""
    return not graph.symbols and all(isinstance(value, Value) for value in graph.inputs)


def _is_small(graph: Graph, around: Graph) -> bool:
    """Whether a branch may be computed although the other one is taken: it writes nothing, checks
    nothing, reads no state that changes, and costs less than asking the host."""
    if not can_inline(graph) or graph.states or graph.checks or len(graph.nodes) > _NODES:
        return False
    elements = 0
    for node in graph.nodes:
        definition = registry.find(node.op)
        if node.graphs or definition is None or definition.form is None:
            return False
        if registry.is_random(node) or registry.mutated(node):
            return False
        if not isinstance(definition.form, (registry.Pointwise, registry.View)):
            if definition.name not in _SAFE:
                return False
            elements += max(
                _dims.upper(value.type.numel) for value in (*node.inputs, *node.results)
            )
    return elements <= _ELEMENTS


def optimize_sub_graphs(graph: Graph, optimize: Callable[[Graph], Graph]) -> Graph:
    """Runs the passes on sub-graphs, and drops the operands that they do not read any more."""
    if not any(node.graphs for node in graph.nodes):
        return graph
    return graph.with_nodes(
        _trimmed(_with_graphs(node, optimize)) if node.graphs else node for node in graph.nodes
    )


def _with_graphs(node: Node, function: Callable[[Graph], Graph]) -> Node:
    args = tuple(function(arg) if isinstance(arg, Graph) else arg for arg in node.args)
    return replace(node, args=args)


class SubGraph(NamedTuple):
    """A sub-graph of a node.

    Attributes:
        graph: the parameter that is the graph.
        operands: the parameter with the operands of the graph alone.
        first: how many of its inputs come before these operands.
    """

    graph: str
    operands: str
    first: int


def sub_graphs(node: Node) -> tuple[SubGraph, ...]:
    """The sub-graphs of a node, in order."""
    if node.op == "purevk.cond":
        return SubGraph("true", "true_operands", 0), SubGraph("false", "false_operands", 0)
    first = len(node.arg_list("carried"))
    if node.op == "purevk.while":
        return (
            SubGraph("condition", "condition_operands", first),
            SubGraph("body", "body_operands", first),
        )
    return (SubGraph("body", "operands", first + len(node.arg_list("scanned"))),)


def _trimmed(node: Node) -> Node:
    """A node without operands that its sub-graphs do not read."""
    for sub_graph in sub_graphs(node):
        graph, operands = node.graph(sub_graph.graph), node.arg_list(sub_graph.operands)
        read: set[object] = {value for inner in graph.nodes for value in inner.inputs}
        read |= graph.output_values()
        read |= {source.value for source in graph.symbols.values()}
        own = graph.inputs[sub_graph.first :]
        positions = [n for n, value in enumerate(own) if value in read]
        inputs = (*graph.inputs[: sub_graph.first], *(own[n] for n in positions))
        trimmed: dict[str, Arg] = {
            sub_graph.graph: graph.with_nodes(graph.nodes, inputs=inputs),
            sub_graph.operands: tuple(operands[n] for n in positions),
        }
        node = node.with_arguments(**trimmed)
    return node

"""Control flow that needs no host: choices that are known, small branches computed both, short
loops written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Arg, Graph, Node, Value, map_values, values_in
from purevk.ir import dims as _dims
from purevk.ops import registry
from purevk.ops.control import output_type
from purevk.passes.rewrite import Rewriter
from purevk.passes.simplify import static_value

# Both branches are computed up to this many nodes, and elements made by those that are no pointwise
# operators or views.
_NODES, _ELEMENTS = 24, 1 << 16
_UNROLLED = 128  # nodes of a loop that is written out
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


def settle_control(graph: Graph) -> Graph:
    """Replaces control flow, innermost first, where what it does can stand among the other
    nodes."""
    if not any(node.graphs for node in graph.nodes):
        return graph
    return _Settler(graph).run()


class _Settler(Rewriter):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.leaves: tuple[dict, dict] = (dict(graph.constants), dict(graph.states))

    def run(self) -> Graph:
        for node in self.graph.nodes:
            node = self.current(node)
            self.source = node.source
            if not node.graphs:
                self.keep(node)
                continue
            node = Node(
                node.op,
                tuple(settle_control(arg) if isinstance(arg, Graph) else arg for arg in node.args),
                node.results,
                node.source,
                node.alias,
            )
            made = (
                self._cond(node)
                if node.op == "purevk.cond"
                else self._scan(node)
                if node.op == "purevk.for"
                else None
            )
            if made is None:
                self.keep(node)
            else:
                self.replace(node, made)
        constants, states = self.leaves
        return self.finish(constants=constants, states=states)

    def _cond(self, node: Node) -> list[Value] | None:
        predicate, true, false, true_operands, false_operands, _, writes = node.args
        known = (
            static_value(self.leaves[0], predicate) if isinstance(predicate, Value) else predicate
        )
        if isinstance(known, (bool, int, float)):
            graph, operands = (true, true_operands) if known else (false, false_operands)
            return self._tensors(self.inline(graph, operands)) if can_inline(graph) else None
        if not isinstance(predicate, Value) or predicate.type.numel != 1 or writes:
            return None
        if not (_is_small(true, self.graph) and _is_small(false, self.graph)):
            return None
        left = self._tensors(self.inline(true, true_operands))
        right = self._tensors(self.inline(false, false_operands))
        if predicate.type.dtype is not DType.bool:
            predicate = self.emit("aten._to_copy.default", predicate, DType.bool)
        if predicate.type.rank:
            predicate = self.emit("aten.view.default", predicate, ())
        return [self.emit("aten.where.self", predicate, a, b) for a, b in zip(left, right)]

    def _scan(self, node: Node) -> list[Value] | None:
        body, length, carried, scanned, operands, _, _ = node.args
        short = (
            isinstance(length, int) and 0 < length and length * (len(body.nodes) + 1) <= _UNROLLED
        )
        if not short or not can_inline(body) or not all(isinstance(arg, Value) for arg in carried):
            return None
        rows: list[list[Value]] = []
        for turn in range(length):
            slices = [self.emit("aten.select.int", each, 0, turn) for each in scanned]
            made = self._tensors(self.inline(body, (*carried, *slices, *operands)))
            carried = tuple(made[: len(carried)])
            rows.append(made[len(carried) :])
        return [
            *carried,
            *(self.emit("aten.stack.default", tuple(column), 0) for column in zip(*rows)),
        ]

    def inline(self, graph: Graph, operands: Sequence[Arg]) -> list[Arg]:
        """Puts the nodes of a sub-graph here; returns its outputs."""
        for mine, its in zip(self.leaves, (graph.constants, graph.states)):
            mine.update(its)
        mapping: dict[Value, Arg] = dict(zip(graph.inputs, operands))
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
        made = []
        for output in outputs:
            if not isinstance(output, Value):
                output = self.emit("aten.full.default", (), output, output_type(output).dtype)
            made.append(output)
        return made


def can_inline(graph: Graph) -> bool:
    """Whether the nodes of a sub-graph can stand in the one around it: it has tensors for inputs,
    and learns no sizes."""
    return not graph.symbols and all(isinstance(value, Value) for value in graph.inputs)


def _is_small(graph: Graph, around: Graph) -> bool:
    """Whether a branch may be computed although the other one is taken: it writes nothing, reads no
    state that changes, and costs less than asking the host."""
    if not can_inline(graph) or graph.states or len(graph.nodes) > _NODES:
        return False
    elements = 0
    for node in graph.nodes:
        row = registry.find(node.op)
        if node.graphs or row is None or row.form is None or row.random or row.mutates:
            return False
        if not isinstance(row.form, (registry.Pointwise, registry.View)):
            if row.name not in _SAFE:
                return False
            elements += max(
                _dims.upper(value.type.numel) for value in (*node.inputs, *node.results)
            )
    return elements <= _ELEMENTS


def optimize_sub_graphs(graph: Graph, optimize: Any) -> Graph:
    """Runs the passes on sub-graphs, and drops the operands that they do not read any more."""
    if not any(node.graphs for node in graph.nodes):
        return graph
    nodes = []
    for node in graph.nodes:
        if node.graphs:
            node = _trimmed(
                Node(
                    node.op,
                    tuple(optimize(arg) if isinstance(arg, Graph) else arg for arg in node.args),
                    node.results,
                    node.source,
                    node.alias,
                )
            )
        nodes.append(node)
    return graph.with_nodes(nodes)


def operand_positions(node: Node) -> tuple[tuple[int, int, int], ...]:
    """For each sub-graph of a node: its position, that of its operands, how many inputs come before
    these."""
    args = node.args
    if node.op == "purevk.cond":
        return (1, 3, 0), (2, 4, 0)
    if node.op == "purevk.while":
        return (0, 3, len(args[2])), (1, 4, len(args[2]))
    return ((0, 4, len(args[2]) + len(args[3])),)


def _trimmed(node: Node) -> Node:
    args: list[Any] = list(node.args)
    for at, operands_at, first in operand_positions(node):
        graph = args[at]
        read = {value for each in graph.nodes for value in each.inputs} | set(
            values_in(graph.outputs)
        )
        read |= {source.value for source in graph.symbols.values()}
        kept = [n for n in range(len(args[operands_at])) if graph.inputs[first + n] in read]
        inputs = (*graph.inputs[:first], *(graph.inputs[first + n] for n in kept))
        args[at] = graph.with_nodes(graph.nodes, inputs=inputs)
        args[operands_at] = tuple(args[operands_at][n] for n in kept)
    return Node(node.op, tuple(args), node.results, node.source, node.alias)

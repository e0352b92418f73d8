"""Splits off what depends on constants alone: it runs once, at load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from purevk.ir import Graph, Node, Value, dims_in, values_in
from purevk.ir.host import HOST
from purevk.ops import registry


@dataclass(frozen=True)
class Split:
    """A graph in two parts.

    Attributes:
        once: nodes that depend on constants alone, in order.
        kept: their results that the rest reads, or reads views of.
        graph: the rest, in which the `kept` values have no node.
    """

    once: tuple[Node, ...]
    kept: tuple[Value, ...]
    graph: Graph


def split_constant(
    graph: Graph,
    storage_of: Callable[[Value], Value] = lambda value: value,
    is_fixed: Callable[[Value], bool] = lambda value: value.type.is_static,
) -> Split:
    """Finds the nodes with results whose every tensor is a constant (or a view of one) or comes from
    such a node, and whose sizes are known. Transient results are not among them.

    Args:
        storage_of: the value that another one is a view of, or itself.
        is_fixed: whether the sizes of a value, and where it lies in its storage, are known.
    """
    constant: set[Value] = set(graph.constants)
    once: list[Node] = []
    rest: list[Node] = []
    for node in graph.nodes:
        definition = registry.find(node.op)
        fixed = (
            definition is not None
            and definition.form is not None
            and not registry.mutated(node)
            and not definition.transient
            and node.results
            and node.op != HOST
            and all(value.type.is_static for value in node.results)
            and not any(True for _ in dims_in(node.args))
        )
        if fixed and all(
            value in constant or (storage_of(value) in constant and is_fixed(value))
            for value in node.inputs
        ):
            once.append(node)
            constant.update(node.results)
        else:
            rest.append(node)
    made = {value for node in once for value in node.results}
    read = [value for node in rest for value in node.inputs]
    read += values_in(graph.outputs)
    read += [source.value for source in graph.symbols.values() if source.value is not None]
    kept = tuple(value for value in dict.fromkeys(map(storage_of, read)) if value in made)
    return Split(tuple(once), kept, graph.with_nodes(rest))

"""Walking a graph and replacing nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, overload

import numpy as np

from purevk.dtypes import DType
from purevk.ir import (
    Arg,
    Constant,
    Graph,
    Node,
    Size,
    Symbol,
    SymbolSource,
    TensorType,
    Value,
    map_values,
    values_in,
)
from purevk.ir import dims as _dims
from purevk.ops import registry
from purevk.ops.builder import Builder, NameSource
from purevk.tuning import DeviceTraits


class Rewriter(Builder):
    """A builder that goes through the nodes of a graph and gives out a new one.

    `replaced` maps values of the old graph to those that take their place; `traits` is the device.
    """

    def __init__(self, graph: Graph, traits: DeviceTraits | None = None) -> None:
        super().__init__(graph, traits or DeviceTraits(frozenset()), names=_Names(graph))
        self.replaced: dict[Value, Value] = {}
        self._constants: dict[Value, Constant] = {}
        self._states: dict[Value, Constant | None] = {}
        self._sources: dict[Symbol, SymbolSource] = {}

    def state(self, type: TensorType, first: Constant | None = None) -> Value:
        value = Value(self.names.fresh("state"), type)
        self._states[value] = first
        return value

    def constant(self, array: np.ndarray, dtype: DType) -> Value:
        value = Value(self.names.fresh("const"), TensorType(dtype, array.shape))
        data = np.ascontiguousarray(array, dtype.numpy).reshape(-1).view(np.uint8).data
        self._constants[value] = Constant(data)
        return value

    def bind_symbol(self, size: Size, count: Value) -> None:
        for symbol in _dims.symbols(size):
            source = self.graph.symbols.get(symbol)  # None: it is given from outside
            is_input = source is None or source.dim is None or not symbol.unbacked
            if not is_input and symbol not in self._sources:
                self._sources[symbol] = SymbolSource(count, None, 0)

    @overload
    def resolve(self, arg: Value) -> Value: ...
    @overload
    def resolve(self, arg: Arg) -> Arg: ...
    def resolve(self, arg: Arg) -> Arg:
        """An argument with replaced values put in."""
        return map_values(arg, self._resolve)

    def _resolve(self, value: Value) -> Value:
        while value in self.replaced:
            value = self.replaced[value]
        return value

    def current(self, node: Node) -> Node:
        """A node with replaced arguments."""
        replaced = self.replaced
        if not replaced or not any([value in replaced for value in node.inputs]):
            return node
        args = tuple([self.resolve(arg) for arg in node.args])
        return Node(node.op, args, node.results, node.source, node.alias)

    def keep(self, node: Node) -> None:
        """Takes a node over."""
        self.nodes.append(node)

    def replace(self, node: Node, results: Value | Iterable[Value]) -> None:
        """Uses other values for a node's results from here on."""
        values = (results,) if isinstance(results, Value) else results
        for old, new in zip(node.results, values):
            if old is not new:
                self.replaced[old] = new

    def finish(self, **changes: Any) -> Graph:
        """The new graph."""
        outputs = tuple(self.resolve(output) for output in self.graph.outputs)
        if self._constants:
            changes.setdefault("constants", {**self.graph.constants, **self._constants})
        if self._states:
            changes.setdefault("states", {**self.graph.states, **self._states})
        if self._sources or self.graph.unbacked:
            symbols = {**self.graph.symbols, **self._sources}
            changes.setdefault(
                "symbols", {symbol: self._source(source) for symbol, source in symbols.items()}
            )
        return self.graph.with_nodes(self.nodes, outputs=outputs, **changes)

    def _source(self, source: SymbolSource) -> SymbolSource:
        value = None if source.value is None else self.resolve(source.value)
        return source if value is source.value else SymbolSource(value, source.dim, source.element)


def each_node(
    graph: Graph,
    function: Callable[[Rewriter, Node], registry.Made],
    only: Collection[Node] | None = None,
) -> Graph:
    """Calls `function(rewriter, node)` for every node in order, or for those in `only`; it returns the
    values that replace the node's results, () to drop the node, or None to keep it."""
    if only is not None and not only:
        return graph
    rewriter = Rewriter(graph)
    for original in graph.nodes:
        node = rewriter.current(original)
        rewriter.source = node.source
        results = function(rewriter, node) if only is None or original in only else None
        if results is None:
            rewriter.keep(node)
        else:
            rewriter.replace(node, results)
    return rewriter.finish()


class _Names(NameSource):
    """Names that no value of a graph has."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    @functools.cached_property
    def _taken(self) -> set[str]:  # many passes make no value
        graph = self._graph
        names = {value.name for node in graph.nodes for value in node.results}
        names.update(value.name for value in (*graph.constants, *graph.states))
        names.update(value.name for value in graph.inputs if isinstance(value, Value))
        return names

    def fresh(self, stem: str) -> str:
        name = super().fresh(stem)
        while name in self._taken:
            name = super().fresh(stem)
        self._taken.add(name)
        return name


def reader_counts(graph: Graph) -> dict[Value, int]:
    """How many nodes read each value. Outputs and sources of symbols count as readers."""
    counts: dict[Value, int] = {}
    for node in graph.nodes:
        for value in dict.fromkeys(node.inputs):
            counts[value] = counts.get(value, 0) + 1
    sources = (source.value for source in graph.symbols.values() if source.value is not None)
    for value in (*values_in(graph.outputs), *sources):
        counts[value] = counts.get(value, 0) + 1
    return counts


def changing(nodes: Iterable[Node]) -> set[Value]:
    """Values whose elements change during a call: states that a node writes, and views of them,
    which follow the state."""
    nodes = tuple(nodes)
    mutated = {value for node in nodes for value in registry.mutated(node)}
    for node in nodes if mutated else ():
        if registry.is_view(node) and node.inputs[0] in mutated:
            mutated.update(node.results)
    return mutated


def constants_of(graph: Graph) -> set[Value]:
    """The constants of a graph, and what is made of them alone."""
    constants = set(graph.constants)
    for node in graph.nodes:
        if node.inputs and all(operand in constants for operand in node.inputs):
            constants.update(node.results)
    return constants

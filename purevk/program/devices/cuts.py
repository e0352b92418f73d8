"""Cuts a graph into stages: parts that run one after the other, each on a device of its own."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from purevk.checking.parts import make_part
from purevk.errors import InputError
from purevk.ir import (
    Arg,
    Constant,
    Dim,
    Graph,
    Node,
    Symbol,
    SymbolSource,
    Value,
    map_values,
    values_in,
)
from purevk.ir import dims as _dims
from purevk.ops import registry
from purevk.passes.rewrite import changing

TOLERANCE = 0.1
"""How far a cut may be from an even share of the weights, as a part of all of them, if fewer bytes
cross it there."""


@dataclass(frozen=True)
class Stage:
    """A part of a graph.

    Attributes:
        graph: without a signature.
        inputs, outputs: of the stage, as values and sizes of the whole graph. A stage without
            nodes and outputs does not run.
        nodes: the range of the whole graph's nodes.
        weight_bytes: of its constants and states.
    """

    graph: Graph
    inputs: tuple[Value | Dim, ...]
    outputs: tuple[Arg, ...]
    nodes: range
    weight_bytes: int

    @property
    def runs(self) -> bool:
        return bool(self.nodes or self.outputs)


@dataclass(frozen=True)
class CutGraph:
    """A graph that is cut.

    Attributes:
        graph: the whole graph.
        stages: in the order in which they run.
        outputs: for each output of the whole graph the stage that gives it, and which of its outputs
            it is.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    outputs: tuple[tuple[int, int], ...]


def read_leaves(graph: Graph, nodes: Iterable[Node]) -> dict[Any, int]:
    """The bytes of the constants and states that some nodes read, those in sub-graphs included.

    The keys are the same for all methods of a program that share them: the memory of a constant,
    the name of a state.
    """
    weights: dict[Any, int] = {}
    for node in nodes:
        for value, constant in _leaves(graph, node):
            if constant is None:
                weights[state_key(graph, value)] = value.type.nbytes
            else:
                weights["constant", constant.memory, constant.nbytes] = constant.nbytes
    return weights


def state_key(graph: Graph, state: Value) -> Hashable:
    """What makes a state one with those of other methods."""
    label = graph.labels.get(state)
    if label is not None and label.key:
        return "state", label.key
    return "state", graph.name, state.name if label is None else label.name


def _inner(node: Node) -> Iterator[Graph]:
    for sub in node.graphs:
        yield from sub.nested()


def _leaves(graph: Graph, node: Node) -> Iterator[tuple[Value, Constant | None]]:
    """The constants that a node reads, and its states, with None."""
    for leaf in node.inputs:
        if leaf in graph.constants:
            yield leaf, graph.constants[leaf]
        elif leaf in graph.states:
            yield leaf, None
    for inner in _inner(node):
        yield from inner.constants.items()
        for leaf in inner.states:
            yield leaf, None


def _written(graph: Graph) -> set[Hashable]:
    """The states that a graph writes, by key."""
    keys: set[Hashable] = set()
    for inner in graph.nested():
        moving = changing(inner.nodes)
        keys.update(state_key(graph, value) for value in inner.states if value in moving)
    return keys


def with_early_stores(graph: Graph) -> Graph:
    """The graph with each store into a state as early as it can be.

    torch.export puts them all behind the last layer, so that each state would keep all layers from
    its own to the last in one stage.
    """
    views: dict[Value, Value] = {}
    ready: dict[Value, int] = {}  # the node that makes a value
    touched: dict[Value, int] = {}  # the last node that reads or writes a state
    after: dict[int, list[Node]] = {}
    positions: list[int] = []
    for at, node in enumerate(graph.nodes):
        states = {views.get(value, value) for value in node.inputs}
        states = {value for value in states if value in graph.states}
        states.update(value for inner in _inner(node) for value in inner.states)
        where = at
        if node.op == "purevk.store":
            where = max(
                max((ready.get(value, -1) for value in node.inputs), default=-1),
                max((touched.get(value, -1) for value in states), default=-1),
            )
        if where < at:
            after.setdefault(where, []).append(node)
        else:
            positions.append(at)
        for value in states:
            touched[value] = where
        for value in node.results:
            ready[value] = where
        if registry.is_view(node) and states:
            views.update(dict.fromkeys(node.results, views.get(node.inputs[0], node.inputs[0])))
    nodes = list(after.get(-1, ()))
    for at in positions:
        nodes += [graph.nodes[at], *after.get(at, ())]
    return graph.with_nodes(nodes)


class _Facts:
    """What decides where a graph may be cut.

    Args:
        written: states that a method of the program writes, by key.

    Attributes:
        weights: for each node the bytes that it is the first to read.
        allowed: whether a cut before each node is possible, and behind the last one.
        crossing: the bytes that such a cut sends to the next device.
        leaves: by key, the first and the last node that reads a constant or a state.
    """

    def __init__(self, graph: Graph, written: Collection[Hashable]) -> None:
        count = len(graph.nodes)
        self.graph, self.written = graph, written
        self.leaves: dict[Any, tuple[int, int]] = {}
        self.bytes: dict[Any, int] = {}
        self.weights = [0] * count
        for at, node in enumerate(graph.nodes):
            for key, size in read_leaves(graph, [node]).items():
                if key not in self.leaves:
                    self.weights[at] += size
                    self.bytes[key] = size
                self.leaves[key] = (self.leaves.get(key, (at, at))[0], at)
        if not any(self.weights):
            self.weights = [
                sum(value.type.nbytes for value in node.results) for node in graph.nodes
            ]
        steps = np.zeros(count + 1, np.float64)
        last = {value: at for at, node in enumerate(graph.nodes) for value in node.inputs}
        for at, node in enumerate(graph.nodes):
            for value in node.results:
                if last.get(value, at) > at:
                    size = value.type.nbytes
                    steps[at + 1] += size
                    steps[last[value] + 1] -= size
        self.crossing = np.cumsum(steps)
        blocked = np.zeros(count + 1, np.int64)
        for first, end in self._together(written):
            blocked[first + 1] += 1
            blocked[end + 1] -= 1
        self.allowed = np.cumsum(blocked) == 0

    def _together(self, written: Collection[Hashable]) -> Iterable[tuple[int, int]]:
        """Ranges of nodes, both ends included, that have to be in one stage: those that touch a
        state that changes, and those that make and use a data-dependent size."""
        graph = self.graph
        spans: dict[Any, tuple[int, int]] = {}
        views: dict[Value, Hashable] = {}  # the state that each of its views shows

        def extend(key: Any, at: int) -> None:
            first, end = spans.get(key, (at, at))
            spans[key] = (min(first, at), max(end, at))

        for at, node in enumerate(graph.nodes):
            touched = {
                state_key(graph, leaf) for leaf, data in _leaves(graph, node) if data is None
            }
            touched.update(views[leaf] for leaf in node.inputs if leaf in views)
            for key in touched & set(written):
                extend(key, at)
                if registry.is_view(node):
                    views.update(dict.fromkeys(node.results, key))
        producers = {value: at for at, node in enumerate(graph.nodes) for value in node.results}
        unbacked = {
            symbol: producers[source.value]
            for symbol, source in graph.unbacked.items()
            if source.value in producers
        }
        for symbol, at in unbacked.items():
            extend(symbol, at)
        if unbacked:
            for at, node in enumerate(graph.nodes):
                for symbol in _symbols(node) & unbacked.keys():
                    extend(symbol, at)
            for output in graph.outputs:
                for symbol in _dims.symbols(output) if isinstance(output, Dim) else ():
                    if symbol in unbacked:
                        extend(symbol, unbacked[symbol])
            for guard, _ in graph.checks:
                ats = [unbacked[symbol] for symbol in guard.symbols if symbol in unbacked]
                if ats:
                    spans[guard] = (min(ats), max(ats))
        return spans.values()


def choose_cuts(
    graphs: Mapping[str, Graph], shares: Sequence[float], where: str
) -> dict[str, list[int]]:
    """Where to cut the graphs of a program, one stage for each share.

    The method with the most weights is cut so that each stage has its share of the weights; near
    that place, where the fewest bytes cross the cut. Other methods are cut where their weights and
    states are on the same devices as those of the first. These may have stages without nodes.

    Args:
        graphs: by method.
        shares: of the stages, in any unit.
        where: the program, for messages.

    Returns:
        For each method the nodes before which a further stage begins.

    Raises:
        InputError: a graph cannot be cut into so many stages.
    """
    written = set().union(*(_written(graph) for graph in graphs.values()))
    facts = {name: _Facts(graph, written) for name, graph in graphs.items()}
    homes: dict[Any, int] = {}
    cuts: dict[str, list[int]] = {}
    for name in sorted(graphs, key=lambda name: -sum(facts[name].weights)):
        positions = _cuts(facts[name], shares, homes, may_be_empty=bool(cuts))
        if positions is None:
            places = int(facts[name].allowed[1:-1].sum())
            raise InputError(
                f"the model cannot be split by layers into {len(shares)} stages",
                where=f"{where}, method {name}",
                why=f"its {len(graphs[name].nodes)} nodes have {places} places to cut: nodes that share"
                " a state, or a size that depends on data, stay together",
                next="load it for fewer devices",
            )
        cuts[name] = positions
        for key, (first, _) in facts[name].leaves.items():
            homes.setdefault(key, bisect.bisect_right(positions, first))
    return {name: cuts[name] for name in graphs}


def _cuts(
    facts: _Facts, shares: Sequence[float], homes: Mapping[Any, int], may_be_empty: bool
) -> list[int] | None:
    """The cuts of one graph; None if there are none."""
    total, count = sum(facts.weights), len(facts.weights)
    before = np.concatenate([[0], np.cumsum(facts.weights)])
    least = 0 if may_be_empty else 1  # nodes of a stage
    shared = [key for key in facts.leaves if key in homes]
    positions: list[int] = []
    for stage in range(1, len(shares)):
        lowest = (positions[-1] if positions else 0) + least
        highest = count - least * (len(shares) - stage)
        cost = facts.crossing.copy()
        target = total * sum(shares[:stage]) / sum(shares)
        off = np.abs(before - target)
        for key in shared:
            first, last = facts.leaves[key]
            if key in facts.written:  # it is in one place only
                if homes[key] < stage:
                    lowest = max(lowest, last + 1)
                else:
                    highest = min(highest, first)
            elif homes[key] < stage:
                cost[: first + 1] += facts.bytes[key]
            else:
                cost[first + 1 :] += facts.bytes[key]
        places = [at for at in range(lowest, highest + 1) if facts.allowed[at]]
        if not places:
            return None
        if not shared:
            near = [at for at in places if off[at] <= TOLERANCE * total / len(shares)]
            places = near or [min(places, key=lambda at: off[at])]
        positions.append(min(places, key=lambda at: (cost[at], off[at])))
    return positions


def cut(graph: Graph, cuts: Sequence[int]) -> CutGraph:
    """The stages of a graph.

    Args:
        cuts: the nodes before which a further stage begins.
    """
    edges = [0, *cuts, len(graph.nodes)]
    ranges = [range(first, end) for first, end in itertools.pairwise(edges)]
    home = {
        value: n
        for n, nodes in enumerate(ranges)
        for at in nodes
        for value in graph.nodes[at].results
    }
    last = max((n for n, nodes in enumerate(ranges) if nodes), default=0)
    for n, nodes in enumerate(ranges):  # what is returned of a state is what its stage leaves
        for at in nodes:
            for key in graph.nodes[at].inputs:
                if key in graph.states:
                    home[key] = n
    readers: dict[Value, int] = {}
    for n, nodes in enumerate(ranges):
        for at in nodes:
            for value in graph.nodes[at].inputs:
                readers[value] = n
    stage_outputs: list[list[Arg]] = [[] for _ in ranges]
    for value, n in home.items():
        if value not in graph.states and readers.get(value, n) > n:
            stage_outputs[n].append(value)
    outputs: list[tuple[int, int]] = []
    for output in graph.outputs:
        n = last
        if isinstance(output, Value):
            n = home.get(output, last)
        elif isinstance(output, Dim):
            sources = [graph.symbols[symbol].value for symbol in _dims.symbols(output)]
            n = max([home[value] for value in sources if value in home], default=last)
        position = _position(stage_outputs[n], output)
        if position is None:
            position = len(stage_outputs[n])
            stage_outputs[n].append(output)
        outputs.append((n, position))
    stages = tuple(_stage(graph, nodes, outputs) for nodes, outputs in zip(ranges, stage_outputs))
    return CutGraph(graph, stages, tuple(outputs))


def _position(outputs: Sequence[Arg], output: Arg) -> int | None:
    """Where a tensor is among outputs."""
    if not isinstance(output, Value):
        return None
    return next((at for at, each in enumerate(outputs) if each is output), None)


def _stage(graph: Graph, nodes: range, outputs: Sequence[Arg]) -> Stage:
    """The graph of some nodes, with an input for each value and each symbol that they need."""
    inside = [graph.nodes[at] for at in nodes]
    part = make_part(graph, inside, list(values_in(outputs)))
    passed = [
        value
        for value in values_in(outputs)
        if value not in part.inputs
        and value not in part.states
        and not any(value in node.results for node in inside)
    ]
    constants = {
        **part.constants,
        **{v: graph.constants[v] for v in passed if v in graph.constants},
    }
    states = {
        value: first
        for value, first in graph.states.items()
        if value in part.states or value in passed
    }
    inputs: list[Any] = [
        *part.inputs,
        *dict.fromkeys(v for v in passed if v not in constants and v not in states),
    ]
    needed: set[Symbol] = set()
    for node in inside:
        needed |= _symbols(node)
    for value_or_size in (*inputs, *outputs):
        if isinstance(value_or_size, Value):
            needed.update(*map(_dims.symbols, value_or_size.type.dims))
        elif isinstance(value_or_size, Dim):
            needed |= _dims.symbols(value_or_size)
    symbols = dict(part.symbols)
    for symbol in graph.symbols:  # in the order of the whole graph
        if symbol in needed and symbol not in symbols:
            symbols[symbol] = _source(symbol, inputs)
    available = symbols.keys()
    leaves = {leaf for node in inside for inner in _inner(node) for leaf in inner.states}
    leaves.update(states)
    # Names of inputs that no node takes when the shape functions run again.
    named = {
        value: Value(f"input_{at}", value.type)
        for at, value in enumerate(inputs)
        if isinstance(value, Value)
    }

    def rename(arg: Arg) -> Arg:
        return map_values(arg, lambda value: named.get(value, value))

    stage_graph = replace(
        part,
        nodes=tuple(
            replace(node, args=tuple(map(rename, node.args)))
            if not named.keys().isdisjoint(node.inputs)
            else node
            for node in inside
        ),
        inputs=tuple([named[arg] if isinstance(arg, Value) else arg for arg in inputs]),
        outputs=tuple(map(rename, outputs)),
        constants=constants,
        states=states,
        labels={value: label for value, label in graph.labels.items() if value in leaves},
        symbols={
            symbol: replace(source, value=named.get(source.value, source.value))
            if source.value is not None
            else source
            for symbol, source in symbols.items()
        },
        outer=frozenset(),
        checks=tuple(
            (guard, message) for guard, message in graph.checks if guard.symbols <= available
        ),
        constraints=tuple(guard for guard in graph.constraints if guard.symbols <= available),
        ranges={symbol: bounds for symbol, bounds in graph.ranges.items() if symbol in available},
    )
    weight_bytes = sum(read_leaves(graph, inside).values())
    return Stage(stage_graph, tuple(inputs), tuple(outputs), nodes, weight_bytes)


def _source(symbol: Symbol, inputs: list[Any]) -> SymbolSource:
    """Where a stage reads a symbol: from the size of an input, or from an integer input that is
    added."""
    if symbol.is_size:
        for value in inputs:
            for dim, size in enumerate(value.type.dims if isinstance(value, Value) else ()):
                if isinstance(size, Dim) and size.terms == Dim.of(symbol).terms:
                    return SymbolSource(value, dim)
    inputs.append(Dim.of(symbol))
    return SymbolSource(None, None, len(inputs) - 1)


def _symbols(node: Node) -> set[Symbol]:
    """The symbols that a node needs, for its arguments and for the types of its results."""
    symbols: set[Symbol] = set()

    def visit(arg: Arg) -> None:
        if isinstance(arg, Dim):
            symbols.update(_dims.symbols(arg))
        elif isinstance(arg, Graph):
            symbols.update(arg.outer)
        elif isinstance(arg, tuple):
            for item in arg:
                visit(item)

    for arg in node.args:
        visit(arg)
    for value in (*node.inputs, *node.results):
        for size in value.type.dims:
            symbols |= _dims.symbols(size)
    return symbols

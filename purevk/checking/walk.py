"""Runs the graph of a front end node by node, each node by itself on the device, and compares each
with eager torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from purevk import generators
from purevk.checking.differences import Difference, find_difference
from purevk.checking.parts import PartProgram, States, make_part
from purevk.checking.reference import Reference, Unchecked
from purevk.errors import PurevkError
from purevk.graph.context import Context
from purevk.graph.unbacked import Replan
from purevk.ir import Arg, Dim, Graph, Node, Symbol, Value, values_in
from purevk.ir import dims as _dims
from purevk.ir.binding import bind_symbols, input_symbols
from purevk.ops import registry

_KEPT = 64  # programs of nodes in loops, kept for the next iteration


@dataclass(eq=False)
class Found(Exception):
    """The first node that differs.

    Attributes:
        graph: that of the node; number: the node's number in it.
        part: the node alone; arrays, states, env: what it was run with.
        inputs: the elements of what the node reads.
        expected, got: its results, and the states that it writes.
        values: what these are, in the same order.
    """

    graph: Graph
    number: int
    node: Node
    part: Graph
    arrays: Mapping[Value, np.ndarray]
    states: States
    env: Mapping[Symbol, int]
    inputs: Mapping[Value, np.ndarray]
    values: tuple[Value, ...]
    expected: Sequence[np.ndarray]
    got: Sequence[np.ndarray | None]
    difference: Difference


@dataclass
class Counts:
    """What a walk compared.

    Attributes:
        checked: how many nodes agree, each iteration of a loop counted.
        unchecked: operators that were not compared, with the reasons.
        random: whether one of them gives random or uninitialized results.
    """

    checked: int = 0
    unchecked: dict[str, str] = field(default_factory=dict)
    random: bool = False


@dataclass
class Trail:
    """What a walk met on the way, in the outermost graph.

    Attributes:
        values: the elements of each value. states: those before each node, and at the end.
        env: values of symbols.
        views: for each value that is a view of a state, the views from the state to it.
    """

    values: dict[Value, np.ndarray] = field(default_factory=dict)
    states: list[States] = field(default_factory=list)
    env: dict[Symbol, int] = field(default_factory=dict)
    views: dict[Value, tuple[Node, ...]] = field(default_factory=dict)


class Walk:
    """A run of a graph, one node after the other.

    Args:
        context: the device.
        graph: as the front end made it.
        states: bytes of all states. The walk keeps them up to date.
        eager: pass on the results of eager torch, and compare nothing. Nodes without a reference
            run on the device.
        trail: where to keep what the walk meets; None: nothing is kept longer than it is read.

    Attributes:
        progress: called with how many nodes of the graph have run, and how many there are.
    """

    def __init__(
        self,
        context: Context,
        graph: Graph,
        states: States,
        eager: bool = False,
        trail: Trail | None = None,
    ) -> None:
        self._context, self._graph, self._eager, self._trail = context, graph, eager, trail
        self._reference = Reference(graph, context.traits)
        self.states, self.counts = states, Counts()
        self.progress: Callable[[int, int], None] = lambda done, total: None
        self._pipelines: dict[Any, None] = {}
        self._kept: dict[Node, PartProgram] = {}

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the graph; returns its outputs: arrays, integers or None.

        Args:
            inputs: arrays, integers or None, one for each input of the graph.

        Raises:
            Found: a node differs from eager torch.
        """
        env = bind_symbols(input_symbols(self._graph), inputs)
        try:
            return self._graph_run(self._graph, inputs, env)
        finally:
            for program in self._kept.values():
                program.close()
            self._kept.clear()

    def _graph_run(self, graph: Graph, inputs: Sequence[Any], env: dict[Symbol, int]) -> list[Any]:
        values: dict[Value, np.ndarray] = {
            value: array for value, array in zip(graph.inputs, inputs) if isinstance(value, Value)
        }
        scope = _Scope(graph, values, env)
        trail = self._trail if graph is self._graph else None
        self._bind(scope, (*graph.constants, *graph.states))
        for number, node in enumerate(graph.nodes):
            if graph is self._graph:
                self.progress(number, len(graph.nodes))
            if trail is not None:
                trail.states.append(dict(self.states))
            if registry.is_control(node):
                self._control(scope, node)
            else:
                self._node(scope, number, node)
            self._bind(scope, node.results)
            if trail is None:
                for value in scope.last_reads[number]:
                    values.pop(value, None)
        if trail is not None:
            trail.states.append(dict(self.states))
            trail.values.update(values)
            trail.env.update(env)
            trail.views.update(scope.views)
        return [self._output(scope, output) for output in graph.outputs]

    def _bind(self, scope: _Scope, values: Sequence[Value]) -> None:
        """Reads the unbacked symbols that some values give."""
        if scope.sources:
            for value in values:
                for symbol, source in scope.sources.get(value, ()):
                    scope.env[symbol] = source.read(self._array(scope, value))

    def _array(self, scope: _Scope, value: Value) -> np.ndarray:
        if value in scope.values:
            return scope.values[value]
        graph = scope.graph
        if value in graph.constants:
            return graph.constants[value].array(value.type)
        if value in self.states:
            return np.frombuffer(self.states[value], value.type.dtype.numpy).reshape(
                tuple(map(_dims.specialize, value.type.dims))
            )
        array = self._chain(scope, scope.views[value])
        return array[value]

    def _chain(self, scope: _Scope, views: Sequence[Node]) -> dict[Value, np.ndarray]:
        """The elements of views of a state, as it is now."""
        arrays = dict(scope.values)
        for node in views:
            arrays_ = {
                operand: arrays[operand] if operand in arrays else self._array(scope, operand)
                for operand in node.inputs
            }
            results, _ = self._reference.results(node, arrays_, scope.env)
            arrays.update(zip(node.results, results))
        return arrays

    def _output(self, scope: _Scope, output: Arg) -> Any:
        if isinstance(output, Value):
            return self._array(scope, output)
        return _dims.evaluate(output, scope.env) if isinstance(output, Dim) else output

    # -- one node ----------------------------------------------------------------------------------
    def _node(self, scope: _Scope, number: int, node: Node) -> None:
        written = registry.mutated(node)
        results = tuple(value for value in node.results if value in scope.read)
        if not results and not written:
            return
        if _of_state(scope, node, self.states):
            base = node.inputs[0]
            scope.views[node.result] = (*scope.views.get(base, ()), node)
        views = tuple(
            dict.fromkeys(view for value in node.inputs for view in scope.views.get(value, ()))
        )
        arrays = {value: self._array(scope, value) for value in node.inputs}
        expected: list[np.ndarray] | None = None
        changed: dict[Value, np.ndarray] = {}
        reason = "it writes a view of a state" if set(written) - set(self.states) else ""
        try:
            if reason:
                raise Unchecked(reason)
            expected, changed = self._reference.results(node, arrays, scope.env)
        except Unchecked as error:
            self._not_checked(node, str(error))
        if self._eager and expected is not None:
            self._keep(scope, node, dict(zip(node.results, expected)))
            for value, array in changed.items():
                self.states[value] = np.ascontiguousarray(array).tobytes()
            return
        part = make_part(scope.graph, (*views, node), results)
        inputs = {
            value: self._array(scope, value) for value in part.inputs if isinstance(value, Value)
        }
        before = dict(self.states)
        try:
            made, after = self._on_device(part, inputs, scope)
        except Replan as error:
            raise PurevkError(
                f"{node.op} cannot be run by itself",
                where=node.source,
                why=f"its data-dependent sizes are not those of the program: {error}",
                next="unset PUREVK_CHECK for this call",
            ) from None
        self.states.update(after)
        got = dict(zip(results, made))
        if expected is not None and not self._eager:
            self._compare(scope, number, node, part, inputs, before, arrays, got, expected, changed)
        self._keep(scope, node, got)

    def _keep(self, scope: _Scope, node: Node, results: Mapping[Value, np.ndarray]) -> None:
        if not any(value in scope.views for value in node.results):
            scope.values.update(results)

    def _not_checked(self, node: Node, reason: str) -> None:
        counts = self.counts
        counts.unchecked.setdefault(node.op, reason)
        counts.random = counts.random or "random" in reason or "uninitialized" in reason

    def _on_device(
        self, part: Graph, arrays: Mapping[Value, np.ndarray], scope: _Scope
    ) -> tuple[list[Any], States]:
        node = part.nodes[-1]
        program = self._kept.pop(node, None)
        if program is not None and not program.serves(scope.env):
            program.close()
            program = None
        if program is None:
            program = PartProgram(self._context, part, scope.env)
            self._pipelines.update(dict.fromkeys(program.pipelines))
        numbers = program.executable.generators
        drawn = generators.states(numbers) if numbers else []
        try:
            return program.run(arrays, self.states, dict(scope.env))
        finally:
            generators.restore(drawn)
            if scope.graph is self._graph:
                program.close()
            else:
                self._kept[node] = program
                if len(self._kept) > _KEPT:
                    self._kept.pop(next(iter(self._kept))).close()

    def _compare(
        self,
        scope: _Scope,
        number: int,
        node: Node,
        part: Graph,
        inputs: Mapping[Value, np.ndarray],
        before: States,
        arrays: Mapping[Value, np.ndarray],
        got: Mapping[Value, np.ndarray],
        expected: Sequence[np.ndarray],
        changed: Mapping[Value, np.ndarray],
    ) -> None:
        results = [got.get(value) for value in node.results]
        differences = self._reference.differences(node, arrays, scope.env, results, expected)
        values = (*node.results, *changed)
        whole = [*expected, *changed.values()]
        after = [*results, *(self._array(scope, value) for value in changed)]
        for at, value in enumerate(changed, len(node.results)):
            have = after[at]
            assert have is not None  # a state
            difference = find_difference(at, have, whole[at], value.type.dtype)
            differences += [] if difference is None else [difference]
        if differences:
            raise Found(
                scope.graph,
                number,
                node,
                part,
                inputs,
                before,
                dict(scope.env),
                arrays,
                values,
                whole,
                after,
                differences[0],
            )
        self.counts.checked += 1

    # -- control flow ------------------------------------------------------------------------------
    def _control(self, scope: _Scope, node: Node) -> None:
        read: Callable[[Arg], Any] = lambda arg: (  # noqa: E731
            self._array(scope, arg) if isinstance(arg, Value) else self._output(scope, arg)
        )
        graphs = node.graphs

        def call(at: int, args: Sequence[Any]) -> list[Any]:
            inner = graphs[at]
            inputs = [
                arg if isinstance(value, Value) else int(arg)
                for value, arg in zip(inner.inputs, args)
            ]
            inputs = [
                np.asarray(arg, value.type.dtype.numpy) if isinstance(value, Value) else arg
                for value, arg in zip(inner.inputs, inputs)
            ]
            env = {**scope.env, **bind_symbols(input_symbols(inner), inputs)}
            return [np.asarray(result) for result in self._graph_run(inner, inputs, env)]

        args: Callable[[str], list[Any]] = lambda name: [  # noqa: E731
            read(arg) for arg in node.arg_list(name)
        ]
        if node.op == "purevk.cond":
            chosen = bool(np.all(read(node.arg("predicate"))))
            results = call(
                0 if chosen else 1, args("true_operands" if chosen else "false_operands")
            )
        elif node.op == "purevk.while":
            results = args("carried")
            while np.all(call(0, [*results, *args("condition_operands")])[0]):
                results = call(1, [*results, *args("body_operands")])
        else:
            results = self._scan(scope, node, args, call)
        scope.values.update(
            (value, np.asarray(array, value.type.dtype.numpy))
            for value, array in zip(node.results, results)
        )

    def _scan(
        self,
        scope: _Scope,
        node: Node,
        args: Callable[[str], list[Any]],
        call: Callable[[int, Sequence[Any]], list[Any]],
    ) -> list[Any]:
        carried, scanned = args("carried"), args("scanned")
        count, rows = len(carried), []
        for index in range(_dims.evaluate(node.size("length"), scope.env)):
            results = call(0, [*carried, *(tensor[index] for tensor in scanned), *args("operands")])
            carried = results[:count]
            rows.append(results[count:])
        stacked = [np.stack(column) for column in zip(*rows)]
        if not rows:
            stacked = [
                np.empty(
                    tuple(_dims.evaluate(size, scope.env) for size in value.type.dims),
                    value.type.dtype.numpy,
                )
                for value in node.results[count:]
            ]
        return [*carried, *stacked]


class _Scope:
    """A graph that is being run.

    Attributes:
        values: elements so far. env: values of symbols so far.
        read: values that somebody reads.
        last_reads: for each node, what nobody reads after it.
        sources: unbacked symbols, by the values that give them.
        views: for each value that is a view of a state, the views from the state to it.
    """

    def __init__(
        self, graph: Graph, values: dict[Value, np.ndarray], env: dict[Symbol, int]
    ) -> None:
        self.graph, self.values, self.env = graph, values, env
        self.sources: dict[Value, list[tuple[Symbol, Any]]] = {}
        for symbol, source in graph.unbacked.items():
            if source.value is not None:
                self.sources.setdefault(source.value, []).append((symbol, source))
        self.views: dict[Value, tuple[Node, ...]] = {}
        needed = {*values_in(graph.outputs), *self.sources}
        last: dict[Value, int] = {}
        for number, node in enumerate(graph.nodes):
            last.update(dict.fromkeys(node.inputs, number))
        self.read = needed | set(last)
        self.last_reads: list[list[Value]] = [[] for _ in graph.nodes]
        for value, number in last.items():
            if value not in needed:
                self.last_reads[number].append(value)


def _of_state(scope: _Scope, node: Node, states: Mapping[Value, bytes]) -> bool:
    """Whether a node is a view of a state, or of a view of one."""
    return (
        registry.is_view(node)
        and len(node.results) == 1
        and any(value in states or value in scope.views for value in node.inputs[:1])
    )

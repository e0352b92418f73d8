"""Parts of a graph that run on the device by themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from purevk.closing import Closing
from purevk.graph.call import Call
from purevk.graph.context import Context
from purevk.graph.executable import Executable
from purevk.graph.memory import DeviceStore
from purevk.ir import Arg, Dim, Graph, GuardLog, Node, Size, Symbol, Value, map_values
from purevk.ir import dims as _dims
from purevk.passes.pipeline import optimize
from purevk.schedule.planning import make_plan

States = dict[Value, bytes]


def make_part(graph: Graph, nodes: Sequence[Node], outputs: Iterable[Value]) -> Graph:
    """The graph of some nodes of a graph.

    Args:
        nodes: in order.
        outputs: values that they make.

    Returns:
        A graph whose inputs are what the nodes read and others make. It keeps constants, and the
        states that the nodes use. Symbols whose values the nodes do not give are `outer` ones.
    """
    results = {value for node in nodes for value in node.results}
    reads = dict.fromkeys(value for node in nodes for value in node.inputs if value not in results)
    inner = [inner_graph for node in nodes for sub in node.graphs for inner_graph in sub.nested()]
    leaves = {
        leaf for inner_graph in inner for leaf in (*inner_graph.constants, *inner_graph.states)
    } | set(reads)
    symbols = {
        symbol: source for symbol, source in graph.symbols.items() if source.value in results
    }
    return Graph(
        name=graph.name,
        inputs=tuple(v for v in reads if v not in graph.constants and v not in graph.states),
        nodes=tuple(nodes),
        outputs=tuple(outputs),
        constants={v: data for v, data in graph.constants.items() if v in leaves},
        states={v: None for v in graph.states if v in leaves},
        symbols=symbols,
        outer=(graph.outer | frozenset(graph.symbols)) - frozenset(symbols),
        trusted=graph.trusted,
    )


def at_sizes(
    graph: Graph, env: Mapping[Symbol, int], values: Mapping[Value, Value] | None = None
) -> tuple[Graph, dict[Value, Value]]:
    """A part in which the symbols of `env` have their values, and the new value for each of its
    values. `values` has those of the graph around it."""
    own = {symbol for symbol in env if symbol not in graph.symbols}
    sizes: Mapping[Symbol, Size] = {symbol: env[symbol] for symbol in own}
    swapped: dict[Value, Value] = dict(values or {})

    def swap(value: Value) -> Value:
        if value not in swapped:
            dims = tuple(_dims.substitute(size, sizes) for size in value.type.dims)
            swapped[value] = (
                value if dims == value.type.dims else Value(value.name, value.type.with_dims(dims))
            )
        return swapped[value]

    def arg_at(arg: Arg) -> Arg:
        if isinstance(arg, Dim):
            return _dims.substitute(arg, sizes)
        if isinstance(arg, Graph):
            return at_sizes(arg, {symbol: env[symbol] for symbol in own}, swapped)[0]
        if isinstance(arg, tuple):
            return tuple(arg_at(item) for item in arg)
        return map_values(arg, swap)

    nodes = [
        replace(
            node,
            args=tuple(arg_at(arg) for arg in node.args),
            results=tuple(swap(value) for value in node.results),
        )
        for node in graph.nodes
    ]
    part = graph.with_nodes(
        nodes,
        inputs=tuple(
            swap(operand) if isinstance(operand, Value) else operand for operand in graph.inputs
        ),
        outputs=tuple(arg_at(output) for output in graph.outputs),
        symbols={
            symbol: source if source.value is None else replace(source, value=swap(source.value))
            for symbol, source in graph.symbols.items()
        },
        outer=graph.outer - own,
    )
    return part, swapped


class PartProgram(Closing):
    """A part of a graph, lowered for a device. A context manager.

    Args:
        context: the device.
        part: from `make_part`.
        env: values of its outer symbols. If a guard of the lowering does not hold for them, the part
            is lowered again for these sizes alone.
        skip: names of optional passes not to run; None reads PUREVK_SKIP_PASSES.
    """

    def __init__(
        self,
        context: Context,
        part: Graph,
        env: Mapping[Symbol, int],
        skip: Collection[str] | None = None,
    ) -> None:
        self.part = part
        self._values: Mapping[Value, Value] = {}
        self._fixed: dict[Symbol, int] | None = None
        with GuardLog() as log:
            graph = optimize(part, context.traits, skip, dump=False)
            plan = make_plan(graph, context.traits)
        if not all(guard.holds(env) for guard in log.guards if guard.symbols <= env.keys()):
            fixed, self._values = at_sizes(part, env)
            self._fixed = dict(env)
            with GuardLog() as log:
                graph = optimize(fixed, context.traits, skip, dump=False)
                plan = make_plan(graph, context.traits)
        device = context.device
        self._weights, self._states = DeviceStore(device, "weights"), DeviceStore(device, "state")
        try:
            self.executable = Executable(context, plan, self._weights, self._states)
        except BaseException:
            self._weights.close()
            self._states.close()
            raise
        self._guards = tuple(log.guards)
        self.executable.watch(self._guards)
        # What keeps the pipelines alive for parts with the same kernels.
        self.pipelines = context.kernels.prepare(plan.kernels)

    def serves(self, env: Mapping[Symbol, int]) -> bool:
        """Whether the lowering holds for these values of the outer symbols."""
        if self._fixed is not None:
            return self._fixed == env
        return all(guard.holds(env) for guard in self._guards if guard.symbols <= env.keys())

    def run(
        self, arrays: Mapping[Value, np.ndarray], states: States, env: dict[Symbol, int]
    ) -> tuple[list[Any], States]:
        """Runs the part.

        Args:
            arrays: by the values of the part's inputs.
            states: bytes of the states, at least of those that the part uses.
            env: values of symbols. Unbacked ones that the part gives are added.

        Returns:
            The outputs, and the bytes of the states that the part uses, afterwards.

        Raises:
            Replan: see `Executable.run`.
        """
        values = self._values
        used = [value for value in self._states.ranges if isinstance(value, Value)]
        old = {values.get(value, value): value for value in self.part.states}
        self._states.upload([(value, memoryview(states[old[value]])) for value in used])
        arrays_ = {
            values.get(value, value): arrays[value]
            for value in self.part.inputs
            if isinstance(value, Value)
        }
        outputs = self.executable.run(Call(arrays_, env))
        after = {
            old[value]: self._states.read(value, max(value.type.nbytes, 4))[: value.type.nbytes]
            for value in used
        }
        return outputs, after

    def close(self) -> None:
        """Releases its memory."""
        self.executable.close()
        self._weights.close()
        self._states.close()

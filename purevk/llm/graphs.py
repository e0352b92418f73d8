"""Builds graphs of purevk's own operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from purevk.dtypes import DType
from purevk.ir import (
    Arg,
    Constant,
    Dim,
    Graph,
    Input,
    Label,
    Size,
    Symbol,
    SymbolSource,
    TensorType,
    Value,
)
from purevk.ops.builder import Builder, NameSource
from purevk.tuning import DeviceTraits


class GraphBuilder(Builder):
    """A graph in the making, with the name of its method. Names of values begin with a prefix."""

    def __init__(self, name: str, prefix: str = "") -> None:
        names = NameSource(prefix)
        super().__init__(Graph(name, (), (), ()), DeviceTraits(frozenset()), names=names)
        self._inputs: list[Value] = []
        self._constants: dict[Value, Constant] = {}
        self._states: dict[Value, Constant | None] = {}
        self._labels: dict[Value, Label] = {}
        self._symbols: dict[Symbol, SymbolSource] = {}

    def input(self, dtype: DType, dims: Sequence[int], most: int = 0, least: int = 1) -> Value:
        """An input; `most`: its last size may be anything from `least` up to this."""
        sizes: list[Size] = list(dims)
        if most:
            symbol = Symbol(f"s{len(self._symbols)}", most, lower=least)
            sizes[-1] = Dim.of(symbol)
        value = Value(f"input_{len(self._inputs)}", TensorType(dtype, tuple(sizes)))
        if most:
            self._symbols[symbol] = SymbolSource(value, len(sizes) - 1)
        self._inputs.append(value)
        return value

    def state(self, type: TensorType, first: Constant | None = None, name: str = "") -> Value:
        """A value that lives on the device between calls; methods share states of one name."""
        value = Value(name or self.names.fresh("state"), type)
        self._states[value] = first
        self._labels[value] = Label(value.name, value.name)
        return value

    def constant(self, array: np.ndarray, dtype: DType) -> Value:
        value = Value(self.names.fresh("const"), TensorType(dtype, array.shape))
        self._constants[value] = Constant.of(np.ascontiguousarray(array, dtype.numpy))
        return value

    def bind_symbol(self, size: Size, count: Value) -> None:
        raise NotImplementedError("graphs of language models have no unbacked symbols")

    def op(self, name: str, *args: Arg) -> Value:
        """The result of an operator of aten; "add.Tensor"."""
        return self.emit(f"aten.{name}", *args)

    def store(self, state: Value, value: Value) -> None:
        """Has a state be this value after the call."""
        self.purevk.store.all(state, value)

    def finish(self, *outputs: Value) -> Graph:
        """The graph."""
        return Graph(
            self.graph.name,
            tuple(self._inputs),
            tuple(self.nodes),
            outputs,
            self._constants,
            self._states,
            self._symbols,
            labels=self._labels,
            shares_weights=True,
        )

    def finish_around(
        self, graph: Graph, before: int, inputs: Sequence[Input], *outputs: Value
    ) -> Graph:
        """A graph with these nodes around its own: the first `before` of them before those."""
        return replace(
            graph,
            name=self.graph.name,
            inputs=tuple(inputs),
            nodes=(*self.nodes[:before], *graph.nodes, *self.nodes[before:]),
            outputs=outputs,
            constants={**graph.constants, **self._constants},
            states={**graph.states, **self._states},
            labels={**graph.labels, **self._labels},
            signature=None,
            shares_weights=True,
        )


def types_of(values: Iterable[object]) -> str:
    """The types of values, for messages."""
    return ", ".join(str(getattr(value, "type", value)) for value in values) or "nothing"

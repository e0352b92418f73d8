"""Specializes a saved graph for other input sizes: runs the operators' shape functions again."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from purevk.errors import FileFormatError, GraphError, SizeConstraintError
from purevk.frontends.bounds import settled
from purevk.frontends.importer import Importer, InputSizes
from purevk.frontends.result_types import OpenType
from purevk.ir import (
    Arg,
    Bound,
    Dim,
    FixedInput,
    Graph,
    Guard,
    GuardLog,
    Node,
    Size,
    Symbol,
    SymbolSource,
    TensorType,
    Value,
    map_values,
)
from purevk.ir import dims as _dims
from purevk.ir import guards as _guards
from purevk.ir.expected import expected, planned_sizes
from purevk.ops import registry


class ReadGraph:
    """A graph that a front end has read, for its own bounds and for the sizes of calls.

    Attributes:
        graph: as it was read.
        guards: what was decided from sizes while it was read.
        examples: the sizes of the example inputs, by symbols.
    """

    def __init__(
        self,
        graph: Graph,
        guards: Sequence[Guard],
        where: str,
        kept: Sequence[Guard] | None = None,
        examples: Mapping[str, int] | None = None,
    ) -> None:
        self.graph, self.guards, self._where = graph, tuple(guards), where
        self.examples = dict(examples or {})
        if kept is not None:
            self.kept = tuple(kept)

    @functools.cached_property
    def kept(self) -> tuple[Guard, ...]:
        """Of the guards those that running the shape functions again does not repeat."""
        with GuardLog() as again:
            respecialize(self.graph, None, self._where)
        return tuple(guard for guard in self.guards if guard not in again.guards)

    def __call__(self, sizes: InputSizes | None) -> Graph:
        """The graph for sizes of its inputs; see `respecialize`."""
        for planned in [] if sizes is not None else self._planned():
            with GuardLog() as log:
                try:
                    graph = respecialize(self.graph, planned, self._where, self.kept)
                except (FileFormatError, GraphError, SizeConstraintError):
                    continue  # what was decided for the bounds in the file does not hold for these
            for guard in log.guards:  # without those of other attempts
                _guards.note(guard)
            return graph
        if sizes is None and not any(expected(symbol.name) for symbol in self.graph.symbols):
            for guard in self.guards:
                _guards.ask(guard)
            return self.graph
        return respecialize(self.graph, sizes, self._where, self.kept)

    def _planned(self) -> Iterator[InputSizes]:
        """Bounds to plan memory for, of inputs whose sizes have none."""
        tensors = [value for value in self.graph.inputs if isinstance(value, Value)]
        examples = {
            symbol: max(min(self.examples[symbol.name], symbol.upper), 1)
            for symbol, source in self.graph.symbols.items()
            if symbol.name in self.examples
            and not symbol.unbacked
            and (source.value is None or source.value in tensors)
            and self.graph.ranges.get(symbol, (0, 0))[1] is None
        }

        def bounds(sizes: Mapping[Symbol, int], dims: Sequence[Size]) -> tuple[int, ...]:
            within = {symbol: (min(symbol.lower, size), size) for symbol, size in sizes.items()}
            return tuple(_dims.range_within(size, within)[1] for size in dims)

        def nbytes(sizes: Mapping[Symbol, int]) -> list[int]:
            return [
                value.type.dtype.itemsize * math.prod(bounds(sizes, value.type.dims))
                for value in tensors
            ]

        for sizes in planned_sizes(examples, nbytes):
            if all(size == symbol.upper for symbol, size in sizes.items()):
                return  # those of the graph
            planned: list[tuple[int | Bound, ...] | None] = []
            for value in self.graph.inputs:
                dims = value.type.dims if isinstance(value, Value) else (value,)
                known = [size for size in dims if isinstance(size, (int, Dim))]
                uppers = zip(known, bounds(sizes, known))
                planned.append(
                    tuple(n if isinstance(size, int) else Bound(n) for size, n in uppers) or None
                )
            yield planned


def respecialize(
    graph: Graph,
    sizes: InputSizes | None,
    where: str,
    guards: Sequence[Guard] = (),
) -> Graph:
    """Runs the operators' shape functions again.

    Args:
        graph: as a front end made it.
        sizes: of the inputs, by position: integers, or other bounds of those that stay dynamic;
            None: the graph's own.
        where: the program, for messages.
        kept: what the front end decided from sizes. It must hold for the new sizes too.

    Raises:
        FileFormatError: a guard of `guards` does not hold, or an operator does not take the sizes.
    """
    return settled(lambda: _Respecializer(graph, sizes, where).run(guards))


class _Respecializer:
    """Walks a graph and passes its nodes to an importer.

    Attributes:
        values: the new value for each value of the graph.
        symbols: what each symbol of the graph is now.
        moved: the new symbols of the inputs' sizes, by dim.
        sources: the symbols that are read from each value of the graph.
    """

    def __init__(self, graph: Graph, sizes: InputSizes | None, where: str) -> None:
        self.graph, self.sizes = graph, sizes
        self.importer = Importer(graph.name, where, sizes)
        self.values: dict[Value, Value] = {}
        self.symbols: dict[Symbol, Size] = {}
        self.moved: dict[Value, dict[int, Symbol]] = {}
        self.sources: dict[Value, list[tuple[Symbol, SymbolSource]]] = {}
        for inner in graph.nested():
            for symbol, source in inner.symbols.items():
                if source.value is not None:
                    self.sources.setdefault(source.value, []).append((symbol, source))
                elif inner is graph:
                    self.importer.symbols[symbol] = source

    def run(self, guards: Sequence[Guard]) -> Graph:
        for position, value in enumerate(self.graph.inputs):
            if isinstance(value, (Value, Dim)):
                self._find_symbols(position, value)
        for position, value in enumerate(self.graph.inputs):
            self.importer.inputs.append(self._input(position, value))
        for value, constant in self.graph.constants.items():
            self._define(value, self.importer.constant(constant, value.type, path_of(value)))
        for value, first in self.graph.states.items():
            label = self.graph.labels.get(value)
            self._define(value, self.importer.state(first, value.type, label))
        for guard in guards:
            self._keep(guard)
        for guard in self.graph.constraints:
            self.importer.constrain(self._guard(guard))
        self.importer.signature = self.graph.signature
        for symbol, bounds in self.graph.ranges.items():
            for now in _dims.symbols(_dims.substitute(Dim.of(symbol), self.symbols)):
                self.importer.ranges[now] = bounds
        for node in self.graph.nodes:
            self._node(node)
        for guard, message in self.graph.checks:
            self.importer.check(self._arg(guard.left), guard.op, self._arg(guard.right), message)
        graph = self.importer.finish(
            [self._arg(output) for output in self.graph.outputs], self.graph.updates
        )
        return replace(graph, lines=self.graph.lines)

    # -- leaves -----------------------------------------------------------------------------------
    def _find_symbols(self, position: int, value: Value | Dim) -> None:
        """Finds what the symbols of an input's sizes, or of an integer input, are now."""
        sizes = None if self.sizes is None else self.sizes[position]
        if isinstance(value, Dim):
            own = dict.fromkeys([0], next(iter(_dims.symbols(value))))
        else:
            own = {
                source.dim: symbol
                for symbol, source in self.sources.get(value, [])
                if source.dim is not None
            }
        for dim, symbol in own.items():
            size = None if sizes is None else sizes[dim]
            if isinstance(size, int):
                self.symbols[symbol] = size
                if isinstance(value, Dim):
                    self.importer.symbols.pop(symbol, None)
                continue
            upper = symbol.upper
            if size is not None and size.upper is not None:
                upper = size.upper
            moved = replace(symbol, upper=upper, lower=min(symbol.lower, upper))
            self.symbols[symbol] = Dim.of(moved)
            if isinstance(value, Dim):
                self.importer.symbols[moved] = self.importer.symbols.pop(symbol)
            else:
                self.moved.setdefault(value, {})[dim] = moved

    def _input(self, position: int, value: Value | Dim | FixedInput | None) -> Any:
        if isinstance(value, Dim):
            now = _dims.substitute(value, self.symbols)
            return FixedInput(now) if isinstance(now, int) else now
        if not isinstance(value, Value):
            return value
        input_sizes = None if self.sizes is None else self.sizes[position]
        sizes: list[Size] = []
        for dim, size in enumerate(value.type.dims):
            dim_size = None if input_sizes is None else input_sizes[dim]
            if isinstance(dim_size, int):
                sizes.append(dim_size)
            else:
                sizes.append(_dims.substitute(size, self.symbols))
        new_value = Value(value.name, TensorType(value.type.dtype, tuple(sizes)))
        for dim, symbol in self.moved.get(value, {}).items():
            self.importer.symbols[symbol] = SymbolSource(new_value, dim)
        self.values[value] = new_value
        self._elements(value, new_value)
        return new_value

    def _define(self, value: Value, new_value: Value) -> None:
        self.values[value] = new_value
        self._elements(value, new_value)

    def _elements(self, value: Value, new_value: Value) -> None:
        for symbol, source in self.sources.get(value, []):
            if source.dim is None:
                bounds, new = expected(symbol.name), symbol
                if bounds is not None:
                    new = replace(symbol, upper=bounds.upper, open=bounds.open)
                    if bounds.lower is not None:
                        new = replace(new, lower=bounds.lower, open_below=True)
                self.symbols[symbol] = Dim.of(new)
                self.importer.symbols[new] = SymbolSource(new_value, None, source.element)

    def _guard(self, guard: Guard) -> Guard:
        """The guard over the symbols of the graph in the making."""
        return Guard(
            _dims.substitute(guard.left, self.symbols),
            guard.op,
            _dims.substitute(guard.right, self.symbols),
            guard.answer,
        )

    def _keep(self, guard: Guard) -> None:
        now = self._guard(guard)
        if not _guards.ask(now):
            raise FileFormatError(
                "the graph does not hold for these sizes",
                where=f"{self.importer.where}, method {self.graph.name}",
                why=f"it was made for {guard}",
                next="make the program again from the module or file that it came from",
            )

    # -- nodes ------------------------------------------------------------------------------------
    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, Dim):
            return _dims.substitute(arg, self.symbols)
        if isinstance(arg, tuple):
            return tuple(self._arg(item) for item in arg)
        if isinstance(arg, Graph):
            return self._sub_graph(arg)
        return map_values(arg, self.values.__getitem__)

    def _sub_graph(self, graph: Graph) -> Graph:
        outer = self.importer
        self.importer = outer.sub_graph(graph.name.removeprefix(f"{outer.name}."))
        try:
            for symbol, source in graph.symbols.items():
                if source.value is None:
                    self.importer.symbols[symbol] = source
            for value in graph.inputs:
                if isinstance(value, Value):
                    self._define(value, self.importer.sub_input(self._type(value.type)))
                else:
                    self.importer.inputs.append(value)
            for node in graph.nodes:
                self._node(node)
            for guard, message in graph.checks:
                now = self._guard(guard)
                if guard.symbols <= graph.outer:
                    self.importer.check_at_entry(now, message)
                else:
                    self.importer.check(now.left, now.op, now.right, message)
            return self.importer.finish_sub_graph([self._arg(output) for output in graph.outputs])
        finally:
            self.importer = outer

    def _node(self, node: Node) -> None:
        args = tuple(self._arg(arg) for arg in node.args)
        definition = registry.find(node.op)
        data_dependent = [
            {
                source.dim: symbol
                for symbol, source in self.sources.get(value, [])
                if source.dim is not None
            }
            for value in node.results
        ]
        if any(data_dependent):
            results = self._data_dependent(node, args, data_dependent, definition is not None)
        elif definition is not None and definition.form is not None:
            types = [self._type(value.type) for value in node.results]
            recorded = [type.with_dims([_dims.upper(size) for size in type.dims]) for type in types]
            results = self.importer.emit(
                node.alias or node.op, args, recorded, [True] * len(recorded), node.source
            )
        else:
            results = tuple(
                Value(self.importer.fresh_name(node.op), self._type(value.type))
                for value in node.results
            )
            self.importer.nodes.append(Node(node.op, args, results, node.source, node.alias))
        for value, new in zip(node.results, results):
            self._define(value, new)

    def _data_dependent(
        self,
        node: Node,
        args: tuple[Arg, ...],
        symbols: Sequence[dict[int, Symbol]],
        is_defined: bool,
    ) -> tuple[Value, ...]:
        """A node whose results have data-dependent sizes. Their bounds follow from the inputs, or
        stay as they were.

        Args:
            symbols: for each result, its data-dependent sizes by dim.
            is_defined: the operator has a definition here.
        """
        own = {symbol for dims in symbols for symbol in dims.values()}
        recorded = []
        for value in node.results:
            sizes: list[Size | Bound] = []
            for size in value.type.dims:
                mine = _dims.symbols(size) & own
                upper = None if self.sizes is not None and is_defined else _dims.upper(size)
                open = any(symbol.open for symbol in mine)
                sizes.append(Bound(None if open else upper) if mine else self._arg(size))
            recorded.append(OpenType(value.type.dtype, tuple(sizes)))
        self.importer.types.names = [
            symbol.name for dims in symbols for _, symbol in sorted(dims.items())
        ]
        results = self.importer.emit(
            node.alias or node.op, args, recorded, [False] * len(recorded), node.source, exact=True
        )
        self.importer.types.names = []
        for dims, new in zip(symbols, results):
            for dim, symbol in dims.items():
                self.symbols[symbol] = new.type.dims[dim]
        return results

    def _type(self, type: TensorType) -> TensorType:
        return type.with_dims([_dims.substitute(size, self.symbols) for size in type.dims])


def path_of(value: Value) -> str:
    """The path of a constant that is named after one; "" for others."""
    return value.name if "." in value.name else ""

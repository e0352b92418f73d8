"""Collects the nodes of a method while a front end reads it."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from purevk.dtypes import DType
from purevk.errors import FileFormatError, GraphError, InputError, SizeConstraintError
from purevk.frontends.bounds import SizeBounds, position_limits
from purevk.frontends.operator_arguments import (
    check_schema,
    complete,
    takes_number,
    with_relations,
)
from purevk.frontends.result_types import Recorded, ResultTypes, fixed_sizes
from purevk.ir import (
    Arg,
    Bound,
    Constant,
    Dim,
    FixedInput,
    Graph,
    Guard,
    Label,
    Node,
    Relation,
    Signature,
    Size,
    Symbol,
    SymbolSource,
    TensorType,
    Value,
    dims_in,
    values_in,
)
from purevk.ir import dims as _dims
from purevk.ir.equalities import Equalities
from purevk.ir.expected import Expected, expected
from purevk.ir.host import HOST
from purevk.ops import registry
from purevk.ops.builder import NameSource

# Sizes of the inputs to specialize on, by position. A `Bound` is another bound of a size that stays
# dynamic.
InputSizes = Sequence[tuple[int | Bound, ...] | None]


class Importer:
    """A graph in the making.

    Args:
        name: the method's name.
        where: the file's name, for messages.
        sizes: sizes of the inputs to specialize on. None: the file's bounds hold.

    Attributes:
        numbers: tensors that hold a number which an operator gave.
        bounds: bounds and checks of data-dependent sizes.
        types: gives the types of results.
        trusted: the graph is that of a module of this process, see `Graph`.
    """

    def __init__(self, name: str, where: str, sizes: InputSizes | None = None) -> None:
        self.name, self.where, self.sizes = name, where, sizes
        self.nodes: list[Node] = []
        self.inputs: list[Value | Dim | FixedInput | None] = []
        self.constants: dict[Value, Constant] = {}
        self.states: dict[Value, Constant | None] = {}
        self.labels: dict[Value, Label] = {}
        self.symbols: dict[Symbol, SymbolSource] = {}
        self.numbers: set[Value] = set()
        self.bounds = SizeBounds()
        self.types = ResultTypes(where, sizes is not None, self.symbols, self.bounds)
        self.constraints: dict[Guard, None] = {}
        self.equalities = Equalities()
        self.ranges: dict[Symbol, tuple[int, int | None]] = {}
        self.signature: Signature | None = None
        self.trusted = False
        self._names = NameSource()
        self._paths: set[str] = set()
        self._by_bound: dict[int, Dim] = {}
        self._shared: dict[tuple[Hashable, int, str, tuple[Size, ...]], Value] = {}
        self._missing: dict[Any, Value] = {}
        self._elements: dict[tuple[Value, int], Dim] = {}
        self._outer: frozenset[Symbol] = frozenset()  # of a sub-graph: the symbols around it
        self._inner: set[Symbol] = set()  # symbols that belong to sub-graphs
        # Of a sub-graph: what the symbols around it must keep if it runs.
        self._entry_checks: dict[Guard, str] = {}

    # -- leaves -----------------------------------------------------------------------------------
    def input(self, dtype: DType, bounds: Sequence[int], dynamic: bool | Sequence[bool]) -> Value:
        """An input tensor. In a dynamic one, each size above 1 becomes a symbol. Sizes with equal
        bounds are taken as equal, under a guard.

        Args:
            dynamic: of all sizes, or of each.
        """
        position = len(self.inputs)
        sizes = self.sizes[position] if self.sizes is not None else None
        value_dims: list[Size] = []
        pending: list[tuple[Symbol, int]] = []
        for dim, bound in enumerate(bounds):
            size = bound if sizes is None else sizes[dim]
            if isinstance(size, Bound):
                bound = size.upper if size.upper is not None else _dims.UNBOUNDED
            elif sizes is not None:
                value_dims.append(size)
                continue
            moves = dynamic if isinstance(dynamic, bool) else dynamic[dim]
            if not moves or bound <= 1:
                value_dims.append(bound)
            else:
                # Not 0: slices such as x[:1] then have known sizes. A call without elements is
                # lowered for its sizes.
                symbol = Symbol(f"s{len(self.symbols) + len(pending)}", bound, lower=1)
                pending.append((symbol, dim))
                first = self._by_bound.setdefault(bound, Dim.of(symbol))
                if first is not Dim.of(symbol) and not first == Dim.of(symbol):
                    raise GraphError(
                        f"sizes {first} and {symbol} differ at their common bound", where=self.where
                    )
                value_dims.append(first)
        value = Value(f"input_{position}", TensorType(dtype, tuple(value_dims)))
        for symbol, dim in pending:
            self.symbols[symbol] = SymbolSource(value, dim)
        self.inputs.append(value)
        return value

    def integer_input(self, default: int) -> Dim:
        """An integer argument of the call."""
        symbol = Symbol(f"i{len(self.symbols)}", is_size=False)
        self.symbols[symbol] = SymbolSource(None, None, len(self.inputs))
        self.inputs.append(Dim.of(symbol))
        return Dim.of(symbol)

    def fixed_input(self, value: Any) -> None:
        """An argument that is part of the graph. A call must pass this value."""
        self.inputs.append(FixedInput(value))

    def constrain(self, guard: Guard) -> None:
        """Has every call keep what the exporter decided.

        Raises:
            SizeConstraintError: the sizes that this graph is read for break the guard.
        """
        if not guard.symbols:
            if not guard.holds({}):
                raise SizeConstraintError(
                    "the model was not exported for these sizes",
                    where=f"{self.where}, method {self.name}",
                    why=f"it holds for {guard}",
                    next="export it with example inputs of these sizes; purevk.compile(module, ...) does",
                )
        else:
            self.constraints[guard] = None
            if guard.op == "==" and guard.answer:
                self.equalities.add(guard.left, guard.right)

    def constant(self, data: memoryview | Constant, type: TensorType, name: str = "") -> Value:
        """A tensor of the file. Equal addresses give one value.

        Args:
            name: its path in the module, such as "layers.0.weight"; the first one counts.
        """
        needed = type.nbytes
        constant = data if isinstance(data, Constant) else Constant(data[:needed])
        if constant.nbytes < needed:
            raise FileFormatError(
                f"a constant {type} needs {needed} bytes",
                where=self.where,
                why=f"{constant.nbytes} are there",
                next="the file is damaged: copy or export it again",
            )
        key = (constant.memory, needed, type.dtype.name, type.dims)
        if key not in self._shared:
            self._shared[key] = value = Value(self._constant_name(name), type)
            self.constants[value] = constant
        return self._shared[key]

    def missing(self, key: Any, type: TensorType, name: str = "") -> Value:
        """A tensor without its bytes, for graphs that are only planned. Equal keys give one
        value; `name` as for `constant`."""
        if key not in self._missing:
            self._missing[key] = value = Value(self._constant_name(name), type)
            self.constants[value] = Constant(memoryview(b""), known=False)
        return self._missing[key]

    def _constant_name(self, path: str) -> str:
        """A name for a constant. It has a dot, as no result of an operator has, if it is a path."""
        if not path:
            return self._names.fresh("const")
        name = path if "." in path else f"self.{path}"
        if name in self._paths:
            return self._names.fresh(name)
        self._paths.add(name)
        return name

    def state(
        self, data: memoryview | Constant | None, type: TensorType, label: Label | None = None
    ) -> Value:
        """A tensor that is kept between calls.

        Args:
            data: its initial bytes; None: zeros.
            label: its name; None: one is made up.
        """
        value = Value(self._names.fresh("state"), type)
        self.labels[value] = label or Label(value.name)
        if data is not None and not isinstance(data, Constant):
            data = Constant(data[: type.nbytes])
        self.states[value] = data
        return value

    def element(
        self,
        tensor: Value,
        index: int,
        lower: int | None = None,
        upper: int | None = None,
        hint: int | None = None,
    ) -> Dim | int:
        """The integer at an index of a tensor: a symbol, or the integer itself if the tensor is a
        constant.

        Args:
            lower, upper: its bounds, if the file states some.
            hint: what it was when the graph was traced, if the trace tells.
        """
        if tensor in self.constants:
            return int(self.constants[tensor].array(tensor.type).reshape(-1)[index])
        if (tensor, index) not in self._elements:
            name, inner = f"i{len(self.symbols)}", tensor not in self.inputs
            bounds = expected(name) or Expected(_dims.UNBOUNDED, _dims.UNBOUNDED)
            least = 0 if lower is None else lower
            symbol = Symbol(
                name,
                bounds.upper if upper is None else min(upper, bounds.upper),
                least if bounds.lower is None else max(least, bounds.lower),
                is_size=False,
                unbacked=inner,
                open=bounds.open and (upper is None or bounds.upper < upper),
                open_below=bounds.lower is not None and bounds.lower > least,
            )
            source = tensor
            if inner and self.states:
                # What a state holds now. A later node may write to it.
                source = self.emit(
                    "aten.clone.default",
                    (tensor, None),
                    [tensor.type],
                    [False],
                    f"element of {tensor!r}",
                )[0]
            self.symbols[symbol] = SymbolSource(source, None, index)
            self._elements[tensor, index] = Dim.of(symbol)
            if hint is not None:
                self.bounds.hints[symbol] = hint
        return self._elements[tensor, index]

    def check(self, left: Size, op: str, right: Size, message: str) -> None:
        """Has every call check a relation of sizes."""
        self.bounds.check(left, op, right, message, specialized=self.sizes is not None)

    # -- nodes ------------------------------------------------------------------------------------
    def emit(
        self,
        op: str,
        args: Sequence[Arg] | Mapping[str, Arg],
        recorded: Sequence[Recorded],
        dynamic: Sequence[bool],
        source: str,
        exact: bool = False,
        host: bool = False,
    ) -> tuple[Value, ...]:
        """Appends a node and returns its results.

        Args:
            op: name of the operator; `args` by position or by name.
            recorded: types that the file gives the results; their dtypes hold, their sizes are
                checked.
            dynamic: for each result, whether the recorded sizes are mere bounds.
            source: where in the file the node is, for messages.
            exact: the recorded sizes hold at every call.
            host: the node runs on the CPU, also if there is a kernel.

        Raises:
            FileFormatError: the recorded sizes are not those that the operator gives.
            GraphError: the same, of a trusted graph.
            InputError: the definition that a user registered is of another schema, or its shape
                function does not give the recorded sizes.
        """
        definition = None if host else registry.find(op)
        truth = lambda arg: self.number(arg, TensorType(DType.bool, ()), source)  # noqa: E731
        args = args if isinstance(args, Mapping) else self.equalities.rewritten(tuple(args))
        if definition is not None:
            full = complete(definition, args, recorded, self.where)
            full = with_relations(definition.parameters, full, truth)
            try:
                types = self._infer(definition, full, recorded, source, exact)
                if definition.of_user and exact:
                    check_schema(definition, args, len(types), len(recorded), source)
                if self.sizes is None and not exact:
                    self.types.limit(types, recorded, dynamic)
            except registry.UnknownSizes as error:
                types = self.types.data_dependent(definition, error, recorded, exact, source)
                if error.types is None:
                    definition = None
            for limit in [] if definition is None else position_limits(definition, full):
                # A position that is known outside of a sub-graph matters only if the sub-graph runs.
                if limit.symbols <= self._outer:
                    self._entry_checks.setdefault(limit.guard, limit.message)
                else:
                    self.check(limit.left, limit.op, limit.right, limit.message)
        else:
            full = tuple(args.values() if isinstance(args, Mapping) else args)
            full = with_relations(("",) * len(full), full, truth)
            types = [
                self.types.unknown(type, moves, exact) for type, moves in zip(recorded, dynamic)
            ]
        results = tuple(Value(self.fresh_name(op), type) for type in types)
        name, reason = op if definition is None else definition.name, ""
        if host:
            reason = "it writes into copies of its arguments"
        elif definition is not None and takes_number(definition, full, self.numbers):
            reason = "an argument is a number that an operator gives"
        if reason:
            self.nodes.append(Node(HOST, (name, reason, full), results, source))
        else:
            self.nodes.append(Node(name, full, results, source, op))
        self.types.define_symbols(results)
        return results

    def _infer(
        self,
        definition: registry.Operator,
        full: tuple[Arg, ...],
        recorded: Sequence[Recorded],
        source: str,
        exact: bool,
    ) -> list[TensorType]:
        """The types of results. If they are not those that are recorded, the error says who can be
        wrong: in a trusted graph, it is no file.

        Raises:
            UnsettledBounds: they may be so if sizes have other bounds.
        """
        try:
            types = self.types.infer(definition, full, recorded, source, exact)
        except FileFormatError as error:
            # A size without a bound is taken for the largest number, for which this may be wrong.
            self.bounds.settle((*_sizes(self.nodes), *dims_in(full)))
            if definition.of_user:
                raise InputError(
                    error.what,
                    where=error.where,
                    why=error.why,
                    next="correct the shape function that is registered for this operator",
                ) from error
            if self.trusted:
                raise GraphError(
                    error.what,
                    where=error.where,
                    why=error.why,
                    next="torch and purevk disagree on this operator: report it, with the module;"
                    ' torch.compile(module, backend="purevk") runs such a graph in eager torch',
                ) from error
            raise
        for guard in fixed_sizes(types, recorded) if exact else ():
            self.constrain(guard)
        return list(self.equalities.rewritten(tuple(types)))

    def number(self, number: Arg, type: TensorType, source: str) -> Value:
        """A number that is known at a call, as a tensor of one element."""
        args = ((), number, type.dtype, None, None, None)
        filled = self.emit("aten.full.default", args, [type], [False], source)[0]
        self.numbers.add(filled)
        return filled

    def fresh_name(self, op: str) -> str:
        """A name for a result of an operator."""
        return self._names.fresh(op.split(".")[1])

    def cast(self, value: Value, dtype: DType, source: str, alias: str = "") -> Value:
        """The value in another dtype. `alias` is that of the node which converts it."""
        if value.type.dtype is dtype:
            return value
        name, type_ = "aten._to_copy.default", value.type.with_dtype(dtype)
        result = self.emit(name, (value, dtype), [type_], [False], source)[0]
        if alias:
            self.nodes[-1] = replace(self.nodes[-1], alias=alias)
        return result

    def sub_graph(self, name: str) -> Importer:
        """An importer for the nodes of a sub-graph. It shares names, symbols, constants and states
        with this one."""
        inner = copy.copy(self)
        inner.name, inner.nodes, inner.inputs = f"{self.name}.{name}", [], []
        inner._outer = frozenset(self.symbols) - self._inner
        inner._entry_checks = {}
        return inner

    def check_at_entry(self, guard: Guard, message: str) -> None:
        """Has a relation of symbols around this sub-graph checked each time the sub-graph runs."""
        self._entry_checks.setdefault(guard, message)

    def sub_input(self, type: TensorType) -> Value:
        """An input of a sub-graph."""
        value = Value(self._names.fresh("in"), type)
        self.inputs.append(value)
        return value

    def _own_symbols(self) -> list[Symbol]:
        return [
            symbol
            for symbol in self.symbols
            if symbol not in self._outer and symbol not in self._inner
        ]

    def finish_sub_graph(self, outputs: Sequence[Arg]) -> Graph:
        """The sub-graph, with its outputs."""
        symbols = {symbol: self.symbols[symbol] for symbol in self._own_symbols()}
        self._inner.update(symbols)
        checks = [
            (guard, message)
            for guard, message in self.bounds.checks.items()
            if guard.symbols & set(symbols)
        ]
        checks += self._entry_checks.items()
        read = {value for node in self.nodes for value in node.inputs} | set(values_in(outputs))
        return Graph(
            self.name,
            tuple(self.inputs),
            tuple(self.nodes),
            _without_relations(outputs),
            {value: constant for value, constant in self.constants.items() if value in read},
            {value: first for value, first in self.states.items() if value in read},
            symbols,
            tuple(checks),
            self._outer,
            trusted=self.trusted,
        )

    def finish(self, outputs: Sequence[Arg], updates: Sequence[int] = ()) -> Graph:
        """The graph.

        Args:
            outputs: of the method. The last ones are the new elements of the inputs `updates`.
            updates: positions of the inputs that a call writes.

        Raises:
            UnsettledBounds: a data-dependent size has another bound than the graph was read for.
        """
        symbols = {
            symbol: source for symbol, source in self.symbols.items() if symbol not in self._inner
        }
        graph = Graph(
            self.name,
            tuple(self.inputs),
            tuple(self.nodes),
            _without_relations(outputs),
            self.constants,
            self.states,
            symbols,
            tuple(
                (guard, message)
                for guard, message in self.bounds.checks.items()
                if not guard.symbols & self._inner
            ),
            updates=tuple(updates),
            labels=self.labels,
            constraints=tuple(self.constraints),
            ranges=self.ranges,
            signature=self.signature,
            trusted=self.trusted,
        )
        self.bounds.settle(_sizes(node for inner in graph.nested() for node in inner.nodes))
        return graph


def _sizes(nodes: Iterable[Node]) -> Iterator[Size]:
    """The sizes of all results."""
    return (size for node in nodes for value in node.results for size in value.type.dims)


def _without_relations(outputs: Sequence[Any]) -> tuple[Arg, ...]:
    """The outputs of a graph, with relations as 1 or 0."""
    return tuple(output.truth if isinstance(output, Relation) else output for output in outputs)

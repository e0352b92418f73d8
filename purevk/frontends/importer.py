"""Collects the nodes of one method while a front end walks its file."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.errors import (
    FileFormatError,
    GraphError,
    SizeConstraintError,
    UnsupportedProgramError,
)
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
    Signature,
    Size,
    Symbol,
    SymbolSource,
    TensorType,
    Value,
    values_in,
)
from purevk.ir import dims as _dims
from purevk.ir.expected import Expected, expected, expecting
from purevk.ops import registry
from purevk.ops.builder import NameSource

_GUESS = 64  # what a size without any bound is planned for at first
_INTEGER: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "neg": operator.neg, "same": lambda value: value, "max": _dims.maximum, "min": _dims.minimum,
    "/": operator.truediv, "**": operator.pow,
}  # fmt: skip


RELATIONS = ("==", "!=", "<", "<=", ">", ">=")
_ELEMENTWISE = {
    "+": "aten.add.Tensor",
    "-": "aten.sub.Tensor",
    "*": "aten.mul.Tensor",
    "/": "aten.div.Tensor",
    "==": "aten.eq.Tensor",
    "!=": "aten.ne.Tensor",
    "<": "aten.lt.Tensor",
    "<=": "aten.le.Tensor",
    ">": "aten.gt.Tensor",
    ">=": "aten.ge.Tensor",
    "//": "aten.floor_divide.default",
    "%": "aten.remainder.Tensor",
    "neg": "aten.neg.default",
    "max": "aten.maximum.default",
    "min": "aten.minimum.default",
    "**": "aten.pow.Tensor_Tensor",
}
# Parameters for which a row takes a tensor of one element as well as a number.
_NUMBER_OR_TENSOR = {"x", "y", "z", "min", "max", "fill_value", "s"}
# How numbers that operators give stand in the graph: as tensors of one element.
NUMBERS = {
    bool: TensorType(DType.bool, ()),
    int: TensorType(DType.int64, ()),
    float: TensorType(DType.float64, ()),
}


def integer(op: str, *args: Any) -> Any:
    """One step of arithmetic on sizes."""
    return _INTEGER[op](*args)


class Unsettled(Exception):
    """Sizes of these symbols were found to have other bounds than the graph was made for."""

    def __init__(self, bounds: Mapping[str, Expected]) -> None:
        super().__init__(", ".join(bounds))
        self.bounds = dict(bounds)


def settled(read: Callable[[], Graph]) -> Graph:
    """Reads a graph, and again while it is found that sizes which come about during a call have
    other bounds than assumed."""
    known: dict[str, Expected] = {}
    while True:
        try:
            with expecting(known):
                return read()
        except Unsettled as found:
            known.update(found.bounds)


class Importer:
    """The graph in the making.

    Args:
        name: the method's name.
        where: the file's name, for messages.
        sizes: sizes of the inputs, by position, where they are known, or other bounds of those that
            are not; otherwise the file's bounds hold.
    """

    def __init__(
        self, name: str, where: str, sizes: Sequence[tuple[int | Bound, ...] | None] | None = None
    ) -> None:
        self.name, self.where, self.sizes = name, where, sizes
        self.nodes: list[Node] = []
        self.inputs: list[Value | Dim | None] = []
        self.constants: dict[Value, Constant] = {}
        self.states: dict[Value, Constant | None] = {}
        self.labels: dict[Value, Label] = {}
        self.symbols: dict[Symbol, SymbolSource] = {}
        self.numbers: set[Value] = set()  # tensors that stand for numbers which only a call knows
        self._names = NameSource()
        self._by_bound: dict[int, Dim] = {}
        self._shared: dict[tuple[int, int, str, tuple], Value] = {}
        self._missing: dict[Any, Value] = {}
        self.traced_elsewhere = (
            False  # on a device where some operators give results of other sizes than on the CPU
        )
        self._elements: dict[tuple[Value, int], Dim] = {}
        self._bounds: dict[
            Symbol, int
        ] = {}  # bounds that the file states of symbols that no input has as a size
        self._checks: dict[Guard, str] = {}
        self.constraints: dict[Guard, None] = {}
        self.ranges: dict[Symbol, tuple[int, int | None]] = {}
        self.signature: Signature | None = None
        self._fresh: set[Symbol] = set()
        self._derived: set[Symbol] = set()  # sizes whose bounds follow from those of the inputs
        self._misstated: dict[
            Symbol, int
        ] = {}  # bounds that exporters state though they do not hold
        self.names_of_sizes: list[
            str
        ] = []  # of the sizes that the next node brings about, where they have names already
        self._outer: frozenset[Symbol] = frozenset()  # of a sub-graph: the symbols around it
        self._inner: set[Symbol] = set()  # symbols that belong to sub-graphs

    # -- leaves -----------------------------------------------------------------------------------
    def input(self, dtype: DType, bounds: Sequence[int], dynamic: bool) -> Value:
        """A tensor of the call. Each size of a dynamic one above 1 becomes a symbol; equal bounds
        are taken for equal sizes, which a guard checks."""
        position = len(self.inputs)
        given = self.sizes[position] if self.sizes is not None else None
        value_dims: list[Any] = []
        pending: list[tuple[Symbol, int]] = []
        for dim, bound in enumerate(bounds):
            if given is not None and isinstance(given[dim], Bound):
                bound = given[dim].upper
            elif given is not None:
                value_dims.append(given[dim])
                continue
            if not dynamic or bound <= 1:
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
        """An argument that is part of the graph: a call has to give this value."""
        self.inputs.append(FixedInput(value))

    def constrain(self, guard: Guard) -> None:
        """Has a call keep what the exporter decided.

        Raises:
            SizeConstraintError: the sizes that this graph is read for break it.
        """
        if not guard.symbols:
            if not guard.holds({}):
                raise SizeConstraintError(
                    "the model was not exported for these sizes",
                    where=f"{self.where}, method {self.name}",
                    why=f"it holds for {guard}",
                )
        else:
            self.constraints[guard] = None

    def constant(self, data: memoryview, type: TensorType) -> Value:
        """A tensor of the file; equal addresses give one value."""
        needed = type.nbytes
        if len(data) < needed:
            raise FileFormatError(
                f"a constant {type} needs {needed} bytes",
                where=self.where,
                why=f"{len(data)} are there",
                next="the file is damaged: copy or export it again",
            )
        data = data[:needed]
        key = (_address(data), needed, type.dtype.name, type.dims)
        if key not in self._shared:
            self._shared[key] = value = Value(self._names.fresh("const"), type)
            self.constants[value] = Constant(data)
        return self._shared[key]

    def missing(self, key: Any, type: TensorType) -> Value:
        """A tensor without its bytes, for graphs that are planned only; equal keys give one
        value."""
        if key not in self._missing:
            self._missing[key] = value = Value(self._names.fresh("const"), type)
            self.constants[value] = Constant(memoryview(b""), known=False)
        return self._missing[key]

    def state(self, data: memoryview | None, type: TensorType, label: Label | None = None) -> Value:
        """A tensor that lives between calls, with its first bytes (None: zeros); without a label
        its name is made up."""
        value = Value(self._names.fresh("state"), type)
        self.labels[value] = label or Label(value.name)
        self.states[value] = None if data is None else Constant(data[: type.nbytes])
        return value

    def element(
        self, tensor: Value, index: int, lower: int | None = None, upper: int | None = None
    ) -> Dim | int:
        """The integer in a tensor, known at a call; `lower` and `upper`: its bounds, where the file
        has some."""
        if tensor in self.constants:
            return int(self.constants[tensor].array(tensor.type).reshape(-1)[index])
        if (tensor, index) not in self._elements:
            name, inner = f"i{len(self.symbols)}", tensor not in self.inputs
            known = expected(name) or Expected(_dims.UNBOUNDED, _dims.UNBOUNDED)
            symbol = Symbol(
                name,
                known.upper if upper is None else min(upper, known.upper),
                0 if lower is None else lower,
                is_size=False,
                unbacked=inner,
                open=known.open and upper is None,
            )
            source = tensor
            if inner and self.states:
                # What a state holds now, whatever is written to it later on.
                source = self.emit(
                    "aten.clone.default",
                    (tensor, None),
                    [tensor.type],
                    [False],
                    f"element of {tensor!r}",
                )[0]
            self.symbols[symbol] = SymbolSource(source, None, index)
            self._elements[tensor, index] = Dim.of(symbol)
        return self._elements[tensor, index]

    def item(
        self, tensor: Value, source: str, lower: int | None = None, upper: int | None = None
    ) -> Value | Dim | int:
        """The number in a tensor of one element: an integer known at a call (`lower`, `upper`: see
        `element`), or the tensor itself, without dims."""
        if not tensor.type.dtype.is_float:
            return self.element(tensor, 0, lower, upper)
        if tensor.type.rank:
            tensor = self.emit("aten.view.default", (tensor, ()), [], [], source)[0]
        self.numbers.add(tensor)
        return tensor

    def arithmetic(self, op: str, args: Sequence[Any], source: str) -> Any:
        """One step of arithmetic on numbers: sizes, or numbers that operators gave as tensors of
        one element."""
        if op == "same" or not any(isinstance(arg, (Value, Dim)) for arg in args):
            return integer(op, *args)
        if op == "**" and isinstance(args[1], int) and args[1] >= 0 and isinstance(args[0], Dim):
            return _dims.product([args[0]] * args[1])
        fractional = op in ("/", "**") or any(isinstance(arg, float) for arg in args)
        if not fractional and not any(isinstance(arg, Value) for arg in args):
            return integer(op, *args)
        if op == "**" and isinstance(args[1], Dim):
            raise UnsupportedProgramError(
                f"a power of {args[1]} cannot be followed", where=f"{self.where}, {source}"
            )
        if fractional or not isinstance(args[0], Value):
            args = [self.number(arg, source) for arg in args]
        result = self.emit(_ELEMENTWISE[op], tuple(args), [], [], source)[0]
        self.numbers.add(result)
        return result

    def number(self, given: Any, source: str) -> Value:
        """A number as a tensor of one element, a size or a float in double precision."""
        if isinstance(given, Value):
            return given
        made = self.emit(
            "aten.full.default",
            ((), given, DType.float64, None, None, None),
            [NUMBERS[float]],
            [False],
            source,
        )[0]
        self.numbers.add(made)
        return made

    def function(self, op: str, given: Any, source: str) -> Value:
        """A function of a number."""
        made = self.emit(op, (self.number(given, source),), [NUMBERS[float]], [False], source)[0]
        self.numbers.add(made)
        return made

    def check(self, left: Size, op: str, right: Size, message: str) -> None:
        """Has a relation of sizes that come about during a call checked at every call; bounds of
        single symbols that follow are used in planning memory."""
        if op in (">=", ">"):
            left, op, right = right, {">=": "<=", ">": "<"}[op], left
        guard = Guard(left, op, right, True)
        if not any(symbol.unbacked or not symbol.is_size for symbol in guard.symbols):
            return
        if isinstance(right, int) and op == "<=" and _dims.symbols(left) <= self._derived:
            if self.sizes is not None or _dims.upper(left) <= right:
                return  # torch has derived it from the bounds that the inputs had
        if (
            isinstance(right, int)
            and op == "<="
            and _bound_of_symbol(left, right) in self._misstated.items()
        ):
            return
        self._checks[guard] = message
        if op in ("<=", "<") and isinstance(left, Dim):
            self.limit(left, _dims.upper(right) - (op == "<"))

    def limit(self, size: Size, bound: int) -> None:
        """Takes notice that a size is at most `bound`."""
        found = _bound_of_symbol(size, bound)
        if found is not None and (found[0].unbacked or not found[0].is_size):
            self._bounds[found[0]] = min(found[1], self._bounds.get(found[0], found[1]))

    # -- nodes ------------------------------------------------------------------------------------
    def emit(
        self,
        op: str,
        args: Sequence[Arg] | Mapping[str, Arg],
        recorded: Sequence[TensorType],
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
            source: where in the file it stands.
            exact: the recorded sizes are what they are at every call; a `Bound` is one that comes
                about during it.
            host: it runs on the CPU, also if there is a kernel.

        Raises:
            FileFormatError: the recorded sizes are not those that the operator gives.
        """
        row = None if host else registry.find(op)
        if row is not None:
            full = self._complete(row, args, recorded)
            try:
                types = self._infer(row, full, recorded, source)
                if self.sizes is None and not exact:
                    self._limit(types, recorded, dynamic)
            except registry.UnknownSizes as error:
                types = self._data_dependent(row, error, recorded, dynamic, exact, source)
                if error.types is None:
                    row = None
        else:
            full = tuple(args.values()) if isinstance(args, Mapping) else tuple(args)
            types = [self._unknown(type, moves, exact) for type, moves in zip(recorded, dynamic)]
        results = tuple(Value(self.fresh_name(op), type) for type in types)
        if host:
            node = Node(
                "purevk.host", (op, "it writes into copies of its arguments", full), results, source
            )
        else:
            node = Node(row.name if row else op, full, results, source, op)
        named = zip(row.parameters, full) if row else ()
        if any(
            isinstance(arg, Value) and arg in self.numbers and name not in _NUMBER_OR_TENSOR
            for name, arg in named
        ):
            node = Node(
                "purevk.host",
                (row.name, "an argument is a number that an operator gives", full),
                results,
                source,
            )
        self.nodes.append(node)
        for value in results:
            for dim, size in enumerate(value.type.dims):
                for symbol in _dims.symbols(size) & self._fresh:
                    self.symbols[symbol] = SymbolSource(value, dim)
                    self._fresh.discard(symbol)
        return results

    def fresh_name(self, op: str) -> str:
        """A name for a result of an operator."""
        return self._names.fresh(op.split(".")[1])

    def cast(self, value: Value, dtype: DType, source: str) -> Value:
        """The value in another dtype."""
        if value.type.dtype is dtype:
            return value
        return self.emit(
            "aten._to_copy.default", (value, dtype), [value.type.with_dtype(dtype)], [False], source
        )[0]

    def _complete(
        self, row: registry.Operator, args: Any, recorded: Sequence[TensorType]
    ) -> tuple[Arg, ...]:
        if isinstance(args, Mapping):
            names = row.parameters
            bound = row.bind(())
            bound.update({name: arg for name, arg in args.items() if name in names})
        else:
            bound = row.bind(tuple(args)[: len(row.parameters)])
        bound = row.integers(bound)
        if "dtype" in bound:
            if isinstance(bound["dtype"], int):
                bound["dtype"] = DType.from_pte(bound["dtype"])
            if recorded:
                bound["dtype"] = recorded[0].dtype
        for name in ("layout", "device", "pin_memory", "memory_format"):
            if name in bound:
                bound[name] = None  # of no meaning here: tensors lie as the layout pass decides
        missing = [name for name in row.parameters if name not in bound]
        if missing:
            raise FileFormatError(f"{row.name} lacks arguments {missing}", where=self.where)
        return tuple(bound[name] for name in row.parameters)

    def _infer(
        self,
        row: registry.Operator,
        full: tuple[Arg, ...],
        recorded: Sequence[TensorType],
        source: str,
    ) -> list[TensorType]:
        try:
            inferred = row.infer(full)
        except registry.UnknownSizes:
            raise
        except registry.ShapeError as error:
            raise FileFormatError(
                f"{row.name} cannot take its arguments",
                where=f"{self.where}, {source}",
                why=str(error),
                next="the file is damaged, or its exporter and purevk disagree on this operator",
            ) from error
        except (
            TypeError
        ) as error:  # a size, or a number of a tensor, where a plain number is needed
            raise UnsupportedProgramError(
                f"{row.name} cannot take its arguments",
                where=f"{self.where}, {source}",
                why=str(error),
                next="make the number a constant of the model",
            ) from error
        types = []
        for number, type in enumerate(inferred):
            if number < len(recorded):
                expected = recorded[number]
                static = type.is_static and self.sizes is None and not self.traced_elsewhere
                if type.rank != expected.rank or (static and type.dims != expected.dims):
                    raise FileFormatError(
                        f"result {number} of {row.name} is recorded as {expected}",
                        where=f"{self.where}, {source}",
                        why=f"from its arguments it is {type}",
                        next="the file is damaged, or its exporter and purevk disagree on this operator",
                    )
                type = type.with_dtype(expected.dtype)
            types.append(type)
        return types

    def _limit(
        self, types: Sequence[TensorType], recorded: Sequence[TensorType], dynamic: Sequence[bool]
    ) -> None:
        """The bounds that a file states of results are also those of the numbers that their sizes
        were made of."""
        for type, stated, moves in zip(types, recorded, dynamic):
            for size, bound in zip(type.dims, stated.dims):
                if (
                    moves
                    and isinstance(size, Dim)
                    and isinstance(bound, int)
                    and _dims.upper(size) > bound
                ):
                    self.limit(size, bound)

    def _data_dependent(
        self,
        row: registry.Operator,
        error: registry.UnknownSizes,
        recorded: Sequence[TensorType],
        dynamic: Sequence[bool],
        exact: bool,
        source: str,
    ) -> list[TensorType]:
        """The results' types where sizes follow from values: a symbol for each of these sizes."""
        if error.types is None:
            if recorded:
                return [self._unknown(type, True, exact) for type in recorded]
            raise FileFormatError(
                f"{row.name} gives a tensor of unknown sizes",
                where=f"{self.where}, {source}",
                why=str(error),
                next="export the model with bounds for its results",
            ) from error
        known: dict[int, Any] = {}
        types = []
        for number, type in enumerate(error.types):
            stated = recorded[number] if number < len(recorded) else None
            sizes: list[Any] = []
            for dim, size in enumerate(type.dims):
                if isinstance(size, registry.DataDependentSize):
                    if size.key not in known:
                        bound = (
                            None
                            if stated is None or (self.sizes is not None and not exact)
                            else stated.dims[dim]
                        )
                        known[size.key] = self._count(size, bound, exact)
                    size = known[size.key]
                sizes.append(size)
            types.append(TensorType(type.dtype if stated is None else stated.dtype, tuple(sizes)))
        return types

    def _count(self, size: registry.DataDependentSize, stated: Any, exact: bool) -> Any:
        """A size that follows from values; `stated`: what the file says of it."""
        if exact and isinstance(stated, (int, Dim)):
            return stated
        upper = None if size.upper is None else _dims.upper(size.upper)
        if stated is not None and (upper is None or self.sizes is None):
            bound = stated.upper if isinstance(stated, Bound) else stated
            if size.misstated is not None and bound == _dims.upper(size.misstated):
                bound = None
            upper = bound if upper is None else upper if bound is None else min(bound, upper)
        if upper == 0:
            return 0
        symbol = self._fresh_symbol(upper, size.guess)
        if size.upper is not None:
            self._derived.add(symbol)
        if size.misstated is not None:
            self._misstated[symbol] = _dims.upper(size.misstated)
        return Dim.of(symbol)

    def _unknown(self, type: TensorType, moves: bool, exact: bool) -> TensorType:
        """The type of a result without a shape function: each size above 1 is a symbol of its own
        if it may change."""
        if not exact and not moves and self.sizes is None:
            return type
        sizes: list[Any] = []
        for size in type.dims:
            if isinstance(size, Bound):
                size = Dim.of(self._fresh_symbol(size.upper, 64))
            elif not exact and isinstance(size, int) and size > 1:
                size = Dim.of(self._fresh_symbol(size, size))
            sizes.append(size)
        return type.with_dims(sizes)

    def _fresh_symbol(self, upper: int | None, guess: int) -> Symbol:
        """A size that the node to come brings about, with its bound, if there is one."""
        name = self.names_of_sizes.pop(0) if self.names_of_sizes else f"u{len(self.symbols)}"
        known = expected(name)
        if upper is None:
            known = known or Expected(guess, guess, open=True)
        symbol = Symbol(
            name,
            upper if known is None else known.upper,
            unbacked=True,
            open=known is not None and known.open,
        )
        self.symbols[symbol] = SymbolSource(None)
        self._fresh.add(symbol)
        return symbol

    def sub_graph(self, name: str) -> Importer:
        """Collects the nodes of a sub-graph. Names, symbols, constants and states are shared with
        this one."""
        made = copy.copy(self)
        made.name, made.nodes, made.inputs = f"{self.name}.{name}", [], []
        made._outer = frozenset(self.symbols) - self._inner
        return made

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
            for guard, message in self._checks.items()
            if guard.symbols & set(symbols)
        ]
        read = {value for node in self.nodes for value in node.inputs} | set(values_in(outputs))
        return Graph(
            self.name,
            tuple(self.inputs),
            tuple(self.nodes),
            tuple(outputs),
            {value: constant for value, constant in self.constants.items() if value in read},
            {value: first for value, first in self.states.items() if value in read},
            symbols,
            tuple(checks),
            self._outer,
        )

    def finish(self, outputs: Sequence[Arg], updates: Sequence[int] = ()) -> Graph:
        """The graph, with the outputs of the method; the last are the new elements of the inputs
        `updates`.

        Raises:
            Unsettled: a size that comes about during a call has another bound than was assumed.
        """
        symbols = {
            symbol: source for symbol, source in self.symbols.items() if symbol not in self._inner
        }
        graph = Graph(
            self.name,
            tuple(self.inputs),
            tuple(self.nodes),
            tuple(outputs),
            self.constants,
            self.states,
            symbols,
            tuple(
                (guard, message)
                for guard, message in self._checks.items()
                if not guard.symbols & self._inner
            ),
            updates=tuple(updates),
            labels=self.labels,
            constraints=tuple(self.constraints),
            ranges=self.ranges,
            signature=self.signature,
        )
        used: set[Symbol] = set()
        for node in (node for each in graph.nested() for node in each.nodes):
            for value in node.results:
                for size in value.type.dims:
                    used |= _dims.symbols(size)
        found: dict[str, Expected] = {}
        for symbol in used:
            if symbol.is_size and not symbol.unbacked:
                continue
            bound = self._bounds.get(symbol, _dims.UNBOUNDED)
            if bound < symbol.upper and (
                symbol.open or symbol.upper == _dims.UNBOUNDED or not expected(symbol.name)
            ):
                found[symbol.name] = Expected(max(bound, 0), max(bound, 0))
            elif symbol.upper == _dims.UNBOUNDED:
                found[symbol.name] = Expected(_GUESS, _GUESS, open=True)
        if found:
            raise Unsettled(found)
        return graph


def _bound_of_symbol(size: Size, limit: int) -> tuple[Symbol, int] | None:
    """The one symbol of `size`, and what it may be at most if `size <= limit`; None where `size` is
    no `a * symbol + b`."""
    found = _dims.symbols(size)
    if len(found) != 1:
        return None
    (symbol,) = found
    terms = dict(size.terms) if isinstance(size, Dim) else {}
    base, factor = terms.pop((), 0), terms.pop((symbol,), 0)
    return None if terms or factor <= 0 else (symbol, (limit - base) // factor)


def _address(data: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data) if len(data) else 0

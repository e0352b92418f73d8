"""Bounds and checks of the sizes and integers that follow from data, while a front end reads a
graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from purevk.errors import FileFormatError
from purevk.ir import Arg, Dim, Graph, Guard, GuardLog, Size, Symbol, Value
from purevk.ir import dims as _dims
from purevk.ir import guards as _guards
from purevk.ir.expected import Expected, expected, expecting
from purevk.ops.registry import Operator, find

_CHANGES = 8  # of the bound of one symbol, above which a file contradicts itself
_GUESS = 64  # what memory is planned for at first, for a size without a bound
_MOST = 1 << 28  # elements: memory is not planned for bounds beyond


class UnsettledBounds(Exception):
    """Symbols have other bounds than the graph was made for."""

    def __init__(self, bounds: Mapping[str, Expected]) -> None:
        super().__init__(", ".join(bounds))
        self.bounds = dict(bounds)


def settled(read: Callable[[], Graph]) -> Graph:
    """Reads a graph. Reads it again while data-dependent sizes turn out to have other bounds than
    those that it was read for.

    Raises:
        FileFormatError: a bound changes again and again.
    """
    expected_sizes: dict[str, Expected] = {}
    changes: dict[str, int] = {}
    while True:
        try:
            with expecting(expected_sizes), GuardLog() as log:
                graph = read()
            for guard in log.guards:  # without those of attempts with other bounds
                _guards.note(guard)
            return graph
        except UnsettledBounds as unsettled:
            for name in unsettled.bounds:
                changes[name] = changes.get(name, 0) + 1
                if changes[name] > _CHANGES:
                    raise FileFormatError(
                        f"the bounds of size {name} contradict one another",
                        why=f"the graph was read {_CHANGES} times, and gave another bound each time",
                        next="the file is damaged: copy or export it again",
                    ) from None
            expected_sizes.update(unsettled.bounds)


class SizeBounds:
    """What a front end knows of data-dependent sizes.

    Attributes:
        checks: the relations that a call must keep, with the message if it does not.
        upper: the bounds that the file states.
        derived: symbols whose bounds follow from the sizes of the inputs.
        misstated: bounds that exporters state although they do not hold.
        hints: what symbols were when the graph was traced, where the trace tells.
    """

    def __init__(self) -> None:
        self.checks: dict[Guard, str] = {}
        self.upper: dict[Symbol, int] = {}
        self.derived: set[Symbol] = set()
        self.misstated: dict[Symbol, int] = {}
        self.hints: dict[Symbol, int] = {}

    def check(self, left: Size, op: str, right: Size, message: str, specialized: bool) -> None:
        """Has every call check a relation of sizes. Memory is planned for a bound that follows
        from it.

        Args:
            specialized: the graph is read for the sizes of a call.
        """
        if op in (">=", ">"):
            left, op, right = right, {">=": "<=", ">": "<"}[op], left
        guard = Guard(left, op, right, True)
        if not any(symbol.unbacked or not symbol.is_size for symbol in guard.symbols):
            return
        if isinstance(right, int) and op == "<=":
            if _dims.symbols(left) <= self.derived:
                if specialized or _dims.upper(left) <= right:
                    return  # torch has derived it from the bounds that the inputs had
            bound_ = _bound_of_symbol(left, right)
            if bound_ is not None and self.misstated.get(bound_[0]) == bound_[1]:
                return
        self.checks.setdefault(guard, message)
        if op in ("<=", "<") and isinstance(left, Dim):
            self.limit(left, _dims.upper(right) - (op == "<"))

    def limit(self, size: Size, bound: int) -> None:
        """Notes that a size is at most `bound`."""
        symbol_bound = _bound_of_symbol(size, bound)
        if symbol_bound is None:
            return
        symbol, upper = symbol_bound
        if symbol.unbacked or not symbol.is_size:
            self.upper[symbol] = min(upper, self.upper.get(symbol, upper))

    def settle(self, sizes: Iterable[Size]) -> None:
        """Raises `UnsettledBounds` if a symbol has another bound than it was given, or if sizes have
        no bound because they grow as it falls.

        Args:
            sizes: of the tensors of a graph.
        """
        sizes = {size for size in sizes if isinstance(size, Dim)}
        expected_sizes: dict[str, Expected] = {}
        for symbol in {symbol for size in sizes for symbol in _dims.symbols(size)}:
            if symbol.is_size and not symbol.unbacked:
                continue
            bound = self.upper.get(symbol, _dims.UNBOUNDED)
            is_free = symbol.open or symbol.upper == _dims.UNBOUNDED or not expected(symbol.name)
            own = [size for size in sizes if symbol in _dims.symbols(size)]
            if bound < symbol.upper and is_free:
                expected_sizes[symbol.name] = Expected(max(bound, 0), max(bound, 0))
            elif symbol.upper == _dims.UNBOUNDED or _outgrow(
                own, symbol, symbol.open, symbol.lower
            ):
                guess = max(self.hints.get(symbol, _GUESS), 1)
                expected_sizes[symbol.name] = Expected(guess, guess, open=True)
            elif _outgrow(own, symbol, symbol.open_below, symbol.upper):
                expected_sizes[symbol.name] = Expected.below(
                    symbol.upper, symbol.upper, symbol.open
                )
        if expected_sizes:
            raise UnsettledBounds(expected_sizes)


def _outgrow(sizes: Iterable[Size], symbol: Symbol, guessed: bool, end: int) -> bool:
    """Whether sizes are too large at a bound of a symbol that is no guess, and not at the other one."""
    return not guessed and any(
        _dims.upper(size) >= _MOST and _dims.range_within(size, {symbol: (end, end)})[1] < _MOST
        for size in sizes
    )


def largest_sizes(guards: Iterable[Guard]) -> dict[Symbol, int]:
    """The most that symbols can be in a call that keeps such guards, where that is less than their
    bounds."""
    largest: dict[Symbol, int] = {}
    for guard in guards:
        left, op, right = guard.left, guard.op, guard.right
        if op in (">=", ">"):
            left, op, right = right, {">=": "<=", ">": "<"}[op], left
        if guard.answer and op in ("<=", "<", "==") and isinstance(right, int):
            bound = _bound_of_symbol(left, right - (op == "<"))
            if bound is not None and bound[1] < largest.get(bound[0], bound[0].upper):
                largest[bound[0]] = max(bound[1], 0)
    return largest


def _bound_of_symbol(size: Size, limit: int) -> tuple[Symbol, int] | None:
    """The symbol of `size`, and the most that it may be if `size <= limit`. None if `size` is not
    of the form `a * symbol + b`."""
    symbols = _dims.symbols(size)
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    terms = dict(size.terms) if isinstance(size, Dim) else {}
    base, factor = terms.pop((), 0), terms.pop((symbol,), 0)
    return None if terms or factor <= 0 else (symbol, (limit - base) // factor)


# Operators that take elements at positions along the dim "dim": views, without a check of their own.
_AT_POSITIONS = ("aten.slice.Tensor", "aten.select.int")


class Limit(NamedTuple):
    """A relation that a position must keep, with the message if it does not."""

    left: Size
    op: str
    right: Size
    message: str

    @property
    def guard(self) -> Guard:
        """It as a guard, as graphs hold them."""
        if self.op == ">=":
            return Guard(self.right, "<=", self.left, True)
        return Guard(self.left, self.op, self.right, True)

    @property
    def symbols(self) -> set[Symbol]:
        return _dims.symbols(self.left) | _dims.symbols(self.right)


def position_limits(definition: Operator, args: tuple[Arg, ...]) -> list[Limit]:
    """What a call must check of the positions that follow from data, and of the index of a selection:
    slices and selections take them at their word."""
    if definition.name not in _AT_POSITIONS:
        return []
    bound = definition.bind(args)
    x, dim = bound["x"], bound["dim"]
    if not isinstance(x, Value) or not isinstance(dim, int):
        return []
    limits: list[Limit] = []
    for name in ("index", "start", "end"):
        position, size = bound.get(name), x.type.dims[dim]
        if name == "index" and isinstance(position, int) and isinstance(size, Dim):
            position = position + size if position < 0 else position
        elif not isinstance(position, Dim):
            continue
        elif all(symbol.is_size and not symbol.unbacked for symbol in _dims.symbols(position)):
            continue
        elif _dims.upper(position) < 0:
            position = position + size
        last = size - 1 if name == "index" else size
        where = f"the {name} of {definition.name} lies"
        if _dims.range_of(position)[0] < 0:
            limits.append(Limit(position, ">=", 0, f"{where} before the tensor"))
        if _dims.upper(position) > _dims.range_of(last)[0]:
            limits.append(Limit(position, "<=", last, f"{where} past the tensor"))
    return limits


def with_position_limits(graph: Graph) -> Graph:
    """A saved graph that checks its positions, also if the file does not say so. A sub-graph checks
    its own when it runs."""
    checked = {guard for guard, _ in graph.checks}
    symbols = graph.symbols.keys() | graph.outer
    added: dict[Guard, str] = {}
    nodes = []
    for node in graph.nodes:
        definition = find(node.op)
        for limit in [] if definition is None else position_limits(definition, node.args):
            if limit.guard not in checked and limit.symbols <= symbols:
                added[limit.guard] = limit.message
        if node.graphs:
            args = [with_position_limits(a) if isinstance(a, Graph) else a for a in node.args]
            node = replace(node, args=tuple(args))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), checks=(*graph.checks, *added.items()))

"""A lowering of a graph, and the calls that it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from purevk.graph.executable import Executable
from purevk.ir import Bound, FixedInput, Graph, Symbol, Value
from purevk.ir.binding import bind_symbols, input_symbols
from purevk.ir.expected import Expected
from purevk.program.arguments import check_indices
from purevk.schedule.plan import Lowered

if TYPE_CHECKING:
    from purevk.checking.walk import Counts

# Sizes of the inputs to lower for, by position: integers are fixed, a `Bound` is a new upper bound
# of a dynamic size. None stands for the exported bounds.
Sizes = Sequence["tuple[int | Bound, ...] | None"]
MAX_KNOWN = 4096
"""Combinations of sizes whose answer a specialization remembers."""


class Specialization:
    """A graph lowered under guards: it serves calls whose sizes keep them and the symbols' bounds.

    Attributes:
        sizes, expected: what it was lowered for; see `Variant`.
        imported: the graph as the front end made it.
        counts: what PUREVK_CHECK compared at the last call.
        lenient: whether it may serve sizes outside of the exported ranges.
        exported: the graph against which the inputs of calls are checked before.
        tensors: the inputs that are tensors, with their positions.
        preferred: the one for the same sizes that served the last call which this one turned out
            not to serve.
        used: when it served a call, as a count of calls.
    """

    def __init__(
        self,
        lowered: Lowered,
        executable: Executable,
        sizes: Sizes | None = None,
        expected: Mapping[str, Expected] | None = None,
        lenient: bool = False,
        exported: Graph | None = None,
    ) -> None:
        graph = lowered.graph
        self.graph, self.executable = graph, executable
        self.guards = (*lowered.guards, *graph.constraints)
        self.imported = lowered.imported
        self.counts: Counts | None = None
        self.sizes, self.expected = sizes, dict(expected or {})
        self.preferred: Specialization | None = None
        self.tensors = [
            (position, value)
            for position, value in enumerate(graph.inputs)
            if isinstance(value, Value)
        ]
        self._fixed_sizes, self._fixed_integers = _fixed_here(graph, exported or graph)
        self._fixes_more = bool(self._fixed_sizes or self._fixed_integers)
        self._symbols = input_symbols(graph)
        self._sizes = [symbol for symbol, _, _ in self._symbols if symbol.is_size]
        self.used = 0
        self._outer = [
            guard
            for guard in self.guards
            if all(s.is_size and not s.unbacked for s in guard.symbols)
        ]
        brought = {symbol for symbol, _, _ in self._symbols}
        self._mixed = [
            guard
            for guard in graph.constraints
            if guard.symbols <= brought and not all(s.is_size for s in guard.symbols)
        ]
        self._integers = [symbol for symbol in graph.ranges if not symbol.is_size]
        self._ranged = [] if lenient else [symbol for symbol in graph.ranges if symbol.is_size]
        self._indices = lowered.indices
        self._known: dict[tuple[int, ...], bool] = {}
        executable.watch(self.guards)

    def environment(self, arrays: Sequence[Any]) -> dict[Symbol, int]:
        """The values of the symbols that the inputs of a call bring."""
        return bind_symbols(self._symbols, arrays)

    def bind(self, arrays: Sequence[Any]) -> dict[Symbol, int] | None:
        """The values of the symbols, if this lowering serves the inputs; else None."""
        if self._fixes_more and not self._takes(arrays):
            return None
        env = bind_symbols(self._symbols, arrays)
        return env if self._serves(env) else None

    def check_indices(
        self, arrays: Sequence[Any], env: Mapping[Symbol, int], where: str, outer: int = 0
    ) -> None:
        """Raises `InputError` if an input on the host is an index that is out of range. Its message
        leaves out `outer` leading dims of the element."""
        if self._indices:
            check_indices(self.imported, self._indices, arrays, env, where, outer)

    def _takes(self, arrays: Sequence[Any]) -> bool:
        """Whether the inputs have the sizes, and the integers the values, that are fixed here."""
        for position, dim, size in self._fixed_sizes:
            if arrays[position].shape[dim] != size:
                return False
        return all(arrays[position] == number for position, number in self._fixed_integers)

    def above_bounds(self, env: Mapping[Symbol, int]) -> bool:
        """Whether a size of a call is above what memory was planned for."""
        return any(symbol.is_size and env[symbol] > symbol.upper for symbol in env)

    def _serves(self, env: Mapping[Symbol, int]) -> bool:
        """Whether the sizes of a call keep the bounds and the guards."""
        key = tuple(map(env.__getitem__, self._sizes))
        serves = self._known.get(key)
        if serves is None:
            serves = all(
                symbol.lower <= env[symbol] <= symbol.upper for symbol in env if symbol.is_size
            )
            serves = serves and all(
                _within(self.graph, symbol, env[symbol]) for symbol in self._ranged if symbol in env
            )
            serves = serves and all(guard.holds(env) for guard in self._outer)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = serves
        if not serves or not (self._integers or self._mixed):
            return serves
        return all(_within(self.graph, symbol, env[symbol]) for symbol in self._integers) and all(
            guard.holds(env) for guard in self._mixed
        )

    def admits(self, env: Mapping[Symbol, int], unbacked: Mapping[str, int]) -> bool:
        """Whether sizes that came about during a call, by the names of their symbols, keep the
        bounds and the guards too."""
        inner = {
            symbol: unbacked[symbol.name]
            for symbol in self.graph.symbols
            if symbol.name in unbacked
        }
        whole = {**env, **inner}
        return all(
            symbol.lower <= value <= symbol.upper for symbol, value in inner.items()
        ) and all(guard.holds(whole) for guard in self.guards if guard.symbols <= set(whole))


def _fixed_here(
    graph: Graph, exported: Graph
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """What a lowering fixes and the exported graph leaves open: sizes as (position of the input,
    dim, size), and integers as (position, value). The rest was compared when the arguments were
    read."""
    sizes: list[tuple[int, int, int]] = []
    integers: list[tuple[int, int]] = []
    for position, (value, exported_input) in enumerate(zip(graph.inputs, exported.inputs)):
        if isinstance(value, Value) and isinstance(exported_input, Value):
            sizes += [
                (position, dim, size)
                for dim, (size, open_size) in enumerate(
                    zip(value.type.dims, exported_input.type.dims)
                )
                if isinstance(size, int) and not isinstance(open_size, int)
            ]
        elif isinstance(value, FixedInput) and not isinstance(exported_input, FixedInput):
            integers.append((position, value.value))
    return sizes, integers


def _within(graph: Graph, symbol: Symbol, value: int) -> bool:
    lower, upper = graph.ranges.get(symbol, (0, symbol.upper))
    return lower <= value and (upper is None or value <= upper)


def sizes_text(sizes: Sizes | None) -> str:
    """What a graph is lowered for, in a message."""
    if sizes is None:
        return "exported bounds"
    shown = (
        "any"
        if dims is None
        else "x".join(f"..{size.upper}" if isinstance(size, Bound) else str(size) for size in dims)
        for dims in sizes
    )
    return f"inputs of sizes {', '.join(shown)}"

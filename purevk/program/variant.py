"""One exported graph of a method: lowered for the exported bounds, and again for calls that those
lowerings do not serve."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from purevk import knobs
from purevk.errors import (
    FileFormatError,
    GraphError,
    InputError,
    KernelNotCachedError,
    PurevkError,
    SizeConstraintError,
    UnsupportedProgramError,
    located,
)
from purevk.graph.executable import Executable
from purevk.graph.external import ExternalCalls
from purevk.graph.unbacked import Replan
from purevk.ir import (
    Bound,
    Dim,
    FixedInput,
    Graph,
    GuardLog,
    ReadLog,
    Size,
    Symbol,
    Value,
)
from purevk.ir import dims as _dims
from purevk.ir.binding import bind_symbols, input_symbols
from purevk.ir.expected import Expected, expecting
from purevk.program.arguments import (
    InputReader,
    check_indices,
    describe_given,
    describe_inputs,
)
from purevk.program.coverage import wider_sizes
from purevk.program.kept import Keeper
from purevk.program.ranges import refused_sizes
from purevk.schedule.plan import Lowered

if TYPE_CHECKING:
    from purevk.checking.walk import Counts
    from purevk.program.program import Program

# Sizes of the inputs to lower for, by position: integers are fixed, a `Bound` is a new upper bound
# of a dynamic size. None stands for the exported bounds.
Sizes = Sequence["tuple[int | Bound, ...] | None"]
GraphSource = Callable[["Sizes | None"], Graph]
# What serves a call, with the values of its symbols.
Choice: TypeAlias = "tuple[Specialization, dict[Symbol, int]]"
MAX_SPECIALIZATIONS = 8
MAX_REPLANS = 16
MAX_KNOWN = 4096  # combinations of sizes whose answer a specialization remembers
_log = logging.getLogger("purevk")


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Within this, Python looks for no reference cycles. It would go through all nodes and
    dispatches again and again while they are made, so that the time for each grows with the graph."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _naming_lines(graph: Graph) -> Iterator[None]:
    """Errors about a node of the graph say where it stands in the user's code."""
    try:
        yield
    except PurevkError as error:
        raise _with_line(error, graph) from error.__cause__


def _with_line(error: PurevkError, graph: Graph) -> PurevkError:
    for source in re.split(r"[\s,;()]+", error.where):
        if source in graph.lines:
            return located(error, source, graph.lines[source])
    return error


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
        env = self.environment(arrays)
        return env if self._serves(env) else None

    def check_indices(self, arrays: Sequence[Any], env: Mapping[Symbol, int], where: str) -> None:
        """Raises `InputError` if an input on the host is an index that is out of range."""
        if self._indices:
            check_indices(self.imported, self._indices, arrays, env, where)

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
        key = tuple([env[symbol] for symbol in self._sizes])
        found = self._known.get(key)
        if found is None:
            found = all(
                symbol.lower <= env[symbol] <= symbol.upper for symbol in env if symbol.is_size
            )
            found = found and all(
                _within(self.graph, symbol, env[symbol]) for symbol in self._ranged if symbol in env
            )
            found = found and all(guard.holds(env) for guard in self._outer)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = found
        if not found or not self._integers:
            return found
        return all(_within(self.graph, symbol, env[symbol]) for symbol in self._integers)

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
    for position, (value, known) in enumerate(zip(graph.inputs, exported.inputs)):
        if isinstance(value, Value) and isinstance(known, Value):
            sizes += [
                (position, dim, size)
                for dim, (size, open_size) in enumerate(zip(value.type.dims, known.type.dims))
                if isinstance(size, int) and not isinstance(open_size, int)
            ]
        elif isinstance(value, FixedInput) and not isinstance(known, FixedInput):
            integers.append((position, value.value))
    return sizes, integers


def _within(graph: Graph, symbol: Symbol, value: int) -> bool:
    lower, upper = graph.ranges.get(symbol, (0, symbol.upper))
    return lower <= value and (upper is None or value <= upper)


class Variant:
    """An exported graph of a method and its lowerings. A method made from a module has several where
    calls asked for other exports."""

    def __init__(self, program: Program, name: str, source: GraphSource) -> None:
        self.program, self.name, self.source = program, name, source
        self.specializations: list[Specialization] = []
        self.calls = 0
        self.used = 0
        # A module is rather exported again for sizes outside of the ranges of an export.
        self.lenient = program.bounds in ("grow", "open") and not hasattr(source, "again")
        first = self._prepare(None)
        self.graph: Graph = first.graph
        self.where = f"{program.name}, method {name}({describe_inputs(self.graph)})"
        self.reader = InputReader(self.graph, self.where)

    # -- lowering --------------------------------------------------------------------------------
    def _prepare(
        self, sizes: Sizes | None, expected: Mapping[str, Expected] | None = None
    ) -> Specialization:
        # Methods share weights, and a call holds the lock of its own method alone.
        reading = getattr(self.source, "reading", contextlib.nullcontext)
        with self.program.lock, reading(), _uncollected():
            return self._lower(sizes, expected)

    def _lower(
        self, sizes: Sizes | None, expected: Mapping[str, Expected] | None
    ) -> Specialization:
        program = self.program
        lowered = self._kept(sizes, expected)
        try:
            executable = Executable(
                program.context,
                lowered.plan,
                program.weights,
                program.states,
                program.progress,
                program.may_compile,
            )
        except KernelNotCachedError as error:
            raise KernelNotCachedError(
                error.what,
                where=f"{program.name}, method {self.name}, {_sizes_text(sizes)}; {error.where}",
                why=error.why,
                next=error.next,
            ) from None
        program.executables.add(executable)
        for phase, seconds in executable.seconds.items():
            program.seconds[phase] = program.seconds.get(phase, 0.0) + seconds
        exported = self.specializations[0].graph if self.specializations else lowered.graph
        made = Specialization(lowered, executable, sizes, expected, self.lenient, exported)
        made.used = self.calls
        self.specializations.append(made)
        if len(self.specializations) > MAX_SPECIALIZATIONS:
            # The first one serves the exported bounds; of the others the one goes that was not used
            # for the longest time.
            oldest = min(self.specializations[1:-1], key=lambda each: each.used)
            self.specializations.remove(oldest)
            oldest.executable.close()
            program.release_unused()
        return made

    def _kept(self, sizes: Sizes | None, expected: Mapping[str, Expected] | None) -> Lowered:
        """The method, lowered: as the cache has it, or anew."""
        program = self.program
        keeper = Keeper.of(program.context, self.source, program.leaves)
        start = time.perf_counter()
        question = (
            None
            if keeper is None
            else keeper.question(self.name, sizes, expected, program.shares_weights)
        )
        if keeper is None or question is None:
            return self._lowered(sizes, expected)
        found = keeper.find(question)
        program.add_seconds("plan", start)
        if found is None:
            found = self._lowered(sizes, expected)
            start = time.perf_counter()
            keeper.keep(question, found)
            program.add_seconds("plan", start)
        elif program.bounds == "strict":
            self._refuse_guesses(found.imported)
        return found

    def _lowered(self, sizes: Sizes | None, expected: Mapping[str, Expected] | None) -> Lowered:
        """The method, lowered anew."""
        # All operators come with these, and a program whose plan is kept needs none of them.
        from purevk.passes.check_indices import ranges_of_inputs
        from purevk.passes.pipeline import optimize
        from purevk.schedule.planning import make_plan

        program = self.program
        with GuardLog() as log, ReadLog() as reads, expecting(expected or {}):
            start = time.perf_counter()
            imported = program.share_leaves(self.name, self.source(sizes))
            program.add_seconds("import", start)
            if program.bounds == "strict":
                self._refuse_guesses(imported)
            with _naming_lines(imported):
                start = time.perf_counter()
                graph = optimize(imported, program.context.traits)
                program.add_seconds("passes", start)
                start = time.perf_counter()
                plan = make_plan(graph, program.context.traits)
                program.add_seconds("lower", start)
        indices = ranges_of_inputs(imported)
        return Lowered(imported, graph, plan, tuple(log.guards), indices, tuple(reads.data))

    def _refuse_guesses(self, graph: Graph) -> None:
        for symbol in graph.symbols:
            if symbol.open:
                source = graph.symbols[symbol].value
                raise UnsupportedProgramError(
                    f"size {symbol} has no upper bound",
                    where=f"{self.program.name}, method {self.name}, {source!r}",
                    why='bounds="strict" plans memory once, and the size comes from the elements of a tensor',
                    next="write torch._check(n <= N) after n = ....item() in the model, or load it"
                    ' with bounds="exported"',
                )

    # -- choosing --------------------------------------------------------------------------------
    def choose(self, arrays: Sequence[Any]) -> Choice | SizeConstraintError:
        """What serves the inputs, with the values of its symbols; lowered now if nothing does. Or
        why the graph does not hold for these sizes.

        Args:
            arrays: inputs that have the fixed sizes of the graph.

        Raises:
            InputError: the sizes do not go together.
        """
        for each in self.specializations:
            env = each.bind(arrays)
            if env is not None:
                return self._preferred(each, env, arrays)
        first = self.specializations[0]
        env = first.environment(arrays)
        refused = self._outside(env, arrays)
        if refused is not None:
            return refused
        sizes = [_sizes_of(value, array) for value, array in zip(first.graph.inputs, arrays)]
        if first.above_bounds(env):
            if self.program.bounds == "strict":
                return SizeConstraintError(
                    f"inputs are above the exported bounds: {describe_given(first.graph, arrays)}",
                    where=self.where,
                    next='load the program with bounds="grow", or export it with larger bounds',
                )
            grown = self._grow(first, sizes)
            grown_env = None if grown is None else grown.bind(arrays)
            if grown is not None and grown_env is not None:
                return grown, grown_env
        wider = wider_sizes(first.graph, sizes)
        if wider is not None and all(each.sizes != wider for each in self.specializations):
            made_wider = self._tried(wider)
            wider_env = None if made_wider is None else made_wider.bind(arrays)
            if made_wider is not None and wider_env is not None:
                return made_wider, wider_env
        made = self._checked(sizes, arrays)
        return made, made.environment(arrays)

    def _outside(
        self, env: Mapping[Symbol, int], arrays: Sequence[Any]
    ) -> SizeConstraintError | None:
        """Why the graph does not hold for these sizes; None if it does."""
        above = self.specializations[0].above_bounds(env)
        return refused_sizes(
            self.graph, env, arrays, self.where, self.program.bounds, self.lenient, above
        )

    def _preferred(
        self, chosen: Specialization, env: dict[Symbol, int], arrays: Sequence[Any]
    ) -> Choice:
        """What served the last call of such sizes in place of `chosen`, if anything did."""
        other = chosen.preferred
        if other is not None and other in self.specializations:
            theirs = other.bind(arrays)
            if theirs is not None:
                return other, theirs
        return chosen, env

    def _grow(
        self, first: Specialization, sizes: Sequence[tuple[int, ...] | None]
    ) -> Specialization | None:
        """Lowers again with bounds that the sizes of a call keep: the exported ones, or the next
        power of two; None where the method does not take bounds of its own."""
        wanted = [
            None if given is None else tuple(map(_room, _dims_of(value), given))
            for value, given in zip(first.graph.inputs, sizes)
        ]
        level = logging.WARNING if self.program.bounds == "grow" else logging.DEBUG
        _log.log(
            level,
            "%s: inputs above the exported bounds; lowering again for larger ones",
            self.where,
        )
        return self._tried(wanted)

    def _tried(self, wanted: Sizes) -> Specialization | None:
        """A lowering for sizes and bounds; None where the method does not take them."""
        try:
            return self._prepare(wanted)
        except (FileFormatError, GraphError):
            return None

    def _checked(self, wanted: Sizes, arrays: Sequence[Any]) -> Specialization:
        try:
            return self._prepare(wanted)
        except (FileFormatError, GraphError) as error:
            # The file was sound within its bounds: it is these sizes that do not go together.
            raise InputError(
                f"the method does not take inputs of these sizes: {describe_given(self.graph, arrays)}",
                where=self.where,
                why=f"{error.what}: {error.why}",
                next="pass sizes that belong together and lie within the exported bounds",
            ) from error

    # -- calls -----------------------------------------------------------------------------------
    def run(
        self,
        chosen: Specialization,
        env: dict[Symbol, int],
        arrays: Sequence[Any],
        targets: Sequence[np.ndarray | None] | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Specialization, list[Any]]:
        """Runs a call, again with another plan where sizes that come about during it ask for one;
        returns what served it. `meanwhile` is called once, while the device runs.

        Raises:
            InputError: an index is out of range.
            DifferenceError: with PUREVK_CHECK, the device differs from eager torch.
        """
        try:
            return self._run(chosen, env, arrays, targets, meanwhile)
        except InputError as error:
            raise _with_line(error, chosen.imported) from error.__cause__

    def _run(
        self,
        chosen: Specialization,
        env: dict[Symbol, int],
        arrays: Sequence[Any],
        targets: Sequence[np.ndarray | None] | None,
        meanwhile: Callable[[], None] | None,
    ) -> tuple[Specialization, list[Any]]:
        chosen.check_indices(arrays, env, self.where)
        if not knobs.CHECK():
            return self.run_unchecked(chosen, env, arrays, targets, meanwhile)
        from purevk.checking.check import CallCheck, report_unchecked

        program = self.program
        check = CallCheck(program.context, chosen.imported, arrays, program.states, self.where)
        served, outputs = self.run_unchecked(chosen, env, arrays, targets, meanwhile)
        counts = check.compare(served.imported, outputs)
        if served.counts is None:
            report_unchecked(counts, self.where)
        served.counts = counts
        return served, outputs

    def run_unchecked(
        self,
        chosen: Specialization,
        env: dict[Symbol, int],
        arrays: Sequence[Any],
        targets: Sequence[np.ndarray | None] | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Specialization, list[Any]]:
        """`run` whatever PUREVK_CHECK is."""
        first = chosen
        for _ in range(MAX_REPLANS):
            values = {value: arrays[position] for position, value in chosen.tensors}
            try:
                outputs = chosen.executable.run(values, env, targets, meanwhile)
            except Replan as found:
                chosen = self._replanned(chosen, found, arrays)
                env = chosen.environment(arrays)
                continue
            self.calls += 1
            chosen.used = self.calls
            if chosen is not first:
                first.preferred = chosen
            return chosen, outputs
        raise InputError(
            f"the data-dependent sizes of this call needed {MAX_REPLANS} plans one after the other",
            where=self.where,
            next="bound them with torch._check in the model",
        )

    def run_external(
        self,
        calls: ExternalCalls,
        chosen: Specialization,
        env: dict[Symbol, int],
        tensors: Sequence[Any],
        targets: Sequence[Any] | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Runs a call with tensors of another API; see `Executable.run_external`."""
        values = {value: tensors[position] for position, value in chosen.tensors}
        try:
            chosen.check_indices(tensors, env, self.where)
            outputs = chosen.executable.run_external(calls, values, env, targets, meanwhile)
        except InputError as error:
            raise _with_line(error, chosen.imported) from error.__cause__
        self.calls += 1
        chosen.used = self.calls
        return outputs

    def _replanned(
        self, chosen: Specialization, found: Replan, arrays: Sequence[Any]
    ) -> Specialization:
        """What serves a call of whose sizes some became known only during it."""
        unbacked = {symbol.name: value for symbol, value in found.values.items()}
        for each in self.specializations:
            if each is not chosen and each.sizes == chosen.sizes:
                env = each.bind(arrays)
                if env is not None and each.admits(env, unbacked):
                    return each
        expected = dict(chosen.expected)
        for symbol, value in found.values.items():
            upper = symbol.upper if value <= symbol.upper else _next_power(value)
            expected[symbol.name] = Expected(upper, upper if found.outgrown else value, symbol.open)
        if found.outgrown:
            _log.warning("%s: %s is above what was planned for; lowering again", self.where, found)
        return self._prepare(chosen.sizes, expected)

    def close(self) -> None:
        """Releases the memory of calls."""
        for each in self.specializations:
            each.executable.close()
        self.specializations.clear()


def _sizes_of(value: Any, array: Any) -> tuple[int, ...] | None:
    """The sizes of an input to lower for; of an integer that sizes depend on, its value."""
    if isinstance(value, Dim):
        sized = any(symbol.is_size for symbol in _dims.symbols(value))
        return (array,) if sized and isinstance(array, int) else None
    return tuple(array.shape) if hasattr(array, "shape") else None


def _sizes_text(sizes: Sizes | None) -> str:
    """What a graph is lowered for, in a message."""
    if sizes is None:
        return "exported bounds"
    shown = (
        "any"
        if given is None
        else "x".join(f"..{size.upper}" if isinstance(size, Bound) else str(size) for size in given)
        for given in sizes
    )
    return f"inputs of sizes {', '.join(shown)}"


def _dims_of(value: Any) -> tuple[Size, ...]:
    """The sizes of an input; an integer counts as one."""
    return value.type.dims if isinstance(value, Value) else (value,)


def _room(size: Size, number: int) -> int | Bound:
    """What a size is lowered for so that `number` fits."""
    if isinstance(size, int):
        return size
    return Bound(_dims.upper(size) if number <= _dims.upper(size) else _next_power(number))


def _next_power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()

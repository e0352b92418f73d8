"""One exported graph of a method: lowered for the exported bounds, and again for calls that those
lowerings do not serve."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from purevk.errors import (
    FileFormatError,
    GraphError,
    InputError,
    KernelNotCachedError,
    OutOfDeviceMemoryError,
    SizeConstraintError,
    UnsupportedProgramError,
)
from purevk.graph.executable import Executable
from purevk.graph.unbacked import Replan
from purevk.ir import Bound, Dim, Graph, GuardLog, Size, Symbol, Value
from purevk.ir import dims as _dims
from purevk.ir import guards as _guards
from purevk.ir.expected import ROUNDED, Expected, rounding
from purevk.mapped import CUT_SHORT
from purevk.program.arguments import InputReader, describe_given, describe_inputs
from purevk.program.call import MethodCall
from purevk.program.plan_cache.cache import PlanCache
from purevk.program.variants.coverage import by_sizes, decided_by, wider_sizes
from purevk.program.variants.lowering import lower_graph, uncollected, with_line
from purevk.program.variants.ranges import refused_sizes
from purevk.program.variants.specialization import Sizes, Specialization, sizes_text
from purevk.schedule.plan import Lowered

if TYPE_CHECKING:
    from purevk.checking.check import CallCheck
    from purevk.program.program import Program

GraphSource = Callable[["Sizes | None"], Graph]
MAX_SPECIALIZATIONS = 8
MAX_REPLANS = 16
_log = logging.getLogger("purevk")


class Variant:
    """An exported graph of a method and its lowerings. A method made from a module has several where
    calls asked for other exports."""

    def __init__(self, program: Program, name: str, source: GraphSource) -> None:
        self.program, self.name, self.source = program, name, source
        self.specializations: list[Specialization] = []
        self.calls = 0
        self.used = 0
        self._rounded = ROUNDED
        self._undecided: list[
            Mapping[str, Expected]
        ] = []  # that gave lowerings which serve nothing
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
        with self.program.lock, reading(), uncollected():
            return self._lower(sizes, expected)

    def _lower(
        self, sizes: Sizes | None, expected: Mapping[str, Expected] | None
    ) -> Specialization:
        program = self.program
        lowered = self._cached_or_lowered(sizes, expected)
        program.admit(lowered.imported)
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
                where=f"{program.name}, method {self.name}, {sizes_text(sizes)}; {error.where}",
                why=error.why,
                next=error.next,
            ) from None
        program.executables.add(executable)
        for phase, seconds in executable.seconds.items():
            program.seconds[phase] = program.seconds.get(phase, 0.0) + seconds
        exported = self.specializations[0].graph if self.specializations else lowered.graph
        specialization = Specialization(
            lowered, executable, sizes, expected, self.lenient, exported
        )
        specialization.used = self.calls
        self.specializations.append(specialization)
        if len(self.specializations) > MAX_SPECIALIZATIONS:
            # The first one serves the exported bounds; of the others the one goes that was not used
            # for the longest time.
            oldest = min(self.specializations[1:-1], key=lambda specialization: specialization.used)
            self.specializations.remove(oldest)
            oldest.executable.close()
            program.release_unused()
        return specialization

    def _cached_or_lowered(
        self, sizes: Sizes | None, expected: Mapping[str, Expected] | None
    ) -> Lowered:
        """The method, lowered: as the cache has it, or anew."""
        program = self.program
        cache = PlanCache.of(program.context, self.source, program.leaves)
        start = time.perf_counter()
        key = (
            None
            if cache is None
            else cache.key(self.name, sizes, expected, program.shares_weights, program.round)
        )
        if cache is None or key is None:
            return self._lowered(sizes, expected)
        lowered = cache.get(key)
        program.add_seconds("plan", start)
        if lowered is None:
            lowered = self._lowered(sizes, expected)
            start = time.perf_counter()
            cache.put(key, lowered)
            program.add_seconds("plan", start)
        elif program.bounds == "strict":
            self._refuse_guesses(lowered.imported)
        return lowered

    def _lowered(self, sizes: Sizes | None, expected: Mapping[str, Expected] | None) -> Lowered:
        """The method, lowered anew."""
        program = self.program

        def imported() -> Graph:
            graph = program.share_leaves(self.name, self._fitting(sizes))
            if program.bounds == "strict":
                self._refuse_guesses(graph)
            return graph

        traits, add_seconds = program.context.traits, program.add_seconds
        return lower_graph(imported, traits, expected, add_seconds, program.round)

    def _fitting(self, sizes: Sizes | None) -> Graph:
        """The graph. Sizes without a bound are planned for less where a tensor would be larger than the
        device spans with one binding, if it is not at the sizes of the example.

        Raises:
            GraphError: it is at the bounds that are asked for.
        """
        from purevk.passes.placement import outgrows  # it imports all operators

        traits = self.program.context.traits
        tight = () if sizes is not None or self.program.bounds == "strict" else (1, 0)
        attempts: list[tuple[Graph, GuardLog]] = []
        for least in (self._rounded, *tight):
            with rounding(least), GuardLog() as log:
                graph = self.source(sizes)
            attempts.append((graph, log))
            is_open = any(upper is None for _, upper in graph.ranges.values())
            if not is_open or not any(outgrows(node, traits) for node in graph.nodes):
                self._rounded = least
                break
            bounds = [size for dims in sizes or () for size in dims or ()]
            if any(isinstance(size, Bound) for size in bounds):
                raise GraphError(
                    "at these bounds, a tensor is larger than one binding of the device"
                )
        else:
            graph, log = attempts[0]
        for guard in log.guards:  # without those of attempts with other bounds
            _guards.note(guard)
        return graph

    def _refuse_guesses(self, graph: Graph) -> None:
        for symbol in graph.symbols:
            if symbol.open or symbol.open_below:
                source = graph.symbols[symbol].value
                raise UnsupportedProgramError(
                    f"size {symbol} has no upper bound",
                    where=f"{self.program.name}, method {self.name}, {source!r}",
                    why='bounds="strict" plans memory once, and the size comes from the elements of a tensor',
                    next="write torch._check(n <= N) after n = ....item() in the model, or load it"
                    ' with bounds="exported"',
                )

    def read(self, inputs: Sequence[Any]) -> MethodCall:
        """A call with these inputs, one for each of the graph. Raises what refuses them."""
        call = self.reader.read(inputs)
        if isinstance(call, InputError):
            raise call
        call.variant = self
        return call

    # -- choosing --------------------------------------------------------------------------------
    def choose(self, call: MethodCall) -> SizeConstraintError | None:
        """Gives a call a lowering that serves its inputs: one that there is, or a new one. Returns why
        the graph does not hold for these sizes, if it does not.

        Args:
            call: its inputs have the fixed sizes of the graph.

        Raises:
            InputError: the sizes do not go together.
        """
        strategies = (
            self._present, self._refused, self._grown, self._wider, self._decided, self._exact,
        )  # fmt: skip
        for strategy in strategies:
            answer = strategy(call)
            if isinstance(answer, SizeConstraintError):
                return answer
            if answer:
                break
        return None

    def _serve(self, call: MethodCall, specialization: Specialization | None) -> bool:
        """Has a lowering serve a call, if it does."""
        env = None if specialization is None else specialization.bind(call.arrays)
        if specialization is None or env is None:
            return False
        call.serve(specialization, env)
        return True

    def _present(self, call: MethodCall) -> bool:
        """A lowering that there is, or what served the last call of such sizes in its place."""
        for specialization in self.specializations:
            if self._serve(call, specialization):
                preferred = specialization.preferred
                if preferred is not None and preferred in self.specializations:
                    self._serve(call, preferred)
                return True
        return False

    def _refused(self, call: MethodCall) -> SizeConstraintError | bool:
        """None, because the graph does not hold for these sizes."""
        first, arrays = self.specializations[0], call.arrays
        env = first.environment(arrays)
        refused = self._outside(env, arrays)
        if refused is None and self.program.bounds == "strict" and first.above_bounds(env):
            refused = SizeConstraintError(
                f"inputs are above the exported bounds: {describe_given(first.graph, arrays)}",
                where=self.where,
                next='load the program with bounds="grow", or export it with larger bounds',
            )
        return refused or False

    def _grown(self, call: MethodCall) -> bool:
        """A new one with bounds that the sizes keep, if they are above those so far: the exported
        ones, or the next power of two."""
        first = self.specializations[0]
        if not first.above_bounds(first.environment(call.arrays)):
            return False
        level = logging.WARNING if self.program.bounds == "grow" else logging.DEBUG
        _log.log(
            level,
            "%s: inputs above the exported bounds; lowering again for larger ones",
            self.where,
        )
        sizes = [
            None if dims is None else tuple(map(_room, _dims_of(value), dims))
            for value, dims in zip(first.graph.inputs, self._sizes_of(call.arrays))
        ]
        env = first.environment(call.arrays)
        return self._serve(call, self._tried(sizes, by_sizes(env)))

    def _wider(self, call: MethodCall) -> bool:
        """A new one for some sizes, which serves others too; see `wider_sizes`."""
        wider = wider_sizes(self.specializations[0].graph, self._sizes_of(call.arrays))
        if wider is None or any(present.sizes == wider for present in self.specializations):
            return False
        return self._serve(call, self._tried(wider))

    def _decided(self, call: MethodCall) -> bool:
        """A new one that decides by the sizes of the call; see `decided_by`."""
        first = self.specializations[0]
        env = first.environment(call.arrays)
        expected = decided_by(first.guards, env)
        if expected is None or expected in self._undecided:
            return False
        made = self._tried(None, expected)
        if self._serve(call, made):
            return True
        self._undecided = [*self._undecided[-31:], expected]
        if made in self.specializations[1:]:  # it serves no call: its memory is for the next one
            self.specializations.remove(made)
            made.executable.close()
            self.program.release_unused()
        return False

    def _exact(self, call: MethodCall) -> SizeConstraintError | bool:
        """A new one for these sizes alone."""
        arrays = call.arrays
        try:
            made = self._checked(self._sizes_of(arrays), arrays)
        except SizeConstraintError as error:
            return error  # sizes above the bounds break what the exporter decided
        if self._serve(call, made):
            return True
        env = made.environment(arrays)
        broken = next((guard for guard in made.guards if not guard.holds(env)), None)
        raise InputError(
            f"the method does not take inputs of these sizes: {describe_given(self.graph, arrays)}",
            where=self.where,
            why="they are outside of its bounds" if broken is None else broken.explain(env),
            next="pass sizes within the exported bounds",
        )

    def _sizes_of(self, arrays: Sequence[Any]) -> list[tuple[int, ...] | None]:
        return [_sizes_of(value, array) for value, array in zip(self.graph.inputs, arrays)]

    def check(self, arrays: Sequence[Any], outer: int = 0) -> None:
        """Raises `InputError` if a call with these inputs would, before it runs. Lowers nothing.

        Args:
            arrays: inputs that have the fixed sizes of the graph.
            outer: leading dims that messages about an element leave out.
        """
        first = self.specializations[0]
        env = first.environment(arrays)
        refused = self._outside(env, arrays)
        if refused is not None:
            raise refused
        first.check_indices(arrays, env, self.where, outer)

    def _outside(
        self, env: Mapping[Symbol, int], arrays: Sequence[Any]
    ) -> SizeConstraintError | None:
        """Why the graph does not hold for these sizes; None if it does."""
        above = self.specializations[0].above_bounds(env)
        return refused_sizes(
            self.graph, env, arrays, self.where, self.program.bounds, self.lenient, above
        )

    def _tried(
        self, sizes: Sizes | None, expected: Mapping[str, Expected] | None = None
    ) -> Specialization | None:
        """A lowering for sizes and bounds; None where the method does not take them, or the memory
        for them does not fit."""
        try:
            return self._prepare(sizes, expected)
        except OutOfDeviceMemoryError as error:
            _log.warning(
                "%s: memory for larger sizes than those of this call does not fit: %s",
                self.where,
                error.what,
            )
            return None
        except (FileFormatError, GraphError, SizeConstraintError):
            return None

    def _checked(self, sizes: Sizes, arrays: Sequence[Any]) -> Specialization:
        try:
            return self._prepare(sizes)
        except (FileFormatError, GraphError) as error:
            if error.what == CUT_SHORT:
                raise
            # The file was sound within its bounds: it is these sizes that do not go together.
            raise InputError(
                f"the method does not take inputs of these sizes: {describe_given(self.graph, arrays)}",
                where=self.where,
                why=f"{error.what}: {error.why}",
                next="pass sizes that belong together and lie within the exported bounds",
            ) from error

    # -- calls -----------------------------------------------------------------------------------
    def run(self, call: MethodCall) -> None:
        """Runs a call. Replans and reruns if data-dependent sizes ask for it: `call.chosen` is what
        served it in the end.

        Raises:
            InputError: an index is out of range.
            DifferenceError: with PUREVK_CHECK, the device differs from eager torch.
        """
        first = call.chosen
        call.aim()
        try:
            first.check_indices(call.arrays, call.env, self.where)
            check = self._check_of(call) if call.checked else None
            for _ in range(MAX_REPLANS):
                executable = call.chosen.executable
                try:
                    if call.external is None:
                        call.results = executable.run(call)
                    else:
                        call.results = executable.run_external(call.external, call)
                    break
                except Replan as replan:
                    chosen = self._replanned(call.chosen, replan, call.arrays)
                    call.serve(chosen, chosen.environment(call.arrays))
            else:
                raise InputError(
                    f"the data-dependent sizes of this call needed {MAX_REPLANS} plans one after the"
                    " other",
                    where=self.where,
                    next="bound them with torch._check in the model",
                )
            self.calls += 1
            call.chosen.used = self.calls
            if call.chosen is not first:
                first.preferred = call.chosen
            if check is not None:
                self._compare(check, call)
        except InputError as error:
            raise with_line(error, first.imported) from error.__cause__

    def _check_of(self, call: MethodCall) -> CallCheck:
        from purevk.checking.check import CallCheck

        program = self.program
        return CallCheck(
            program.context, call.chosen.imported, call.arrays, program.states, self.where
        )

    def _compare(self, check: CallCheck, call: MethodCall) -> None:
        """Compares the nodes and the results of a call with eager torch."""
        from purevk.checking.check import report_unchecked

        served = call.chosen
        counts = check.compare(served.imported, call.results)
        if served.counts is None:
            report_unchecked(counts, self.where)
        served.counts = counts

    def _replanned(
        self, chosen: Specialization, replan: Replan, arrays: Sequence[Any]
    ) -> Specialization:
        """What serves a call of whose sizes some became known only during it."""
        unbacked = {symbol.name: value for symbol, value in replan.values.items()}
        for specialization in self.specializations:
            if specialization is not chosen and specialization.sizes == chosen.sizes:
                env = specialization.bind(arrays)
                if env is not None and specialization.admits(env, unbacked):
                    return specialization
        expected = dict(chosen.expected)
        for symbol, value in replan.values.items():
            upper = symbol.upper if value <= symbol.upper else _next_power(value)
            if symbol.open_below and replan.outgrown:
                expected[symbol.name] = Expected.below(upper, min(value, symbol.lower), symbol.open)
                continue
            hint, lower = upper if replan.outgrown else value, None
            if symbol.open_below:
                lower = symbol.lower
            expected[symbol.name] = Expected(upper, hint, symbol.open, lower)
        if replan.outgrown:
            below = any(value < symbol.lower for symbol, value in replan.values.items())
            side = "below" if below else "above"
            text = "%s: %s is %s what was planned for; lowering again"
            _log.warning(text, self.where, replan, side)
        if expected == chosen.expected:
            # It is lowered for these values: what it decides depends on sizes of inputs, too.
            sizes = self._sizes_of(arrays)
            if sizes != chosen.sizes:
                fixed = (
                    specialization
                    for specialization in self.specializations
                    if specialization.sizes == sizes
                )
                return next(fixed, None) or self._prepare(sizes)  # its symbols have other names
        return self._prepare(chosen.sizes, expected)

    def close(self) -> None:
        """Releases the memory of calls."""
        for specialization in self.specializations:
            specialization.executable.close()
        self.specializations.clear()


def _sizes_of(value: Any, array: Any) -> tuple[int, ...] | None:
    """The sizes of an input to lower for; of an integer that sizes depend on, its value."""
    if isinstance(value, Dim):
        sized = any(symbol.is_size for symbol in _dims.symbols(value))
        return (array,) if sized and isinstance(array, int) else None
    return tuple(array.shape) if hasattr(array, "shape") else None


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

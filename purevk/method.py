"""One method of a program: lowered for the exported bounds, and again for calls that those do not
serve."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from purevk.errors import FileFormatError, GraphError, InputError, UnsupportedProgramError
from purevk.graph.executable import Executable
from purevk.graph.learning import Replan
from purevk.inputs import (
    Given,
    describe_given,
    describe_inputs,
    read_inputs,
    read_outputs,
    write_back,
)
from purevk.ir import Bound, Graph, Guard, GuardLog, Symbol, Value
from purevk.ir import dims as _dims
from purevk.ir.expected import Expected, expecting
from purevk.passes.pipeline import optimize
from purevk.schedule.plan import make_plan

if TYPE_CHECKING:
    from purevk.program import Program

# Sizes of the inputs to lower for, by position: integers are fixed, a `Bound` is a new upper bound
# of a dynamic size. None stands for the exported bounds.
Sizes = Sequence["tuple[int | Bound, ...] | None"]
GraphSource = Callable[["Sizes | None"], Graph]
MAX_SPECIALIZATIONS = 8
MAX_REPLANS = 16
_log = logging.getLogger("purevk")


class Specialization:
    """A method lowered under guards: it serves calls whose sizes keep them and the symbols' bounds.

    Attributes:
        sizes, expected: what it was lowered for; see `Method`.
        preferred: the one for the same sizes that served the last call which this one turned out
            not to serve.
        used: when it served a call, as a count of calls.
    """

    def __init__(
        self,
        graph: Graph,
        guards: Sequence[Guard],
        executable: Executable,
        sizes: Sizes | None = None,
        expected: Mapping[str, Expected] | None = None,
    ) -> None:
        self.graph, self.guards, self.executable = graph, tuple(guards), executable
        self.sizes, self.expected = sizes, dict(expected or {})
        self.preferred: Specialization | None = None
        self.used = 0
        self._outer = [
            guard
            for guard in self.guards
            if all(s.is_size and not s.learned for s in guard.symbols)
        ]
        self._known: dict[tuple[int, ...], bool] = {}
        executable.watch(self.guards)

    def environment(self, arrays: Sequence[Any]) -> dict[Symbol, int]:
        """The values of the symbols that the inputs of a call bring."""
        env: dict[Symbol, int] = {}
        place = {id(value): n for n, value in enumerate(self.graph.inputs)}
        for symbol, source in self.graph.symbols.items():
            if source.value is None:
                if source.element < len(arrays) and isinstance(arrays[source.element], int):
                    env[symbol] = arrays[source.element]
            elif id(source.value) in place:
                array = arrays[place[id(source.value)]]
                if source.dim is not None:
                    env[symbol] = array.shape[source.dim]
                else:
                    env[symbol] = int(array.reshape(-1)[source.element])
        return env

    def takes(self, arrays: Sequence[Any]) -> bool:
        """Whether the inputs have the sizes that are fixed here."""
        return all(
            not isinstance(value, Value)
            or not isinstance(array, np.ndarray)
            or all(
                not isinstance(size, int) or size == given
                for size, given in zip(value.type.dims, array.shape)
            )
            for value, array in zip(self.graph.inputs, arrays)
        )

    def above_bounds(self, env: Mapping[Symbol, int]) -> bool:
        """Whether a size of a call is above its symbol's bound."""
        return any(symbol.is_size and env[symbol] > symbol.upper for symbol in env)

    def serves(self, env: Mapping[Symbol, int]) -> bool:
        """Whether the sizes of a call keep the bounds and the guards."""
        key = tuple(env[symbol] for symbol, _ in self.executable.input_symbols if symbol.is_size)
        found = self._known.get(key)
        if found is None:
            found = all(
                symbol.lower <= env[symbol] <= symbol.upper for symbol in env if symbol.is_size
            )
            found = found and all(guard.holds(env) for guard in self._outer)
            self._known[key] = found
        return found

    def admits(self, env: Mapping[Symbol, int], learned: Mapping[str, int]) -> bool:
        """Whether sizes that came about during a call, by the names of their symbols, keep the
        bounds and the guards too."""
        inner = {
            symbol: learned[symbol.name] for symbol in self.graph.symbols if symbol.name in learned
        }
        whole = {**env, **inner}
        return all(
            symbol.lower <= value <= symbol.upper for symbol, value in inner.items()
        ) and all(guard.holds(whole) for guard in self.guards if guard.symbols <= set(whole))


class Method:
    """One method of a program. Call it with tensors."""

    def __init__(self, program: Program, name: str, source: GraphSource) -> None:
        self.program, self.name, self.source = program, name, source
        self.specializations: list[Specialization] = []
        self._calls = 0
        self.described: str | None = None  # its inputs, for messages
        self.lock = threading.RLock()
        self.graph: Graph = self._prepare(None).graph
        if self.graph.labels:
            self.lock = program.state_lock

    # -- lowering ---------------------------------------------------------------------------------
    def _prepare(
        self, sizes: Sizes | None, expected: Mapping[str, Expected] | None = None
    ) -> Specialization:
        with (
            self.program.lock
        ):  # methods share weights, and a call holds the lock of its own method alone
            return self._lower(sizes, expected)

    def _lower(
        self, sizes: Sizes | None, expected: Mapping[str, Expected] | None
    ) -> Specialization:
        program = self.program
        with GuardLog() as log, expecting(expected or {}):
            start = time.perf_counter()
            imported = program.share_leaves(self.name, self.source(sizes))
            program.add_seconds("import", start)
            if program.bounds == "strict":
                self._refuse_guesses(imported)
            start = time.perf_counter()
            graph = optimize(imported, program.context.traits)
            program.add_seconds("passes", start)
            start = time.perf_counter()
            plan = make_plan(graph, program.context.traits)
            program.add_seconds("lower", start)
        executable = Executable(
            program.context, plan, program.weights, program.states, program.progress
        )
        for phase, seconds in executable.seconds.items():
            program.seconds[phase] = program.seconds.get(phase, 0.0) + seconds
        made = Specialization(graph, list(log.guards), executable, sizes, expected)
        made.used = self._calls
        self.specializations.append(made)
        if len(self.specializations) > MAX_SPECIALIZATIONS:
            # The first one serves the exported bounds; of the others the one goes that was not used
            # for the longest time.
            oldest = min(self.specializations[1:-1], key=lambda each: each.used)
            self.specializations.remove(oldest)
            oldest.executable.close()
        return made

    def _refuse_guesses(self, graph: Graph) -> None:
        for symbol in graph.symbols:
            if symbol.open:
                source = graph.symbols[symbol].value
                raise UnsupportedProgramError(
                    f"size {symbol} has no upper bound",
                    where=f"{self.program.name}, method {self.name}, {source!r}",
                    why='bounds="strict" plans memory once, and the size comes from the elements of a tensor',
                    next='write torch._check(n <= N) after n = ....item() in the model, or load it with bounds="grow"',
                )

    # -- calls ------------------------------------------------------------------------------------
    def __call__(self, *inputs: Any, out: Any = None) -> Any:
        """Runs the method. Several threads may call; the calls take effect one after the other.

        Args:
            inputs: one for each input of the method, in order: numpy arrays, torch tensors, or
                anything with `__dlpack__` (in the memory of the CPU), `__array_interface__`,
                `__array__` or the buffer protocol; integers where the method takes integers. Their
                dtypes must be the method's; dynamic sizes may be anything up to the exported
                bounds. Beyond them the method is lowered again for larger ones, unless the program
                was loaded with `bounds="strict"`.
            out: a numpy array or torch tensor for the result to be written to, or a list of one (or
                None) for each output. It has the result's dtype and sizes; any strides will do.

        Returns:
            The output, or a tuple of several: what `out` gave, else torch tensors if an input was
            one, else numpy arrays (bfloat16 as the bits, in uint16, unless an input brought a dtype
            for it). They are the caller's: no later call writes to them. Inputs that the method
            writes have their new elements.

        Raises:
            InputError: number, rank, dtype or size of the inputs, or of `out`, is wrong.
        """
        targets = None if out is None else read_outputs(self, out)
        self.program.settle()
        results = self._update(inputs, self._call(read_inputs(self, inputs), targets))
        if out is not None:
            kept = out if isinstance(out, (tuple, list)) else [out]
            results = tuple(new if old is None else old for old, new in zip(kept, results))
        return results[0] if len(results) == 1 else results

    def submit(self, *inputs: Any) -> Future[Any]:
        """Starts a call and returns at once, so that the next inputs can be prepared meanwhile.

        The inputs are copied now; those that the method writes have their new elements when the
        call is finished. Calls run in the order in which they were made, those of all methods of
        the program and those without `submit` included, so states change in that order. At most
        `Program.in_flight` calls are unfinished: if there are as many, this waits for one to
        finish.

        Returns:
            A `concurrent.futures.Future`: `result(timeout=None)` waits and gives what `__call__`
            returns, or raises what it raises; `done()`, `cancel()` (while it has not started),
            `add_done_callback()`.

        Raises:
            PurevkError: the program is closed.
        """

        def call(given: Given) -> Any:
            results = self._update(inputs, self._call(given))
            return results[0] if len(results) == 1 else results

        return self.program.submissions.submit(lambda: read_inputs(self, inputs).owned(), call)

    def _update(self, inputs: Sequence[Any], results: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gives the inputs that the method writes their new elements; the results that are left."""
        updates = self.graph.updates
        count = len(results) - len(updates)
        if updates:
            write_back(inputs, updates, results[count:])
        return results[:count]

    def _call(
        self, given: Given, targets: Sequence[np.ndarray | None] | None = None
    ) -> tuple[Any, ...]:
        """One call with checked inputs; the results as the caller expects them."""
        with self.lock:
            self.program.check_open()
            chosen, env = self._choose(given.arrays)
            chosen, outputs = self._run(chosen, env, given.arrays, targets)
        return tuple(
            given.convert(output, chosen.graph.outputs[n]) for n, output in enumerate(outputs)
        )

    def _run(
        self,
        chosen: Specialization,
        env: dict[Symbol, int],
        arrays: Sequence[Any],
        targets: Sequence[np.ndarray | None] | None,
    ) -> tuple[Specialization, list[Any]]:
        """Runs a call, again with another plan where sizes that come about during it ask for one;
        returns what served it."""
        first = chosen
        for _ in range(MAX_REPLANS):
            values = {
                value: array
                for value, array in zip(chosen.graph.inputs, arrays)
                if isinstance(value, Value)
            }
            try:
                outputs = chosen.executable.run(values, env, targets)
            except Replan as found:
                chosen = self._replanned(chosen, found, arrays)
                env = chosen.environment(arrays)
                continue
            self._calls += 1
            chosen.used = self._calls
            if chosen is not first:
                first.preferred = chosen
            return chosen, outputs
        raise InputError(
            f"the sizes that this call brought about asked for {MAX_REPLANS} plans one after the other",
            where=f"{self.program.name}, method {self.name}",
            next="bound them with torch._check in the model",
        )

    def _replanned(
        self, chosen: Specialization, found: Replan, arrays: Sequence[Any]
    ) -> Specialization:
        """What serves a call of whose sizes some became known only during it."""
        learned = {symbol.name: value for symbol, value in found.values.items()}
        for each in self.specializations:
            if each is not chosen and each.sizes == chosen.sizes and each.takes(arrays):
                env = each.environment(arrays)
                if each.serves(env) and each.admits(env, learned):
                    return each
        expected = dict(chosen.expected)
        for symbol, value in found.values.items():
            upper = symbol.upper if value <= symbol.upper else _next_power(value)
            expected[symbol.name] = Expected(upper, upper if found.outgrown else value, symbol.open)
        if found.outgrown:
            _log.warning(
                "%s, method %s: %s is above what was planned for; lowering again",
                self.program.name,
                self.name,
                found,
            )
        return self._prepare(chosen.sizes, expected)

    def _choose(self, arrays: Sequence[Any]) -> tuple[Specialization, dict[Symbol, int]]:
        """What serves the inputs, with the values of its symbols; lowered now if nothing does."""
        for each in self.specializations:
            if each.takes(arrays):
                env = each.environment(arrays)
                if each.serves(env):
                    return self._preferred(each, env, arrays)
        first = self.specializations[0]
        sizes = [tuple(array.shape) if isinstance(array, np.ndarray) else None for array in arrays]
        if first.above_bounds(first.environment(arrays)):
            grown = self._grow(first, sizes, arrays)
            env = {} if grown is None else grown.environment(arrays)
            if grown is not None and grown.serves(env):
                return grown, env
        made = self._checked(sizes, arrays)
        return made, made.environment(arrays)

    def _preferred(
        self, chosen: Specialization, env: dict[Symbol, int], arrays: Sequence[Any]
    ) -> tuple[Specialization, dict[Symbol, int]]:
        """What served the last call of such sizes in place of `chosen`, if anything did."""
        other = chosen.preferred
        if other is not None and other in self.specializations:
            theirs = other.environment(arrays)
            if other.serves(theirs):
                return other, theirs
        return chosen, env

    def _grow(
        self, first: Specialization, sizes: list[tuple[int, ...] | None], arrays: Sequence[Any]
    ) -> Specialization | None:
        """Lowers again with bounds that the sizes of a call keep: the exported ones, or the next
        power of two; None where the method does not take bounds of its own."""
        wanted: list[tuple[int | Bound, ...] | None] = []
        for value, given in zip(first.graph.inputs, sizes):
            if not isinstance(value, Value) or given is None:
                wanted.append(None)
                continue
            wanted.append(
                tuple(
                    size
                    if isinstance(size, int)
                    else Bound(
                        _dims.upper(size) if number <= _dims.upper(size) else _next_power(number)
                    )
                    for size, number in zip(value.type.dims, given)
                )
            )
        where = f"{self.program.name}, method {self.name}({describe_inputs(self.graph)})"
        if self.program.bounds == "strict":
            raise InputError(
                f"inputs are above the exported bounds: {describe_given(first.graph, arrays)}",
                where=where,
                next='load the program with bounds="grow", or export it with larger bounds',
            )
        level = logging.WARNING if self.program.bounds == "grow" else logging.DEBUG
        _log.log(
            level, "%s: inputs above the exported bounds; lowering again for larger ones", where
        )
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
                where=f"{self.program.name}, method {self.name}({describe_inputs(self.graph)})",
                why=f"{error.what}: {error.why}",
                next="pass sizes that belong together and lie within the exported bounds",
            ) from error

    @property
    def executable(self) -> Executable:
        """What runs calls within the exported bounds."""
        return self.specializations[0].executable

    def close(self) -> None:
        """Waits for a call that runs, and releases the memory of calls."""
        with self.lock:
            for each in self.specializations:
                each.executable.close()
            self.specializations.clear()

    def __repr__(self) -> str:
        return f"<Method {self.name}({describe_inputs(self.graph)})>"


def _next_power(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()

"""One method of a program: what a user calls."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from purevk.errors import InputError, PurevkError, StaleStateError
from purevk.graph.call import Call
from purevk.graph.executable import Executable
from purevk.ir import FixedInput, Graph, Value
from purevk.ir.signature import same_literal
from purevk.plain_text import printable
from purevk.program.arguments import describe_inputs
from purevk.program.call import MethodCall, returned
from purevk.program.cuda import external_calls
from purevk.program.outputs import read_outputs
from purevk.program.specs import ArgumentSpec, input_specs, output_specs
from purevk.program.variants.specialization import Sizes, Specialization
from purevk.program.variants.variant import GraphSource, Variant

if TYPE_CHECKING:
    from purevk.program.program import Program

MAX_VARIANTS = 8
MAX_ATTEMPTS = 8
_log = logging.getLogger("purevk")


@runtime_checkable
class ExportsAgain(Protocol):
    """A source of graphs that can export its module again for a call that no graph so far takes."""

    def __call__(self, sizes: Sizes | None) -> Graph: ...

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any], bounds: str) -> GraphSource:
        """A source for calls like this one.

        Raises:
            InputError: the module does not take such a call.
        """
        ...


class Method:
    """One method of a program. Call it with tensors.

    Attributes:
        variants: exported graphs; the first is that of the example inputs, others come from calls
            that it does not take.
    """

    def __init__(self, program: Program, name: str, source: GraphSource) -> None:
        self.program, self.name, self.source = program, name, source
        self.lock = threading.RLock()
        self.variants = [Variant(program, name, source)]
        self._calls = 0
        self._warned = False
        if self.graph.labels:
            self.lock = program.state_lock

    @property
    def graph(self) -> Graph:
        """The graph for the example inputs, after all passes."""
        return self.variants[0].graph

    @property
    def specializations(self) -> list[Specialization]:
        """All lowerings, those for the exported bounds first."""
        return [
            specialization
            for variant in self.variants
            for specialization in variant.specializations
        ]

    @property
    def executable(self) -> Executable:
        """What runs calls within the exported bounds."""
        return self.variants[0].specializations[0].executable

    @property
    def inputs(self) -> list[ArgumentSpec]:
        """The inputs: names, dtypes, sizes and their bounds."""
        return input_specs(self.graph)

    @property
    def outputs(self) -> list[ArgumentSpec]:
        """The outputs: names, dtypes and sizes."""
        return output_specs(self.graph)

    # -- calls -----------------------------------------------------------------------------------
    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Runs the method. Several threads may call; the calls take effect one after the other.

        Args:
            args, kwargs: as the exported module takes them, by position or by name, nested as it
                takes them. Tensors are numpy arrays, torch tensors, or anything with `__dlpack__`
                (in the memory of the CPU), `__array_interface__`, `__array__` or the buffer
                protocol. Their dtypes must be the method's. Dynamic sizes may be anything within
                the exported bounds, and keep what the exporter decided from the example inputs; see
                `purevk.load` for `bounds`. Python values that export made part of the graph must be
                those of the export. A program made from a module exports it again where a call
                does not fit.
            out: a numpy array or torch tensor for the result to be written to, or a list of one (or
                None) for each output. It has the result's dtype and sizes; any strides will do.

        Returns:
            What the model returns, nested as there: what `out` gave, else torch tensors if an input
            was one, else numpy arrays (bfloat16 as the bits, in uint16, unless an input brought a
            dtype for it). They are the caller's: no later call writes to them. Inputs that the
            method writes have their new elements.

        Raises:
            InputError: names, number, nesting, rank or dtype of the inputs, or of `out`, is wrong.
            SizeConstraintError: sizes are outside of what the model was exported for.
            StaleStateError: the method writes states, and the module was changed before the call in a
                way that torch does not count.
        """
        profiler: Any = sys.modules.get("torch.autograd.profiler")
        if not getattr(profiler, "_is_profiler_enabled", False):
            return self._called(args, kwargs, out)
        with profiler.record_function(f"purevk {self.program.name}: {self.name}"):
            return self._called(args, kwargs, out)

    def _called(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        self.program.begin_call()
        for attempt in itertools.count(1):
            call = self._read(args, kwargs, out)
            # Weights that change all the time are as they were when the call began.
            call.compares = attempt < MAX_ATTEMPTS and not call.checked
            try:
                self._run(call)
                break
            except _StaleWeights as stale:
                self.program.refresh()
                if stale.written:
                    raise stale.error(call.variant.where) from None
        return call.finish(out)

    def run_flat(
        self, inputs: Sequence[Any], targets: Sequence[np.ndarray | None] | None = None
    ) -> tuple[Any, ...]:
        """Runs the method on a flat list: one value for each of `Method.inputs`, in order. Returns
        the outputs as a flat tuple: `targets` has an array for each to be written to, or None.
        Raises what `__call__` raises."""
        self.program.settle()
        self.program.refresh()
        call = self.variants[0].read(inputs)
        call.out = targets
        self._run(call)
        return tuple(call.finish_flat())

    def check_flat(self, inputs: Sequence[Any], outer: int = 0) -> None:
        """Raises `InputError` if `run_flat` would for these inputs, before it runs: for dtypes,
        sizes, bounds and indices. Runs and lowers nothing. Messages about an element leave out
        `outer` leading dims."""
        variant = self.variants[0]
        variant.check(variant.read(inputs).arrays, outer)

    def serving(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Specialization, list[Any]]:
        """The lowering that serves a call with these arguments, made now if there is none, and the
        inputs as arrays of the host. Raises what `__call__` raises."""
        return self._serving(self._read(args, kwargs))

    def serving_flat(self, inputs: Sequence[Any]) -> tuple[Specialization, list[Any]]:
        """The same for a flat list of inputs, as `run_flat` takes it."""
        return self._serving(self.variants[0].read(inputs))

    def _serving(self, call: MethodCall) -> tuple[Specialization, list[Any]]:
        with self.lock:
            self.program.check_open()
            self._choose(call)
        call.to_host()
        return call.chosen, call.arrays

    def submit(self, *args: Any, out: Any = None, **kwargs: Any) -> Future[Any]:
        """Starts a call and returns at once, so that the next inputs can be prepared meanwhile.

        The inputs are copied now; those that the method writes, and `out`, have their new elements
        when the call is finished. Calls run in the order in which they were made, those of all methods of
        the program and those without `submit` included, so states change in that order. At most
        `Program.in_flight` calls are unfinished: if there are as many, this waits for one to
        finish.

        Args:
            args, out, kwargs: as `__call__` takes them.

        Returns:
            A `concurrent.futures.Future`: `result(timeout=None)` waits and gives what `__call__`
            returns, or raises what it raises; `done()`, `cancel()` (while it has not started),
            `add_done_callback()`.

        Raises:
            PurevkError: the program is closed.
        """
        self.program.check_open()

        def prepare() -> MethodCall:
            self.program.refresh()  # waits for the calls before, if there is something to copy
            call = self._read(args, kwargs, out)
            call.own(self.program.host_memory)
            return call

        def run(call: MethodCall) -> Any:
            self._run(call)
            return call.finish(out)

        return self.program.submissions.submit(prepare, run)

    def start(self, *args: Any) -> Callable[[], Any]:
        """Submits a call to the device and returns at once: a function that waits for it and gives
        what `__call__` does, as numpy arrays.

        The device goes on with the call while the host starts the next one. It runs calls in their
        order. Where the host has a part in a call, or an index of it may be out of range, the call
        runs before this returns.

        Args:
            args: as `__call__` takes them.

        Raises:
            PurevkError: as `__call__`.
        """
        self.program.check_open()
        self.program.settle()
        call = self._read(args, {})
        with self.lock:
            self.program.check_open()
            self._choose(call)
            executable, overlaps = call.chosen.executable, False
            plain = call.device is None and not call.graph.updates and not call.checked
            if plain and self.program.weight_watch is None:
                overlaps = executable.overlapped is not None
            if overlaps:
                call.chosen.check_indices(call.arrays, call.env, call.variant.where)
                self._calls += 1
                call.variant.used = self._calls
                started = executable.start(Call(call.tensors, call.env))
                graph = call.graph
                return lambda: returned(graph, started.result())
        results = self(*args)
        return lambda: results

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any = None) -> MethodCall:
        """A call with these arguments, read by a variant that takes their form."""
        call = self._find(args, kwargs)
        if isinstance(call, InputError):
            with self.lock:
                call = self._find(args, kwargs)  # another thread may have exported it meanwhile
                if isinstance(call, InputError):
                    variant = self._export_again(args, kwargs, call)
                    call = variant.reader.read_call(args, kwargs)
                    if isinstance(call, InputError):
                        raise call
                    call.variant = variant
        if out is not None:
            call.out = read_outputs(call.graph, out, call.variant.where)
        return call

    def _find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MethodCall | InputError:
        """What `_read` returns, from the variants that there are; else why the first one refuses."""
        refused: InputError | None = None
        for variant in tuple(self.variants):
            call = variant.reader.read_call(args, kwargs)
            if not isinstance(call, InputError):
                call.variant = variant
                return call
            refused = refused or call
        return refused or InputError("the program is closed", where=self.name)

    def _export_again(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], refused: PurevkError
    ) -> Variant:
        """A variant for a call that none takes so far; raises `refused` where there is no module."""
        self.program.check_open()
        if not isinstance(self.source, ExportsAgain):
            raise refused
        _log.info("%s: %s; exporting the module again", self.variants[0].where, refused.what)
        source = self.source.again(args, kwargs, self.program.bounds)
        variant = Variant(self.program, self.name, source)
        if self.program.weight_watch is not None:
            self.program.weight_watch.include(source)
        variant.used = self._calls
        self.variants.append(variant)
        if len(self.variants) > MAX_VARIANTS:
            oldest = min(self.variants[1:-1], key=lambda variant: variant.used)
            self.variants.remove(oldest)
            oldest.close()
            self.program.release_unused()
            if not self._warned:
                self._warned = True
                _log.warning(
                    "%s: calls have asked for more than %d exports; pass tensors in place of Python"
                    " numbers that change, or declare dynamic dims",
                    self.variants[0].where,
                    MAX_VARIANTS,
                )
        return variant

    def _run(self, call: MethodCall) -> None:
        """Runs a call whose inputs were read.

        Raises:
            _StaleWeights: the weights are not those of the module. Nothing has been given to the
                caller.
        """
        with self.lock:
            self.program.check_open()
            self._choose(call)
            if call.compares:
                call.on_submit = self._comparison(call.graph)
            if call.device is not None:
                if not call.checked:
                    context, executable = self.program.context, call.chosen.executable
                    call.external = external_calls(context, executable, call.device)
                if call.external is None:
                    call.to_host()
                    call.serve(call.chosen, call.env)
            call.variant.run(call)
            self._calls += 1
            call.variant.used = self._calls

    def _comparison(self, graph: Graph) -> Callable[[], None] | None:
        """What compares the weights with those of the module while the device runs.

        A call that writes states cannot be repeated. So what takes some microseconds is compared
        before it: versions, addresses and identities of tensors.
        """
        watch = self.program.weight_watch
        if watch is None:
            return None
        states = bool(graph.states)
        if states and watch.written():
            raise _StaleWeights(written=False)
        differs = watch.altered if states else watch.changed

        def compare() -> None:
            if differs():
                raise _StaleWeights(written=states)

        return compare

    def _choose(self, call: MethodCall) -> None:
        """Gives a call the variant and the lowering that serve its sizes."""
        variant, refused = call.variant, None
        if variant in self.variants:
            refused = variant.choose(call)
            if refused is None:
                return
            if not isinstance(self.source, ExportsAgain):
                raise refused
        # It does not serve the call, or another thread replaced it meanwhile.
        for other in self.variants:
            if other is variant or not _alike(other.graph, variant.graph):
                continue
            why = other.reader.refused_sizes(call.arrays) or other.choose(call)
            if why is None:
                call.variant, call.graph = other, other.graph
                return
            refused = refused or why
        other = self._for_inputs(
            call,
            refused or PurevkError("the weights changed during the call", where=variant.where),
        )
        why = other.choose(call)
        if why is not None:
            raise why
        call.variant, call.graph = other, other.graph

    def _for_inputs(self, call: MethodCall, refused: PurevkError) -> Variant:
        """A new variant for the inputs of a call."""
        signature = call.graph.signature
        if signature is None:
            raise refused
        args, kwargs = signature.arguments(call.leaves())
        return self._export_again(args, kwargs, refused)

    def restart(self) -> None:
        """Lowers the graph for the example inputs again; other variants are exported when a call
        asks for them."""
        self.variants = [Variant(self.program, self.name, self.source)]

    def close(self) -> None:
        """Waits for a call that runs, and releases the memory of calls."""
        with self.lock:
            for variant in self.variants:
                variant.close()

    def __repr__(self) -> str:
        return printable(f"<Method {self.name}({describe_inputs(self.graph)})>")


def _alike(first: Graph, two: Graph) -> bool:
    """Whether two graphs take arguments of the same form."""
    if first.signature != two.signature or first.updates != two.updates:
        return False
    if first.signature is not None and two.signature is not None:
        if not first.signature.outputs.is_like(two.signature.outputs):
            return False
        if not all(
            method.tree.is_like(method_.tree)
            for method, method_ in zip(first.signature.parameters, two.signature.parameters)
        ):
            return False
        theirs = two.signature.defaults
        if not all(same_literal(value, theirs[k]) for k, value in first.signature.defaults.items()):
            return False
    return all(_same_input(a, b) for a, b in zip(first.inputs, two.inputs))


def _same_input(first: Any, two: Any) -> bool:
    if isinstance(first, Value) and isinstance(two, Value):
        return first.type.dtype is two.type.dtype
    if isinstance(first, FixedInput) and isinstance(two, FixedInput):
        return same_literal(first.value, two.value)  # True is not 1
    return type(first) is type(two)  # integers: a variant has the bounds of its export


class _StaleWeights(Exception):
    """The weights on the device are not those of the module.

    Args:
        written: whether the call has written states with them.
    """

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.written = written

    def error(self, where: str) -> StaleStateError:
        return StaleStateError(
            "the module was changed before this call, and the call has written states without it",
            where=where,
            why="torch does not count writes through .data or numpy, nor changes of attributes, so"
            " they were noticed only while the device ran",
            next="call program.refresh() after such a change. The new weights are on the device now;"
            " give the states their content again: program.reset_state(), program.load_state(path)",
        )

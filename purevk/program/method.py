"""One method of a program: what a user calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from purevk.errors import InputError, PurevkError, SignatureError, SizeConstraintError
from purevk.graph.executable import Executable
from purevk.ir import FixedInput, Graph, Value
from purevk.ir.signature import same_literal
from purevk.program.arguments import (
    Given,
    bind,
    describe_inputs,
    read_inputs,
    read_outputs,
    write_back,
)
from purevk.program.specs import ArgumentSpec, input_specs, output_specs
from purevk.program.variant import GraphSource, Sizes, Specialization, Variant

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
        return [each for variant in self.variants for each in variant.specializations]

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
        """
        self.program.check_open()
        self.program.settle()
        for attempt in range(MAX_ATTEMPTS):
            variant, inputs, given = self._read(args, kwargs)
            targets = None if out is None else read_outputs(variant.graph, out, variant.where)
            variant, outputs, fresh = self._call(variant, given, targets)
            if fresh or (outputs and attempt == MAX_ATTEMPTS - 1):
                break  # weights that change all the time are as they were when the call began
            self.program.refresh()
        results = _update(variant.graph, inputs, outputs)
        if out is not None:
            kept = out if isinstance(out, (tuple, list)) else [out]
            results = tuple(new if old is None else old for old, new in zip(kept, results))
        return _returned(variant.graph, results)

    def run_flat(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Runs the method on a flat list: one value for each of `Method.inputs`, in order. Returns
        the outputs as a flat tuple. Raises what `__call__` raises."""
        self.program.settle()
        self.program.refresh()
        variant = self.variants[0]
        given = read_inputs(variant.graph, inputs, variant.where)
        variant, outputs, _ = self._call(variant, given)
        return _update(variant.graph, inputs, outputs)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
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

        self.program.check_open()

        def prepare() -> tuple[Variant, Sequence[Any], Given]:
            self.program.refresh()  # waits for the calls before, if there is something to copy
            variant, inputs, given = self._read(args, kwargs)
            return variant, inputs, given.owned()

        def call(prepared: tuple[Variant, Sequence[Any], Given]) -> Any:
            variant, inputs, given = prepared
            variant, outputs, _ = self._call(variant, given)
            return _returned(variant.graph, _update(variant.graph, inputs, outputs))

        return self.program.submissions.submit(prepare, call)

    def _read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Variant, Sequence[Any], Given]:
        """The variant that takes arguments of this form, its inputs, and the inputs as arrays."""
        found = self._find(args, kwargs)
        if not isinstance(found, InputError):
            return found
        with self.lock:
            found = self._find(args, kwargs)  # another thread may have exported it meanwhile
            if not isinstance(found, InputError):
                return found
            variant = self._export_again(args, kwargs, found)
        inputs = bind(variant.graph, args, kwargs, variant.where)
        return variant, inputs, read_inputs(variant.graph, inputs, variant.where)

    def _find(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Variant, Sequence[Any], Given] | InputError:
        """What `_read` gives, from the variants that there are; else why the first one refuses."""
        refused: InputError | None = None
        for variant in tuple(self.variants):
            try:
                inputs = bind(variant.graph, args, kwargs, variant.where)
                return variant, inputs, read_inputs(variant.graph, inputs, variant.where)
            except (SignatureError, SizeConstraintError) as error:
                refused = refused or error
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
        made = Variant(self.program, self.name, source)
        if self.program.weight_watch is not None:
            self.program.weight_watch.include(source)
        made.used = self._calls
        self.variants.append(made)
        if len(self.variants) > MAX_VARIANTS:
            oldest = min(self.variants[1:-1], key=lambda each: each.used)
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
        return made

    def _call(
        self,
        variant: Variant,
        given: Given,
        targets: Sequence[np.ndarray | None] | None = None,
    ) -> tuple[Variant, tuple[Any, ...], bool]:
        """One call with checked inputs.

        Returns:
            What served it, the outputs as the caller expects them, and whether the weights were
            those of the module. Where the method has no state, they are compared while the device
            runs, which costs no time.
        """
        watch, changed = self.program.weight_watch, False
        if watch is not None and (
            targets is not None or any(each.graph.states for each in self.variants)
        ):
            self.program.refresh()  # a call that writes is not repeated
            watch = None

        def compare() -> None:
            nonlocal changed
            changed = watch is not None and watch.changed()

        with self.lock:
            self.program.check_open()
            if variant not in self.variants:  # another thread replaced it meanwhile
                variant = self._successor(variant, given)
            variant, (chosen, env) = self._choose(variant, given)
            if watch is not None and variant.graph.states and watch.changed():
                return variant, (), False
            meanwhile = None if watch is None else compare
            chosen, outputs = variant.run(chosen, env, given.arrays, targets, meanwhile)
            self._calls += 1
            variant.used = self._calls
        results = tuple(
            given.convert(output, chosen.graph.outputs[n]) for n, output in enumerate(outputs)
        )
        return variant, results, not changed

    def _choose(self, variant: Variant, given: Given) -> tuple[Variant, Any]:
        """The variant and the lowering that serve the sizes of a call."""
        try:
            return variant, variant.choose(given.arrays)
        except SizeConstraintError as error:
            refused = error
        if not isinstance(self.source, ExportsAgain):
            raise refused
        for other in self.variants:
            if other is not variant and _alike(other.graph, variant.graph):
                try:
                    return other, other.choose(given.arrays)
                except SizeConstraintError:
                    continue
        made = self._for_inputs(variant, given, refused)
        return made, made.choose(given.arrays)

    def _successor(self, variant: Variant, given: Given) -> Variant:
        """What takes the inputs of a variant that is closed: one of the same form."""
        for other in self.variants:
            if _alike(other.graph, variant.graph):
                return other
        gone = PurevkError("the weights changed during the call", where=variant.where)
        return self._for_inputs(variant, given, gone)

    def _for_inputs(self, variant: Variant, given: Given, refused: PurevkError) -> Variant:
        """A new variant for the inputs of a call that has the form of `variant`."""
        signature = variant.graph.signature
        if signature is None:
            raise refused
        args, kwargs = signature.arguments(given.leaves(variant.graph))
        return self._export_again(args, kwargs, refused)

    def restart(self) -> None:
        """Lowers the graph for the example inputs again; other variants are exported when a call
        asks for them."""
        self.variants = [Variant(self.program, self.name, self.source)]

    def close(self) -> None:
        """Waits for a call that runs, and releases the memory of calls."""
        with self.lock:
            for each in self.variants:
                each.close()

    def __repr__(self) -> str:
        return f"<Method {self.name}({describe_inputs(self.graph)})>"


def _alike(one: Graph, two: Graph) -> bool:
    """Whether two graphs take arguments of the same form."""
    if one.signature != two.signature or one.updates != two.updates:
        return False
    if one.signature is not None and two.signature is not None:
        if not one.signature.outputs.is_like(two.signature.outputs):
            return False
        if not all(
            each.tree.is_like(other.tree)
            for each, other in zip(one.signature.parameters, two.signature.parameters)
        ):
            return False
        theirs = two.signature.defaults
        if not all(same_literal(value, theirs[k]) for k, value in one.signature.defaults.items()):
            return False
    return all(_same_input(a, b) for a, b in zip(one.inputs, two.inputs))


def _same_input(one: Any, two: Any) -> bool:
    if isinstance(one, Value) and isinstance(two, Value):
        return one.type.dtype is two.type.dtype
    if isinstance(one, FixedInput) and isinstance(two, FixedInput):
        return same_literal(one.value, two.value)  # True is not 1
    return type(one) is type(two) and (one is None or one.terms == two.terms)


def _update(graph: Graph, inputs: Sequence[Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gives the inputs that the method writes their new elements; the results that are left."""
    count = len(outputs) - len(graph.updates)
    if graph.updates:
        write_back(inputs, graph.updates, outputs[count:])
    return outputs[:count]


def _returned(graph: Graph, results: tuple[Any, ...]) -> Any:
    """The results as the model returns them."""
    if graph.signature is not None:
        return graph.signature.unflatten(results)
    return results[0] if len(results) == 1 else results

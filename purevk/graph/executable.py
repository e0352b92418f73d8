"""A specialization of a method, ready to run: its segments on the device and on the CPU, in order."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from purevk import generators
from purevk.errors import InputError
from purevk.graph.call import Call, HostForm, evaluated
from purevk.graph.call_memory import CallMemory, Cut
from purevk.graph.compute_graph import ComputeGraph, OverlappedCalls, StartedCall
from purevk.graph.context import Context
from purevk.graph.control import ControlStep
from purevk.graph.external import ExternalCalls, ExternalDevice, ExternalRange
from purevk.graph.load_time import content_of, run_load_time
from purevk.graph.memory import DeviceStore
from purevk.graph.unbacked import Replan, UnbackedSymbols
from purevk.ir import Guard, Node, Symbol, Value
from purevk.ir.host import SEED
from purevk.lower.lowering import FOUND
from purevk.schedule.plan import Plan

Progress = Callable[[str, int, int], None]


@dataclass
class Observation:
    """What ran in a call, in order.

    Attributes:
        submissions: segments: the executable, its number there, and the values of the symbols that
            were known when it was submitted.
        values: of all symbols of an executable, after its last run.
        on_cpu: nodes on the CPU, with their seconds.
    """

    submissions: list[tuple[Executable, int, dict[Symbol, int]]] = field(default_factory=list)
    values: dict[Executable, dict[Symbol, int]] = field(default_factory=dict)
    on_cpu: list[tuple[Node, float]] = field(default_factory=list)


class Executable:
    """An execution plan with its memory on a device.

    Args:
        context: the device.
        plan: what to run.
        weights, states: the program's stores. New constants and states are added.
        may_compile: False: a kernel that is not in the cache raises KernelNotCachedError.

    Attributes:
        generators: the numbers of those that a call draws seeds from.
        observation: gets what calls run, if there is one; set it by `observe`.
    """

    def __init__(
        self,
        context: Context,
        plan: Plan,
        weights: DeviceStore,
        states: DeviceStore,
        progress: Progress | None = None,
        may_compile: bool = True,
    ) -> None:
        self.context, self.plan = context, plan
        self.weights, self.states = weights, states
        self.seconds: dict[str, float] = {}
        self.observation: Observation | None = None
        self.closed = False
        self._graph: ComputeGraph | None = None
        self._given_up = False  # whether the last call did not come to its end
        self._external: dict[ExternalDevice, ExternalCalls] = {}
        self._overlapped: OverlappedCalls | None = None
        self._control: dict[Node, ControlStep] = {}
        try:
            self._prepare(progress, may_compile)
        except BaseException:
            self.close()
            raise
        self.generators = {
            node.int("generator")
            for inner in plan.nested()
            for step in inner.steps
            for node in step.nodes
            if node.op == SEED
        }
        self.unbacked = UnbackedSymbols(plan)
        # What calls remember: how values lie in the memory of the host if no symbol changes it, and
        # constants of files that the host reads.
        self.forms: dict[Value, HostForm] = {}
        self.constants: dict[Value, np.ndarray] = {}

    def _prepare(self, progress: Progress | None, may_compile: bool) -> None:
        """Makes what is on the device."""
        context, plan = self.context, self.plan
        start = time.perf_counter()
        self._pipelines = context.kernels.prepare(plan.kernels, progress, may_compile)
        self.seconds["kernels"] = time.perf_counter() - start
        start = time.perf_counter()
        self._fill(progress)
        self.seconds["weights"] = time.perf_counter() - start
        start = time.perf_counter()
        self._run_once()
        self.seconds["constants"] = time.perf_counter() - start
        start = time.perf_counter()
        self._segment_of: dict[int, int] = {}
        cuts: list[Cut] = []
        for number, (step, span) in enumerate(zip(plan.steps, plan.ranges)):
            if step.on_device:
                self._segment_of[number] = len(cuts)
                cuts.append(Cut(*span, plan.uploads[number], plan.downloads[number]))
        self._cuts = cuts
        self._graph = self._compute_graph()
        self.seconds["buffers"] = time.perf_counter() - start
        for node, plans in plan.inner.items():
            made: list[Executable] = []
            try:
                for inner in plans:
                    made.append(
                        Executable(context, inner, self.weights, self.states, progress, may_compile)
                    )
            except BaseException:
                for each in made:
                    each.close()
                raise
            self._control[node] = ControlStep(node, made)
            for executable in made:
                for phase, seconds in executable.seconds.items():
                    self.seconds[phase] += seconds

    @property
    def graph(self) -> ComputeGraph:
        """What runs calls with arrays of the host."""
        if self._graph is None:
            self._graph = self._compute_graph()
        return self._graph

    @property
    def call_memories(self) -> list[CallMemory]:
        """The memory of calls."""
        own = [] if self._graph is None else [self._graph.memory]
        graphs = [] if self._overlapped is None else self._overlapped.graphs
        external = (calls.memory for calls in self._external.values())
        return [*own, *(graph.memory for graph in graphs), *external]

    def _compute_graph(self, external: bool = False) -> ComputeGraph:
        plan, fixed = self.plan, [self.weights, self.states]
        compute_graph = ComputeGraph(
            self.context,
            plan.dispatches,
            self._cuts,
            fixed,
            plan.sizes,
            plan.windows,
            external,
            tuple(plan.checks),
        )
        if plan.assignment.graph.states:  # else other threads may run it meanwhile
            self.states.writers.add(compute_graph)
        return compute_graph

    def watch(self, guards: Iterable[Guard]) -> None:
        """Has the guards of unbacked symbols checked. `run` raises `Replan` if one breaks."""
        guards = tuple(guards)
        for step in self._control.values():
            for inner in step.inner:
                inner.watch(guards)
        self.unbacked.watch(
            guards, [inner.unbacked for step in self._control.values() for inner in step.inner]
        )

    def _fill(self, progress: Progress | None) -> None:
        plan = self.plan
        fresh = [value for value in plan.constants if value not in self.weights.ranges]
        report = None if progress is None else lambda done, total: progress("weights", done, total)
        self.weights.add(
            [(value, plan.sizes[value], content_of(plan, value)) for value in fresh],
            report,
        )
        initial = plan.assignment.graph.states
        self.states.add(
            [
                (
                    value,
                    max(value.type.nbytes, 4),
                    None if first is None else first.data[: value.type.nbytes],
                )
                for value, first in initial.items()
                if value not in self.states.ranges
            ]
        )

    def _run_once(self) -> None:
        """Computes what depends only on constants, and keeps it among the weights."""
        plan, contents = self.plan, self.weights.contents
        if not plan.once:
            return
        after = contents.after(plan.once, plan.graph.constants, plan.windows, plan.sizes)
        for value in plan.once_kept:
            same = contents.made.get(after[value])
            if same in self.weights.ranges:
                self.weights.ranges.setdefault(value, self.weights.ranges[same])
        if all(value in self.weights.ranges for value in plan.once_kept):
            return
        with self.weights.adding(plan.once_kept):
            self.weights.reserve([(value, plan.sizes[value]) for value in plan.once_kept])
            run_load_time(self.context, plan, self.weights)
        contents.made.update((after[value], value) for value in plan.once_kept)

    def nested(self) -> Iterator[Executable]:
        """This executable and those of all sub-graphs, outer ones first."""
        yield self
        for step in self._control.values():
            for inner in step.inner:
                yield from inner.nested()

    def observe(self, observation: Observation | None) -> None:
        """Has an observation note what calls run, sub-graphs included. None: no longer."""
        for each in self.nested():
            each.observation = observation

    # -- calls ------------------------------------------------------------------------------------
    def run(self, call: Call) -> list[Any]:
        """Runs a call, and returns its outputs in order.

        Raises:
            InputError: an index that the model computes is out of range, or a size breaks a rule.
                States are as they were before the call.
            Replan: the call needs another plan. States are as they were before it.
        """
        unbacked = self.unbacked
        unsafe = [(value, max(value.type.nbytes, 4)) for value in unbacked.unsafe]
        data = self.states.read_all(unsafe)
        saved = [(value, memoryview(part)) for (value, _), part in zip(unsafe, data)]
        # Another plan begins with the same seeds.
        seeds = generators.states(self.generators) if unbacked.may_replan else []
        compute = self.graph
        compute.settle()
        if self._given_up:
            compute.memory.take_note()  # of that call
        self._given_up = True
        call.begin(self, compute.memory)
        try:
            if unbacked.stages:
                call.bind_unbacked(-1)
            for number, step in enumerate(self.plan.steps):
                if step.on_device:
                    self._run_segment(number, call, compute)
                elif step.nodes[0] in self._control:
                    call.host.update(self._control[step.nodes[0]].run(call.read, call.env))
                elif step.nodes[0].op == SEED:
                    node = step.nodes[0]
                    call.host[node.result] = generators.draw(node.int("generator"))
                else:
                    call.run_on_cpu(step.nodes[0])
                if unbacked.stages:
                    call.bind_unbacked(number)
                if step.on_device and self.plan.checks:
                    self._check_note(compute.memory)
            call.submitted()
            self._given_up = False
            return call.outputs()
        except (Replan, InputError) as error:
            self.states.upload(saved)
            if isinstance(error, Replan):
                generators.restore(seeds)
            raise

    def _run_segment(self, number: int, call: Call, compute: ComputeGraph) -> None:
        """Runs a step on the device."""
        plan = self.plan
        for value in plan.uploads[number]:
            call.upload(value)
        first, last = plan.ranges[number]
        if first != last:
            segment = self._segment_of[number]
            if self.observation is not None:
                self.observation.submissions.append((self, segment, dict(call.env)))
                self.observation.values[self] = call.env  # which the rest of the run fills in
            submission = compute.submit(segment, call.env)
            try:
                call.submitted()
            finally:
                submission.wait()
        for storage in plan.downloads[number]:
            call.host.pop(storage, None)

    def _check_note(self, memory: CallMemory, earlier: bool = False) -> None:
        """Raises `InputError` if a kernel has met an index that is out of range, or an assertion that
        fails. `earlier`: in the call before."""
        note = memory.take_note()
        if note is None:
            return
        check = self.plan.checks[note.storage]
        before = " in the call before this one" if earlier else ""
        where = f"{self.plan.graph.name}{f', {check.source}' if check.source else ''}"
        if check.message:
            raise InputError(
                f"{check.message.replace(FOUND, str(note.found))}{before}",
                where=where,
                why=f"it is {note.found}, and {check.op} takes {note.lowest} to {note.below - 1}"
                if check.op
                else "the model asserts it",
                next="correct the inputs; states are as they were before that call",
            )
        raise InputError(
            f"an index of {check.op} is {note.found}{before}",
            where=where,
            why=f"it takes indices from {note.lowest} to {note.below - 1}",
            next="correct the model, or its inputs; states are as they were before that call",
        )

    # -- calls that overlap --------------------------------------------------------------------------
    @property
    def overlapped(self) -> OverlappedCalls | None:
        """What starts calls before the one before has finished. None: the host has a part in a call,
        or its kernels may refuse it."""
        if self._overlapped is None and self.takes_external and not self.plan.checks:
            self._overlapped = OverlappedCalls(self._compute_graph)
            self._release_unused_graph()
        return self._overlapped

    def start(self, call: Call) -> StartedCall:
        """Submits a call to `overlapped`."""
        assert self._overlapped is not None
        plan, graph = self.plan, self.plan.assignment.graph

        def write(memory: CallMemory) -> None:
            call.begin(self, memory)
            for value in plan.uploads[0]:
                call.upload(value)

        def read() -> list[Any]:
            for output in graph.outputs:
                if isinstance(output, Value) and output not in graph.constants:
                    sizes, dtype, *_ = call.form(output)
                    view = call.memory.download_view(plan.assignment.storages.get(output, output))
                    call.host[output] = np.ndarray(sizes, dtype, view)
            return call.outputs()

        return self._overlapped.start(call.env, write, read)

    # -- calls with tensors of another API ---------------------------------------------------------
    @functools.cached_property
    def takes_external(self) -> bool:
        """Whether `run_external` runs its calls: a call is one submission that makes all outputs,
        and the host has no part in it."""
        plan, graph = self.plan, self.plan.assignment.graph
        if len(plan.steps) != 1 or not plan.steps[0].on_device or self.unbacked.stages:
            return False
        if plan.exposed_states(external=True):
            return False
        first, last = plan.ranges[0]
        return first != last and all(
            not isinstance(output, Value)
            or output in graph.constants
            or plan.assignment.storages.get(output, output) in plan.downloads[0]
            for output in graph.outputs
        )

    def external_calls(self, device: ExternalDevice) -> ExternalCalls:
        """What runs calls with tensors of another API.

        Raises:
            DeviceError: the other API refuses the memory.
        """
        calls = self._external.get(device)
        if calls is None:
            calls = ExternalCalls(self._compute_graph(external=True), device)
            self._external[device] = calls
            self._release_unused_graph()
        return calls

    def _release_unused_graph(self) -> None:
        if self._graph is not None and not self._graph.recorded:
            self._graph.close()  # nobody has called it so far
            self._graph = None

    def run_external(self, calls: ExternalCalls, call: Call) -> list[Any]:
        """Runs a call with tensors of another API. The device may still run when it returns.

        Args:
            calls: from `external_calls`.
            call: its tensors and targets are those of the other API, or arrays.

        Returns:
            The outputs in order: tensors of the other API, integers or None. A constant that is an
            output is a numpy array.

        Raises:
            InputError: an index was out of range in the call before, or in this one if the graph
                has states.
        """
        calls.settle()
        self._check_note(calls.memory, earlier=True)
        call.begin(self, calls.memory)
        plan, graph = self.plan, self.plan.assignment.graph
        inputs = [
            (calls.range_of(value, call.form(value).sizes, value.type.dtype), call.tensors[value])
            for value in plan.uploads[0]
        ]
        results: list[tuple[ExternalRange, Any] | None] = []
        for number, output in enumerate(graph.outputs):
            if not isinstance(output, Value) or output in graph.constants:
                results.append(None)
                continue
            storage = plan.assignment.storages.get(output, output)
            source = calls.range_of(storage, call.form(output).sizes, output.type.dtype)
            target = None if call.targets is None else call.targets[number]
            if target is not None:
                call.check_target(target, source.sizes)
            results.append((source, target))
        outputs = calls.run(inputs, results, call.env, call.submitted)
        if graph.states:
            calls.settle()  # the host may read them
            self._check_note(calls.memory)
        for number, output in enumerate(graph.outputs):
            if results[number] is None:
                outputs[number] = (
                    graph.constants[output].array(output.type)
                    if isinstance(output, Value)
                    else evaluated(output, call.env)
                )
        return outputs

    def close(self) -> None:
        """Releases the memory of calls, and the pipelines that no other program uses. Weights and
        states belong to the program."""
        self.closed = True
        for inner in self.nested():
            for calls in inner._external.values():
                calls.close()
            inner._external.clear()
            if inner._overlapped is not None:
                inner._overlapped.close()
                inner._overlapped = None
            if inner._graph is not None:
                inner._graph.close()
            inner._pipelines = []

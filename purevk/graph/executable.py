"""A specialization of a method, ready to run: its segments on the device and on the CPU, in order."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from purevk import fallback, generators
from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.graph.call_memory import CallMemory, Cut
from purevk.graph.compute_graph import ComputeGraph, OverlappedCalls
from purevk.graph.context import Context
from purevk.graph.control import ControlStep
from purevk.graph.external import ExternalCalls, ExternalDevice, ExternalRange
from purevk.graph.load_time import run_load_time
from purevk.graph.memory import DeviceStore
from purevk.graph.unbacked import Replan, UnbackedSymbols
from purevk.ir import Dim, Guard, Node, Symbol, Value
from purevk.ir import dims as _dims
from purevk.ir.host import SEED
from purevk.lower.lowering import FOUND
from purevk.mapped import is_mapped
from purevk.schedule.plan import Plan

Progress = Callable[[str, int, int], None]
# Bytes of an input, such as a position, that are copied by way of an object of Python: making an
# array over the memory of the device takes longer.
_SMALL = 1024


Copy: TypeAlias = Callable[[np.ndarray, DType], Any]
"""Copies the elements of an output, of a dtype (bfloat16 as uint16)."""


def copied(array: np.ndarray, _: DType) -> Any:
    return array.copy()


class _HostForm(NamedTuple):
    """How the elements of a value lie in the memory of the host."""

    sizes: tuple[int, ...]
    dtype: np.dtype
    numel: int
    nbytes: int


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
        self._forms: dict[Value, _HostForm] = {}
        self._constants: dict[Value, np.ndarray] = {}  # of files, that the host reads
        self._unbacked = UnbackedSymbols(plan)

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
        made = ComputeGraph(
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
            self.states.writers.add(made)
        return made

    def watch(self, guards: Iterable[Guard]) -> None:
        """Has the guards of unbacked symbols checked. `run` raises `Replan` if one breaks."""
        guards = tuple(guards)
        for step in self._control.values():
            for inner in step.inner:
                inner.watch(guards)
        self._unbacked.watch(
            guards, [inner._unbacked for step in self._control.values() for inner in step.inner]
        )

    def _fill(self, progress: Progress | None) -> None:
        graph, plan = self.plan.graph, self.plan
        fresh = [value for value in plan.constants if value not in self.weights.ranges]
        report = None if progress is None else lambda done, total: progress("weights", done, total)
        self.weights.add(
            [
                (value, plan.sizes[value], graph.constants[value].data[: value.type.nbytes])
                for value in fresh
            ],
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
    def run(
        self,
        inputs: Mapping[Value, np.ndarray],
        env: dict[Symbol, int],
        targets: Sequence[np.ndarray | None] | None = None,
        meanwhile: Callable[[], None] | None = None,
        copy: Copy = copied,
    ) -> list[Any]:
        """One call.

        Args:
            inputs: the tensors of the call as arrays of the right dtype, with any strides.
            env: values of the inputs' symbols. Unbacked symbols are added.
            targets: for each output, an array to write it to, or None.
            meanwhile: called once, while the device runs if there is a segment for it. What it raises
                ends the call, before anything is written to `targets`.
            copy: copies an output without a target out of memory of the device.

        Returns:
            The outputs in order: what `copy` returned, or the target; integers or None.

        Raises:
            InputError: an index that the model computes is out of range, or a size breaks a rule.
                States are as they were before the call.
            Replan: the call needs another plan. States are as they were before it.
        """
        saved = [
            (value, memoryview(self.states.read(value, max(value.type.nbytes, 4))))
            for value in self._unbacked.unsafe
        ]
        # Another plan begins with the same seeds.
        seeds = generators.states(self.generators) if self._unbacked.may_replan else []
        try:
            return self._run(inputs, env, targets, meanwhile, copy)
        except (Replan, InputError) as error:
            self.states.upload(saved)
            if isinstance(error, Replan):
                generators.restore(seeds)
            raise

    def _run(
        self,
        inputs: Mapping[Value, np.ndarray],
        env: dict[Symbol, int],
        targets: Sequence[np.ndarray | None] | None,
        meanwhile: Callable[[], None] | None,
        copy: Copy,
    ) -> list[Any]:
        plan, compute, memory = self.plan, self.graph, self.graph.memory
        compute.settle()
        if self._given_up:
            memory.take_note()  # of that call
        self._given_up = True
        graph = plan.assignment.graph
        host: dict[Value, np.ndarray] = dict(inputs)
        stages = self._unbacked.stages
        if stages:
            self._bind_unbacked(-1, host, env)
        for number, step in enumerate(plan.steps):
            if step.on_device:
                for value in plan.uploads[number]:
                    array = host[value] if value in host else self._host_array(value, host, env)
                    _copy_in(memory.upload_view(value), array)
                first, last = plan.ranges[number]
                if first != last:
                    segment = self._segment_of[number]
                    if self.observation is not None:
                        self.observation.submissions.append((self, segment, dict(env)))
                        self.observation.values[self] = env  # which the rest of the run fills in
                    submission = compute.submit(segment, env)
                    try:
                        if meanwhile is not None:
                            meanwhile()
                            meanwhile = None
                    finally:
                        submission.wait()
                for storage in plan.downloads[number]:
                    host.pop(storage, None)
            elif step.nodes[0] in self._control:
                read = lambda value: self._host_array(value, host, env)  # noqa: E731
                host.update(self._control[step.nodes[0]].run(read, env))
            elif step.nodes[0].op == SEED:
                host[step.nodes[0].result] = generators.draw(step.nodes[0].int("generator"))
            else:
                self._run_host(step.nodes[0], host, env)
            if stages:
                self._bind_unbacked(number, host, env)
            if step.on_device:
                self._check_note(memory)
        if meanwhile is not None:
            meanwhile()
        self._given_up = False
        return [
            self._output(output, host, env, None if targets is None else targets[number], copy)
            for number, output in enumerate(graph.outputs)
        ]

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
            self._overlapped = OverlappedCalls(
                self._compute_graph, self._write_inputs, self._read_outputs
            )
            self._release_unused_graph()
        return self._overlapped

    def _write_inputs(self, compute: ComputeGraph, inputs: Mapping[Value, np.ndarray]) -> None:
        for value in self.plan.uploads[0]:
            _copy_in(compute.memory.upload_view(value), inputs[value])

    def _read_outputs(self, compute: ComputeGraph, env: Mapping[Symbol, int]) -> list[Any]:
        plan, graph = self.plan, self.plan.assignment.graph
        outputs: list[Any] = []
        for output in graph.outputs:
            if not isinstance(output, Value) or output in graph.constants:
                outputs.append(self._output(output, {}, env, None, copied))
                continue
            sizes, dtype, *_ = self._forms.get(output) or self._form(output, env)
            view = compute.memory.download_view(plan.assignment.storages.get(output, output))
            outputs.append(np.ndarray(sizes, dtype, view).copy())
        return outputs

    # -- calls with tensors of another API ---------------------------------------------------------
    @functools.cached_property
    def takes_external(self) -> bool:
        """Whether `run_external` runs its calls: a call is one submission that makes all outputs,
        and the host has no part in it."""
        plan, graph = self.plan, self.plan.assignment.graph
        if len(plan.steps) != 1 or not plan.steps[0].on_device or self._unbacked.stages:
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

    def run_external(
        self,
        calls: ExternalCalls,
        inputs: Mapping[Value, Any],
        env: Mapping[Symbol, int],
        targets: Sequence[Any] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Any]:
        """One call with tensors of another API. The device may still run when it returns.

        Args:
            calls: from `external_calls`.
            inputs: the tensors of the call: those of the other API, and arrays.
            env: values of the inputs' symbols.
            targets: for each output, a tensor to write it to, or None.
            meanwhile: called once, while the device runs.

        Returns:
            The outputs in order: tensors of the other API, integers or None. A constant that is an
            output is a numpy array.

        Raises:
            InputError: an index was out of range in the call before, or in this one if the graph
                has states.
        """
        calls.settle()
        self._check_note(calls.memory, earlier=True)
        plan, graph = self.plan, self.plan.assignment.graph
        given = [
            (self._external_range(calls, value, value, env), inputs[value])
            for value in plan.uploads[0]
        ]
        wanted: list[tuple[ExternalRange, Any] | None] = []
        for number, output in enumerate(graph.outputs):
            if not isinstance(output, Value) or output in graph.constants:
                wanted.append(None)
                continue
            storage = plan.assignment.storages.get(output, output)
            source = self._external_range(calls, storage, output, env)
            target = None if targets is None else targets[number]
            if target is not None and tuple(target.shape) != source.sizes:
                raise self._wrong_target(target, source.sizes)
            wanted.append((source, target))
        made = calls.run(given, wanted, env, meanwhile)
        if graph.states:
            calls.settle()  # the host may read them
            self._check_note(calls.memory)
        for number, output in enumerate(graph.outputs):
            if wanted[number] is None:
                made[number] = (
                    graph.constants[output].array(output.type)
                    if isinstance(output, Value)
                    else _evaluated(output, env)
                )
        return made

    def _external_range(
        self, calls: ExternalCalls, storage: Value, value: Value, env: Mapping[Symbol, int]
    ) -> ExternalRange:
        form = self._forms.get(value) or self._form(value, env)
        return calls.range_of(storage, form.sizes, value.type.dtype)

    def _host_array(
        self, value: Value, host: dict[Value, np.ndarray], env: Mapping[Symbol, int]
    ) -> np.ndarray:
        """The elements of a value on the host, read from the device if they are not there."""
        array = host.get(value)
        if array is not None:
            return array
        graph = self.plan.assignment.graph
        if value in graph.constants:
            array = self._constants.get(value)
            if array is None:
                constant = graph.constants[value]
                array = constant.array(value.type)
                if is_mapped(constant.data):  # the memory of a module may change
                    self._constants[value] = array
        else:
            storage = self.plan.assignment.storages.get(value, value)
            sizes, dtype, numel, nbytes = self._forms.get(value) or self._form(value, env)
            if not numel:
                array = np.empty(sizes, dtype)
            elif storage in host and storage is not value:
                array = host[storage].reshape(-1).view(dtype)[:numel].reshape(sizes)
            elif storage in self.weights.ranges or storage in self.states.ranges:
                store = self.weights if storage in self.weights.ranges else self.states
                data = store.read(storage, max(nbytes, 4))[:nbytes]
                array = np.frombuffer(data, dtype).reshape(sizes)
            else:
                array = np.ndarray(sizes, dtype, self.graph.memory.download_view(storage))
            if storage in self.states.ranges:
                return array  # a state may change during the call
        host[value] = array
        return array

    def _form(self, value: Value, env: Mapping[Symbol, int]) -> _HostForm:
        """How the elements of a value lie in the memory of the host; remembered if no symbol
        changes it."""
        dims, dtype = value.type.dims, value.type.dtype
        sizes = tuple([_dims.evaluate(size, env) for size in dims])
        numel = math.prod(sizes)
        form = _HostForm(sizes, dtype.numpy, numel, numel * dtype.itemsize)
        if not any(isinstance(size, Dim) for size in dims):
            self._forms[value] = form
        return form

    def _run_host(
        self, node: Node, host: dict[Value, np.ndarray], env: Mapping[Symbol, int]
    ) -> None:
        name, reason, args = node.args
        assert isinstance(name, str)  # as `passes.placement` wraps nodes
        arrays = {value: self._host_array(value, host, env) for value in node.inputs}
        known = _evaluated(args, env)
        start = time.perf_counter()
        made = fallback.run(
            name,
            known,
            arrays,
            [value.type for value in node.results],
            node.source,
            self.plan.graph.trusted,
            str(reason),
        )
        if self.observation is not None:
            self.observation.on_cpu.append((node, time.perf_counter() - start))
        host.update(zip(node.results, made))

    def _bind_unbacked(
        self, number: int, host: dict[Value, np.ndarray], env: dict[Symbol, int]
    ) -> None:
        """Reads the unbacked symbols that are known after step `number`, and checks them. -1: before
        the first step."""
        stage = self._unbacked.stages.get(number)
        if stage is None:
            return
        for symbol, source in stage.symbols:
            assert source.value is not None  # unbacked symbols have sources
            array = self._host_array(source.value, host, env)
            env[symbol] = source.read(array)
        self._unbacked.check(stage, env, self.plan.graph)

    def _output(
        self,
        output: Any,
        host: dict[Value, np.ndarray],
        env: Mapping[Symbol, int],
        target: np.ndarray | None,
        copy: Copy,
    ) -> Any:
        """An output in memory of the caller. The next call overwrites the buffer that it is in now."""
        if isinstance(output, Value):
            array = self._host_array(output, host, env)
            if target is None:
                return copy(array, output.type.dtype)
            if target.shape != array.shape:
                raise self._wrong_target(target, array.shape)
            np.copyto(target, array)
            return target
        if isinstance(output, Dim):
            return _dims.evaluate(output, env)
        return output

    def _wrong_target(self, target: Any, sizes: Sequence[int]) -> InputError:
        return InputError(
            f"out has sizes {list(target.shape)}",
            where=self.plan.graph.name,
            why=f"the result has sizes {list(sizes)}",
            next="pass memory of the sizes of the result, or call it without out=",
        )

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


def _copy_in(target: memoryview, array: np.ndarray) -> None:
    nbytes = array.nbytes
    if 0 < nbytes <= _SMALL:
        target[:nbytes] = array.tobytes()
    elif nbytes:
        np.copyto(np.ndarray(array.shape, array.dtype, target), array)


def _evaluated(arg: Any, env: Mapping[Symbol, int]) -> Any:
    if isinstance(arg, Dim):
        return _dims.evaluate(arg, env)
    if isinstance(arg, tuple):
        return tuple(_evaluated(item, env) for item in arg)
    return arg

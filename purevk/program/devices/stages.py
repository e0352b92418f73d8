"""One program on several devices, each of which holds some of the layers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from purevk.closing import Closing
from purevk.errors import InputError, PurevkError, SizeConstraintError
from purevk.frontends.files import ModelFile
from purevk.frontends.reading import reading
from purevk.frontends.respecialize import ReadGraph
from purevk.graph.context import Context
from purevk.ir import Dim, Graph, Guard, GuardLog, Value
from purevk.ir import dims as _dims
from purevk.ir.binding import bind_symbols, input_symbols
from purevk.ir.symbols import Symbol
from purevk.plain_text import printable
from purevk.program.arguments import (
    InputReader,
    describe_given,
    describe_inputs,
)
from purevk.program.call import MethodCall, returned
from purevk.program.devices.cuts import CutGraph, Stage, choose_cuts, cut, with_early_stores
from purevk.program.devices.memory import free_bytes
from purevk.program.devices.turns import Turns
from purevk.program.host_memory import HostMemory
from purevk.program.method import Method
from purevk.program.program import Program
from purevk.program.specs import ArgumentSpec, input_specs, output_specs
from purevk.program.state import StateMapping
from purevk.program.variants.ranges import refused_sizes

_log = logging.getLogger("purevk")
_MIB = 1 << 20


class StagedProgram(Closing):
    """A program whose layers are on several devices, for models that one device has no room for.

    Made by `purevk.load(file, device=[0, 1], split="layers")`. Each method is cut into as many
    stages as there are devices. A call runs them one after the other, and copies what the next stage
    needs through the memory of the host. Several calls, from `submit` or from several threads, run
    at the same time in different stages; they take effect in their order. Each device gets weights
    in proportion to its free memory.

    A call that fails in a later stage may have changed states of the stages before it; `reset_state`
    gives all their first content.

    Attributes:
        programs: the stages, in order: one program for each device.
        methods: by name.
    """

    def __init__(
        self,
        opened: ModelFile,
        contexts: Sequence[Context],
        progress: Callable[[str, int, int], None] | None = None,
        bounds: str = "exported",
        compile: str = "allowed",
        round: str = "fused",
    ) -> None:
        self.name, self.bounds, self._closing = opened.label, bounds, opened.close
        self.turns = Turns(len(contexts))
        self._closed = False
        self.host_memory = HostMemory()
        self._threads = ThreadPoolExecutor(len(contexts) + 1, thread_name_prefix="purevk-stage")
        self._room = threading.Semaphore(len(contexts) + 1)
        self._order = threading.Lock()
        read = {name: _read(opened, name) for name in opened.methods}
        shares = [max(free_bytes(context), 1) for context in contexts]
        cuts = choose_cuts({name: method.graph for name, method in read.items()}, shares, self.name)
        graphs = {name: cut(method.graph, cuts[name]) for name, method in read.items()}
        self.programs: tuple[Program, ...] = ()
        try:
            for number, context in enumerate(contexts):
                sources = {
                    name: _StageSource(opened, name, graphs[name].stages[number], method.guards)
                    for name, method in read.items()
                    if graphs[name].stages[number].runs
                }
                label = f"{self.name}, stage {number + 1} of {len(contexts)}"
                program = Program(
                    label, sources, context, progress, bounds=bounds, compile=compile, round=round
                )
                self.programs += (program,)
        except BaseException:
            for program in self.programs:
                program.close()
            raise
        self.methods = {
            name: StagedMethod(self, name, graphs[name], method.guards)
            for name, method in read.items()
        }
        _log.info("%s", self.describe())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method "forward"; see `StagedMethod.__call__`."""
        return self.method("forward")(*args, **kwargs)

    __call__ = forward

    def method(self, name: str) -> StagedMethod:
        """A method by its name. Raises `InputError` with the names that there are."""
        try:
            return self.methods[name]
        except KeyError:
            raise InputError(
                f"there is no method {name!r}",
                where=self.name,
                why=f"methods: {', '.join(self.methods)}",
            ) from None

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts the method "forward" and returns a future of its result; see
        `StagedMethod.submit`."""
        return self.method("forward").submit(*args, **kwargs)

    def start(self, call: Callable[[int], Any]) -> Future[Any]:
        """Has a call run on a thread, with a ticket of its own for the stages."""
        self.check_open()
        self._room.acquire()
        try:
            with self._order:  # threads take calls in the order of their tickets
                ticket = self.turns.take()
                try:
                    future = self._threads.submit(call, ticket)
                except BaseException:
                    self.turns.leave(ticket, 0)
                    raise
        except BaseException:
            self._room.release()
            raise

        def finish(done: Future[Any]) -> None:
            if done.cancelled():
                self.turns.leave(ticket, 0)
            self._room.release()

        future.add_done_callback(finish)
        return future

    @property
    def inputs(self) -> list[ArgumentSpec]:
        """The inputs of the method "forward": names, dtypes, sizes and their bounds."""
        return self.method("forward").inputs

    @property
    def outputs(self) -> list[ArgumentSpec]:
        """The outputs of the method "forward"."""
        return self.method("forward").outputs

    @property
    def state(self) -> StateMapping:
        """What lives on the devices between calls, by name; see `Program.state`."""
        return StateMapping(self, self.programs)

    def reset_state(self) -> None:
        """Gives every state its first content again, after the calls that were made before."""
        with self.held():
            for program in self.programs:
                program.reset_state()

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Writes all states into an .npz file of numpy; see `Program.save_state`."""
        self.state.save(path)

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Reads what `save_state` of this program, on any number of devices, wrote."""
        self.state.load(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, no call runs, and those made before are finished."""
        self.check_open()
        ticket = self.turns.take()
        try:
            for number in range(len(self.programs)):
                self.turns.wait(number, ticket)
            yield
        finally:
            self.turns.leave(ticket, 0)

    def describe(self) -> str:
        """The stages as text: the device, the bytes of weights and states, and the nodes of each."""
        lines = [f"{self.name} in {len(self.programs)} stages"]
        for number, program in enumerate(self.programs):
            size = (program.weights.nbytes + program.states.nbytes) / _MIB
            nodes = ", ".join(
                f"{name} {method.stages[number].start} to {method.stages[number].stop - 1}"
                for name, method in self.methods.items()
                if method.stages[number]
            )
            lines.append(
                f"  {number + 1}: {program.device.name}, {size:.1f} MiB of weights and states,"
                f" nodes of {nodes}"
            )
        return printable("\n".join(lines))

    def check_open(self) -> None:
        """Raises PurevkError if the program is closed."""
        if self._closed:
            raise PurevkError("the program is closed", where=self.name, next="load it again")

    def close(self) -> None:
        """Waits for the calls that were made, and closes all stages. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown()
        for program in self.programs:
            program.close()
        self._closing()

    def __repr__(self) -> str:
        names = ", ".join(program.device.name for program in self.programs)
        return printable(f"<StagedProgram {self.name} on {names}: {', '.join(self.methods)}>")


class StagedMethod:
    """A method of a `StagedProgram`. Call it as a `Method`.

    Attributes:
        stages: for each stage the range of the nodes that it runs.
    """

    def __init__(
        self, program: StagedProgram, name: str, parts: CutGraph, guards: Sequence[Guard]
    ) -> None:
        self._program, self.name, self._parts = program, name, parts
        self._graph = graph = parts.graph
        self.stages = [stage.nodes for stage in parts.stages]
        self._methods: list[Method | None] = [
            stage_program.methods.get(name) for stage_program in program.programs
        ]
        self._where = f"{program.name}, method {name}({describe_inputs(graph)})"
        self._reader = InputReader(graph, self._where)
        self._symbols = input_symbols(graph)
        symbols = {symbol for symbol, _, _ in self._symbols}
        self._tensors = [(at, v) for at, v in enumerate(graph.inputs) if isinstance(v, Value)]
        # The outputs of each stage that no caller gets, and whose sizes those of the inputs give.
        self._passed = [
            [
                value
                if isinstance(value, Value)
                and (number, at) not in parts.outputs
                and all(_dims.symbols(size) <= symbols for size in value.type.dims)
                else None
                for at, value in enumerate(stage.outputs)
            ]
            for number, stage in enumerate(parts.stages)
        ]
        # What no stage can check, because none has all the sizes.
        self._guards = [
            guard
            for guard in guards
            if guard.symbols <= symbols
            and not any(guard.symbols <= set(stage.graph.symbols) for stage in parts.stages)
        ]
        self._checks = [check for check in graph.checks if check[0].symbols <= symbols]

    @property
    def inputs(self) -> list[ArgumentSpec]:
        """The inputs: names, dtypes, sizes and their bounds."""
        return input_specs(self._graph)

    @property
    def outputs(self) -> list[ArgumentSpec]:
        """The outputs: names, dtypes and sizes."""
        return output_specs(self._graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all stages. Several threads may call; the calls take effect one after the other.

        Args:
            args, kwargs: as `Method.__call__` takes them.

        Returns:
            What the method returns.

        Raises:
            InputError, SizeConstraintError: as a method of a program raises them.
        """
        self._program.check_open()
        call, env = self._read(args, kwargs)
        return self._run(call, env, self._program.turns.take())

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts a call and returns at once. The inputs are copied now. One call more than there are
        stages may be unfinished: if there are as many, this waits for one to finish.

        Args:
            args, kwargs: as `Method.__call__` takes them.

        Returns:
            A future of what the call returns.

        Raises:
            PurevkError: the program is closed.
        """
        self._program.check_open()
        try:
            call, env = self._read(args, kwargs)
        except PurevkError as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        call.own(self._program.host_memory)
        return self._program.start(lambda ticket: self._run(call, env, ticket))

    def _read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[MethodCall, dict[Symbol, int]]:
        """The inputs of a call, on the host, and the values of the symbols."""
        call = self._reader.read_call(args, kwargs)
        if isinstance(call, InputError):
            raise call
        call.to_host()
        env = bind_symbols(self._symbols, call.arrays)
        lenient = self._program.bounds == "grow"
        above = any(symbol.is_size and env[symbol] > symbol.upper for symbol in env)
        refused = refused_sizes(
            self._graph, env, call.arrays, self._where, self._program.bounds, lenient, above
        )
        if refused is not None:
            raise refused
        for guard, message in self._checks:
            if not guard.holds(env):
                raise InputError(
                    message,
                    where=self._where,
                    why=guard.explain(env),
                )
        for guard in self._guards:
            if not guard.holds(env):
                raise SizeConstraintError(
                    f"the sizes {describe_given(self._graph, call.arrays)} need other stages",
                    where=self._where,
                    why=f"the graph was cut for {guard}",
                    next="load it for one device",
                )
        return call, env

    def _run(self, call: MethodCall, env: Mapping[Symbol, int], ticket: int) -> Any:
        """All stages of a call, each when it is its turn."""
        turns = self._program.turns
        values: dict[Value, Any] = {value: call.arrays[at] for at, value in self._tensors}
        stage_results: list[Sequence[Any]] = []
        reached = 0
        try:
            for number, (method, stage) in enumerate(zip(self._methods, self._parts.stages)):
                turns.wait(number, ticket)
                reached = number
                if method is None:
                    turns.leave(ticket, number, number + 1)
                    stage_results.append(())
                    continue
                inputs = [
                    _dims.evaluate(arg, env) if isinstance(arg, Dim) else values[arg]
                    for arg in stage.inputs
                ]
                results = method.run_flat(inputs, self._targets(number, env))
                turns.leave(ticket, number, number + 1)
                reached = number + 1
                for value, array in zip(stage.outputs, results):
                    if isinstance(value, Value):
                        values[value] = array
                stage_results.append(results)
        finally:
            turns.leave(ticket, reached)
        outputs = [
            call.convert(stage_results[stage][at], value)
            for (stage, at), value in zip(self._parts.outputs, self._graph.outputs)
        ]
        return returned(self._graph, call.update(outputs))

    def _targets(self, number: int, env: Mapping[Symbol, int]) -> list[np.ndarray | None]:
        """Memory for what a stage passes on."""
        memory = self._program.host_memory
        return [
            None
            if value is None
            else memory.empty(
                [_dims.evaluate(size, env) for size in value.type.dims], value.type.dtype.numpy
            )
            for value in self._passed[number]
        ]

    def __repr__(self) -> str:
        return printable(f"<StagedMethod {self.name}({describe_inputs(self._graph)})>")


class _StageSource:
    """The graphs of a stage of a method, for the sizes of its inputs."""

    def __init__(
        self, opened: ModelFile, method: str, stage: Stage, guards: Sequence[Guard]
    ) -> None:
        self._where = f"{opened.label}, method {method}"
        symbols = stage.graph.symbols.keys()
        inside = [guard for guard in guards if guard.symbols <= symbols]
        self._read = ReadGraph(stage.graph, inside, opened.label)

    def __call__(self, sizes: Any) -> Graph:
        return self._read(sizes)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """The boundary around what is done with the graphs of a file."""
        return reading(self._where)


def _read(opened: ModelFile, method: str) -> ReadGraph:
    with GuardLog() as log:
        graph = with_early_stores(opened.graph(method))
    return ReadGraph(graph, list(log.guards), opened.label)

"""A loaded program: what `purevk.load` returns."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from purevk import knobs
from purevk.closing import Closing
from purevk.errors import InputError, PurevkError
from purevk.graph.call_memory import MemoryReport
from purevk.graph.context import Context
from purevk.graph.executable import Executable
from purevk.graph.memory import DeviceStore
from purevk.ir import Graph, Value
from purevk.plain_text import printable
from purevk.program.cpu_nodes import log_cpu_nodes, warn_of_torch
from purevk.program.host_memory import HostMemory
from purevk.program.leaves import Leaves
from purevk.program.method import Method
from purevk.program.options import check_round
from purevk.program.specs import ArgumentSpec
from purevk.program.state import StateMapping
from purevk.program.submissions import Submissions
from purevk.program.variants.variant import GraphSource
from purevk.schedule.plan import count_steps

if TYPE_CHECKING:
    from purevk.graph.drawing import GraphDrawing

_log = logging.getLogger("purevk")


class WeightWatch(Protocol):
    """Knows the modules that were compiled, with their tensors and Python values."""

    def changed(self) -> bool:
        """Whether a module is another one than when it was read."""

    def written(self) -> bool:
        """Whether its tensors were written as torch counts it, moved or replaced."""

    def altered(self) -> bool:
        """Whether it was changed in a way that `written` does not see."""

    def update(self, program: Program) -> None:
        """Has the sources read the modules as they are now."""

    def include(self, source: Any) -> None:
        """Watches the tensors of another export too."""


class Program(Closing):
    """A program on a device: its methods, weights and state.

    Made by `purevk.load`. Use as a context manager, or call `close()`; a program that nobody refers
    to any more is released too.

    Attributes:
        methods: by name.
        context: the device that it runs on.
        bounds: "exported", "grow" or "strict", see `load`; "open": as "grow", for bounds that
            nobody gave.
        round: "fused" or "eager", see `load`.
        may_compile: whether kernels that the cache lacks are compiled.
        weights, states: what is on the device between calls.
        leaves: the constants and states that lowerings share.
        shares_weights: whether graphs may be of several methods, see `Graph`.
        host_memory: for copies of the inputs of submitted calls.
        seconds: what loading took, by phase.
        reloading: whether changed weights are not completely on the device.
        origin: a function, and the arguments with which it makes the program again.
        local_weights: gives the bytes of weights on the device by the first graph, before anything
            is put there; others are in memory of the host. None: all are on the device.
    """

    def __init__(
        self,
        name: str,
        sources: Mapping[str, GraphSource],
        context: Context,
        progress: Callable[[str, int, int], None] | None = None,
        closing: Callable[[], None] | None = None,
        bounds: str = "exported",
        weight_watch: WeightWatch | None = None,
        compile: str = "allowed",
        round: str = "fused",
        local_weights: Callable[[Graph], int | None] | None = None,
    ) -> None:
        if bounds not in ("exported", "grow", "strict", "open"):
            raise InputError(
                f"bounds={bounds!r} is not known",
                where=name,
                why='"exported", "grow" or "strict" is accepted',
                next='leave bounds out for "exported"',
            )
        if compile not in ("allowed", "never"):
            raise InputError(
                f"compile={compile!r} is not known",
                where=name,
                why='"allowed" or "never" is accepted',
                next='leave compile out for "allowed"',
            )
        check_round(round, name)
        self.round = round
        self.may_compile = compile == "allowed"
        self.weight_watch = weight_watch
        self.name, self.context, self.bounds = name, context, bounds
        self.progress, self._closing = progress, closing
        self.weights = DeviceStore(context.device, "weights")
        self.local_weights = local_weights
        self.states = DeviceStore(context.device, "state")
        self.seconds: dict[str, float] = {}
        self.executables: weakref.WeakSet[Executable] = weakref.WeakSet()
        self.leaves = Leaves()
        # The graphs of torch.compile come one after the other.
        self.shares_weights = bounds == "open" or len(sources) > 1
        self.reloading = False
        self._closed = False
        self.origin: tuple[Callable[..., Program], tuple[Any, ...]] | None = None
        self._submissions: Submissions | None = None
        self._in_flight = 2
        self.host_memory = HostMemory()
        self.lock = threading.RLock()
        self.state_lock = threading.RLock()  # of all methods that have states
        self._starting = threading.Lock()
        self._kernels: dict[str, Any] = {}
        self.methods: dict[str, Method] = {}
        context.programs.add(self)
        try:
            self.add_methods(sources)
        except BaseException:
            self.close()
            raise

    def add_methods(self, sources: Mapping[str, GraphSource]) -> None:
        """Lowers further methods. They share weights with those that there are, where the bytes are
        the same memory."""
        before = vars(self.context.kernels.report).copy()
        for method, source in sources.items():
            self.methods[method] = Method(self, method, source)
        plans = [self.methods[method].executable.plan for method in sources]
        log_cpu_nodes(
            self.name,
            [nested for plan in plans for nested in plan.nested()],
            self.context.traits.max_storage_range,
        )
        start = time.perf_counter()
        self.context.kernels.save()
        self.add_seconds("save", start)
        for key, count in vars(self.context.kernels.report).items():
            if key != "templates":
                self._kernels[key] = self._kernels.get(key, 0) + count - before[key]

    def admit(self, graph: Graph) -> None:
        """Called with each graph, before anything of it is put onto the device."""
        if self.local_weights is not None:
            self.weights.local_bytes, self.local_weights = self.local_weights(graph), None

    # -- calls ------------------------------------------------------------------------------------
    def forward(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Runs the method "forward"; see `Method.__call__`."""
        return self.method("forward")(*args, out=out, **kwargs)

    __call__ = forward

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts the method "forward" and returns a future of its result; see `Method.submit`."""
        return self.method("forward").submit(*args, **kwargs)

    @property
    def inputs(self) -> list[ArgumentSpec]:
        """The inputs of the method "forward": names, dtypes, sizes and their bounds."""
        return self.method("forward").inputs

    @property
    def outputs(self) -> list[ArgumentSpec]:
        """The outputs of the method "forward": names, dtypes and sizes."""
        return self.method("forward").outputs

    def refresh(self) -> None:
        """Takes over weights of a module that were changed since they were copied to the device."""
        watch = self.weight_watch
        if watch is not None and (self.reloading or watch.changed()):
            self._reload_weights()

    def _reload_weights(self) -> None:
        _log.info("%s: weights of the module were changed; copying them again", self.name)
        watch = self.weight_watch
        assert watch is not None
        with self.held(), self.lock:
            self.reloading = True  # until all is done: a call after an error tries again
            watch.update(self)
            for method in self.methods.values():
                method.close()
            self.weights.close()
            self.weights = DeviceStore(
                self.context.device, "weights", local_bytes=self.weights.local_bytes
            )
            self.leaves.forget_constants()
            for method in self.methods.values():
                method.restart()
            self.reloading = False

    @property
    def in_flight(self) -> int:
        """Submitted calls that may be unfinished at a time; what it is at the first `submit`
        counts.

        Raises:
            InputError: it is set to something other than an integer above 0.
        """
        return self._in_flight

    @in_flight.setter
    def in_flight(self, calls: int) -> None:
        if isinstance(calls, bool) or not hasattr(calls, "__index__") or int(calls) < 1:
            raise InputError(
                f"in_flight is {calls!r}",
                where=self.name,
                why="the number of calls that may be unfinished, an integer above 0, is expected",
                next="set 1 for one call at a time; 2 is the default",
            )
        self._in_flight = int(calls)

    @property
    def submissions(self) -> Submissions:
        """The thread of submitted calls."""
        self.check_open()
        if self._submissions is None:
            with self._starting:
                if self._submissions is None:
                    self._submissions = Submissions(self.in_flight)
        return self._submissions

    def settle(self) -> None:
        """Waits until all submitted calls are finished."""
        self.context.device.check_process()
        if self._submissions is not None:
            self._submissions.settle()

    def begin_call(self) -> None:
        """Before a call: waits for submitted calls. With PUREVK_CHECK, which compares with the weights
        as they are, or after an error, copies weights that were changed.

        Raises:
            PurevkError: the program is closed.
        """
        self.check_open()
        if self._submissions is not None:
            self._submissions.settle()
        if self.reloading or knobs.CHECK():
            self.refresh()

    def method(self, name: str) -> Method:
        """A method by its name. Raises `InputError` with the names that there are."""
        try:
            return self.methods[name]
        except KeyError:
            raise InputError(
                f"there is no method {name!r}",
                where=self.name,
                why=f"methods: {', '.join(self.methods)}",
                next="name one of these",
            ) from None

    def reset_state(self) -> None:
        """Gives every state (such as a KV cache) its first content again, after the calls that were
        made before."""
        with self.held():
            items: dict[Value, Any] = {}
            for method in self.methods.values():
                for graph in method.graph.nested():
                    for value, first in graph.states.items():
                        items[value] = None if first is None else first.data[: value.type.nbytes]
            self.states.upload(list(items.items()))

    @property
    def state(self) -> StateMapping:
        """What lives on the device between calls, by name: `program.state["cache"]` reads, and
        assigning writes."""
        return StateMapping(self, [self])

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Writes all states into an .npz file of numpy (bfloat16 as the bits, in uint16)."""
        self.state.save(path)

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Reads what `save_state` wrote.

        Raises:
            FileFormatError: the file is damaged, or of another format.
            InputError: the names, dtypes or sizes are not those of this program's states.

        After an error, the states are as before.
        """
        self.state.load(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, no call runs, and those made before are finished."""
        self.settle()
        with contextlib.ExitStack() as stack:
            for method in self.methods.values():
                stack.enter_context(method.lock)
            self.check_open()
            yield

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the program to a file that `purevk.load` takes (docs/formats.md): its graphs
        before any pass, so that it runs on any device, and its tensors. States are written with
        their first content. `TorchNeededWarning` says if some nodes run on the CPU by torch alone.

        Raises:
            UnsupportedProgramError: it holds something that the format has no form for.
            OSError: the file cannot be written.
        """
        from purevk import __version__
        from purevk.frontends.saved import write_program

        self.check_open()
        plans = [
            method.executable.plan for method in self.methods.values() if method.specializations
        ]
        warn_of_torch(self.name, [each for plan in plans for each in plan.nested()])
        sources = {
            name: getattr(method.source, "for_file", method.source)
            for name, method in self.methods.items()
        }
        write_program(path, self.name, sources, f"purevk {__version__}")

    def graph(self, method: str = "forward") -> GraphDrawing:
        """The optimized graph of a method: print it, or take its `to_json()`, `to_mermaid()` or
        `data()`."""
        from purevk.graph.drawing import GraphDrawing

        self.check_open()
        return GraphDrawing(self.method(method).executable.plan)

    # -- reports ----------------------------------------------------------------------------------
    @property
    def device(self) -> Any:
        """The device that it runs on."""
        return self.context.device

    @property
    def memory(self) -> MemoryReport:
        """Bytes on the device; see `MemoryReport`. The planned ones are of all methods together."""
        memories = [
            memory
            for method in self.methods.values()
            for specialization in method.specializations
            for inner in specialization.executable.nested()
            for memory in inner.call_memories
        ]
        return MemoryReport(
            planned=sum(call_memory.plan.planned for call_memory in memories),
            naive=sum(call_memory.plan.naive for call_memory in memories),
            lower_bound=sum(call_memory.plan.lower_bound for call_memory in memories),
            inputs=sum(call_memory.input_bytes for call_memory in memories),
            outputs=sum(call_memory.output_bytes for call_memory in memories),
            weights=self.weights.nbytes,
            state=self.states.nbytes,
        )

    def report(self) -> dict[str, Any]:
        """What loading took.

        Returns:
            "device", "kernels" (pipelines; of their SPIR-V modules, those compiled and those from
            the cache), "seconds" by phase, "dispatches", "segments", "cpu_nodes" and "control_flow"
            (choices and loops that the host runs) of all methods, those in sub-graphs included.
        """
        self.check_open()
        return {
            "device": self.device.name,
            "kernels": {
                key: self._kernels.get(key, 0) for key in ("pipelines", "compiled", "cached")
            },
            "seconds": dict(self.seconds),
            **count_steps(method.executable.plan for method in self.methods.values()),
        }

    def report_html(self, *args: Any, method: str | None = None, **kwargs: Any) -> str:
        """A page about the program: graphs, where nodes run and why, kernels with their GLSL, memory,
        guards. It is one HTML document, which needs no network.

        Args:
            args, kwargs: of a call of the method. Each of its dispatches is timed then, and compared
                with the limits of the device, which takes a few seconds. States and generators are
                as before afterwards. If the dispatches cannot be timed, the page says why.
            method: shown alone; None: all methods, and "forward" is the one that is timed.

        Raises:
            InputError: there is no such method, or it does not take the arguments.
        """
        from purevk.program.pages import program_page

        self.check_open()
        return program_page(self, method, args, kwargs)

    def _repr_html_(self) -> str:
        """What notebooks show: the page of `report_html`, in a frame, or a summary if the page is too
        large."""
        from purevk.program.pages import program_output

        return program_output(self, self._closed)

    def add_seconds(self, phase: str, start: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    # -- sharing between methods and specializations ----------------------------------------------
    def share_leaves(self, method: str, graph: Graph) -> Graph:
        """The graph with constants and states that an earlier lowering had replaced by the same
        values, so that weights are on the device once and state is one."""
        shared = self.leaves.share(method, graph)
        return replace(shared, shares_weights=graph.shares_weights or self.shares_weights)

    def release_unused(self) -> None:
        """Releases constants that no lowering reads any more."""
        with self.lock:
            plans = [
                inner.plan
                for executable in list(self.executables)
                if not executable.closed
                for inner in executable.nested()
            ]
            constants = {value for plan in plans for value in plan.graph.constants}
            self.weights.keep(constants.union(*(plan.once_kept for plan in plans)))
            self.leaves.forget_constants(constants)

    # -- lifetime ---------------------------------------------------------------------------------
    def check_open(self) -> None:
        """Raises PurevkError if the program is closed, or was made before the process was forked."""
        self.context.device.check_process()
        if self._closed:
            raise PurevkError("the program is closed", where=self.name, next="load it again")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles, and copies, a program that was loaded from a path: as the path, the options and
        the states. The other process loads it again, on its own best device (or PUREVK_DEVICE).

        Raises:
            PurevkError: it was made in another way, or has a context of its own.
        """
        self.check_open()
        if self.origin is None:
            raise PurevkError(
                f"{self.name} cannot be pickled or copied",
                where=self.name,
                why="only a program that was loaded from a path, on the default context, can",
                next="save it with program.save(path), and load this file where it is needed",
            )
        again, arguments = self.origin
        return again, arguments, dict(self.state) or None

    def __setstate__(self, states: dict[str, np.ndarray]) -> None:
        self.state.update(states)

    def close(self) -> None:
        """Waits for the calls that were made, then releases everything of the program on the
        device, and the file. Safe to call twice."""
        if self._closed:
            return
        if self.context.device.core.forked:
            self._closed = True  # what it has belongs to the parent process, locks included
            return
        if self._submissions is not None:
            self._submissions.close()
        if self._closed:
            return
        self._closed = True
        if not self.context.closed:
            for method in self.methods.values():
                method.close()
            self.weights.close()
            self.states.close()
        if self._closing is not None:
            self._closing()

    def __repr__(self) -> str:
        about = printable(f"Program {self.name} on {self.device.name}: {', '.join(self.methods)}")
        if self._closed:
            return f"<{about}; closed>"
        on_cpu = count_steps(method.executable.plan for method in self.methods.values())[
            "cpu_nodes"
        ]
        return f"<{about}; nodes on the CPU: {on_cpu}>" if on_cpu else f"<{about}>"

"""A loaded program: what `purevk.load` returns."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from purevk import progress as progress_bars
from purevk import pte
from purevk.errors import FileFormatError, GraphError, InputError, PurevkError
from purevk.graph.context import Context, default_context
from purevk.graph.executable import Executable, make_plan
from purevk.graph.memory import DeviceStore
from purevk.inputs import describe_inputs, read_inputs
from purevk.ir import Graph, Guard, GuardLog, Symbol, Value
from purevk.ir import dims as _dims
from purevk.passes.pipeline import optimize

GraphSource = Callable[[Sequence[tuple[int, ...] | None] | None], Graph]
MAX_SPECIALIZATIONS = 8


class _Specialization:
    """A method lowered under guards: it serves calls whose sizes keep them and the symbols' bounds."""

    def __init__(self, graph: Graph, guards: Sequence[Guard], executable: Executable) -> None:
        self.graph, self.guards, self.executable = graph, tuple(guards), executable
        self._known: dict[tuple[int, ...], bool] = {}

    def serves(self, env: Mapping[Symbol, int]) -> bool:
        """Whether the sizes of a call keep the bounds and the guards."""
        key = tuple(env[symbol] for symbol, _ in self.executable.input_symbols if symbol.is_size)
        found = self._known.get(key)
        if found is None:
            found = all(symbol.lower <= env[symbol] <= symbol.upper for symbol in env if symbol.is_size)
            found = found and all(
                guard.holds(env) for guard in self.guards
                if (_dims.symbols(guard.left) | _dims.symbols(guard.right)) <= set(env)
            )  # fmt: skip
            self._known[key] = found
        return found


class Method:
    """One method of a program. Call it with tensors."""

    def __init__(self, program: "Program", name: str, source: GraphSource, states: dict[int, Value] | None = None) -> None:
        self.program, self.name, self._source = program, name, source
        self._specializations: list[_Specialization] = []
        self._lock = threading.RLock()
        self.graph: Graph = self._prepare(None).graph

    # -- lowering -----------------------------------------------------------------------------------------------------
    def _prepare(self, sizes: Sequence[tuple[int, ...] | None] | None) -> _Specialization:
        program = self.program
        with GuardLog() as log:
            start = time.perf_counter()
            imported = self._source(sizes)
            imported = program._shared_leaves(self.name, imported)
            program._add_seconds("import", start)
            start = time.perf_counter()
            graph = optimize(imported, program.context.traits)
            program._add_seconds("passes", start)
            start = time.perf_counter()
            plan = make_plan(graph, program.context.traits)
            program._add_seconds("lower", start)
        executable = Executable(program.context, plan, program._weights, program._states, program._progress)
        for phase, seconds in executable.seconds.items():
            program._seconds[phase] = program._seconds.get(phase, 0.0) + seconds
        made = _Specialization(graph, list(log.guards), executable)
        made.imported = imported
        self._specializations.append(made)
        if len(self._specializations) > MAX_SPECIALIZATIONS:
            self._specializations.pop(1).executable.close()
        return made

    # -- calls --------------------------------------------------------------------------------------------------------
    def __call__(self, *inputs: Any) -> Any:
        """Runs the method.

        Args:
            inputs: one for each input of the method, in order: numpy arrays or torch tensors (integers where the method
                takes integers). Their dtypes must be the method's; sizes may be anything up to the exported bounds, and
                beyond them the method is lowered again.

        Returns:
            The output, or a tuple of several: torch tensors if an input was one, else numpy arrays.

        Raises:
            InputError: number, rank, dtype or size of the inputs is wrong.
        """
        with self._lock:
            self.program._check_open()
            first = self._specializations[0]
            given = read_inputs(self, inputs)
            env = self._env(first.graph, given.arrays)
            chosen = first
            if not first.serves(env):
                chosen, env = self._other(given.arrays)
            values = {
                value: array for value, array in zip(chosen.graph.inputs, given.arrays) if isinstance(value, Value)
            }  # fmt: skip
            outputs = chosen.executable.run(values, env)
        results = tuple(given.convert(output, chosen.graph.outputs[n]) for n, output in enumerate(outputs))
        return results[0] if len(results) == 1 else results

    def _env(self, graph: Graph, arrays: Sequence[Any]) -> dict[Symbol, int]:
        place = {id(value): n for n, value in enumerate(graph.inputs)}
        env: dict[Symbol, int] = {}
        for symbol, source in graph.symbols.items():
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

    def _other(self, arrays: Sequence[Any]) -> tuple[_Specialization, dict[Symbol, int]]:
        """A specialization for sizes that the first one does not serve, made now if there is none."""
        sizes = [tuple(array.shape) if isinstance(array, np.ndarray) else None for array in arrays]
        for each in self._specializations[1:]:
            if all(
                not isinstance(value, Value) or value.type.dims == size
                for value, size in zip(each.graph.inputs, sizes)
            ):
                return each, self._env(each.graph, arrays)
        try:
            made = self._prepare(sizes)
        except (FileFormatError, GraphError) as error:
            # The file was sound within its bounds: it is these sizes that do not go together.
            given = ", ".join(
                f"{array.dtype}[{','.join(map(str, array.shape))}]" if isinstance(array, np.ndarray) else str(array)
                for array in arrays
            )  # fmt: skip
            raise InputError(
                f"the method does not take inputs of these sizes: {given}",
                where=f"{self.program.name}, method {self.name}({describe_inputs(self.graph)})",
                why=f"{error.what}: {error.why}", next="pass sizes that belong together and lie within the exported bounds",
            ) from error  # fmt: skip
        return made, self._env(made.graph, arrays)

    @property
    def executable(self) -> Executable:
        """What runs calls within the exported bounds."""
        return self._specializations[0].executable

    def close(self) -> None:
        for each in self._specializations:
            each.executable.close()
        self._specializations.clear()

    def __repr__(self) -> str:
        return f"<Method {self.name}({describe_inputs(self.graph)})>"


class Program:
    """A program on a device: its methods, weights and state.

    Made by `purevk.load`. Use as a context manager, or call `close()`; a program that nobody refers to any more is
    released too.

    Attributes:
        methods: by name.
        context: the device that it runs on.
    """

    def __init__(
        self, name: str, sources: Mapping[str, GraphSource], context: Context,
        progress: Callable[[str, int, int], None] | None = None, closing: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.context = name, context
        self._progress, self._closing = progress, closing
        self._weights = DeviceStore(context.device, "weights")
        self._states = DeviceStore(context.device, "state")
        self._seconds: dict[str, float] = {}
        self._leaves: dict[Any, Value] = {}
        self._closed = False
        before = vars(context.kernels.report).copy()
        self.methods: dict[str, Method] = {}
        context.programs.add(self)
        try:
            for method, source in sources.items():
                self.methods[method] = Method(self, method, source)
            start = time.perf_counter()
            context.kernels.save()
            self._add_seconds("save", start)
        except BaseException:
            self.close()
            raise
        after = vars(context.kernels.report)
        self._kernels = {key: after[key] - before[key] for key in after if key != "templates"}

    # -- calls --------------------------------------------------------------------------------------------------------
    def forward(self, *inputs: Any) -> Any:
        """Runs the method "forward"; see `Method.__call__`."""
        return self.method("forward")(*inputs)

    __call__ = forward

    def method(self, name: str) -> Method:
        """A method by its name. Raises `InputError` with the names that there are."""
        try:
            return self.methods[name]
        except KeyError:
            raise InputError(
                f"there is no method {name!r}", where=self.name, why=f"methods: {', '.join(self.methods)}"
            ) from None

    def reset_state(self) -> None:
        """Gives every state (such as a KV cache) its first content again."""
        self._check_open()
        items: dict[Value, Any] = {}
        for method in self.methods.values():
            for value, first in method.graph.states.items():
                items[value] = None if first is None else first.data[: value.type.nbytes]
        self._states.upload(list(items.items()))

    # -- reports ------------------------------------------------------------------------------------------------------
    @property
    def device(self) -> Any:
        """The device that it runs on."""
        return self.context.device

    @property
    def memory(self) -> Any:
        """Bytes on the device; see `MemoryReport`. The planned ones are of all methods together."""
        from purevk.graph.compute_graph import MemoryReport

        graphs = [each.executable.graph for method in self.methods.values() for each in method._specializations]
        return MemoryReport(
            planned=sum(graph.plan.planned for graph in graphs), naive=sum(graph.plan.naive for graph in graphs),
            lower_bound=sum(graph.plan.lower_bound for graph in graphs), inputs=sum(g.input_bytes for g in graphs),
            outputs=sum(g.output_bytes for g in graphs), weights=self._weights.nbytes, state=self._states.nbytes,
        )  # fmt: skip

    def report(self) -> dict[str, Any]:
        """What loading took.

        Returns:
            "device", "kernels" (pipelines; of their SPIR-V modules, those compiled and those from the cache), "seconds" by
            phase, "dispatches", "segments" and "cpu_nodes" of all methods.
        """
        steps = [step for method in self.methods.values() for step in method.executable.plan.steps]
        return {
            "device": self.device.name,
            "kernels": {key: self._kernels[key] for key in ("pipelines", "compiled", "cached")},
            "seconds": dict(self._seconds),
            "dispatches": sum(len(method.executable.plan.dispatches) for method in self.methods.values()),
            "segments": sum(step.on_device for step in steps),
            "cpu_nodes": sum(not step.on_device for step in steps),
        }

    def _add_seconds(self, phase: str, start: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    # -- sharing between methods and specializations ------------------------------------------------------------------
    def _shared_leaves(self, method: str, graph: Graph) -> Graph:
        """The graph with constants and states that an earlier lowering had replaced by the same values, so that weights are
        on the device once and state is one."""
        from purevk.ir import Node, map_values

        mapping: dict[Value, Value] = {}
        for value, constant in graph.constants.items():
            address = np.frombuffer(constant.data, np.uint8).ctypes.data if len(constant.data) else 0
            key = ("constant", address, len(constant.data), value.type.dtype, value.type.dims)
            mapping[value] = self._leaves.setdefault(key, value)
        for number, value in enumerate(graph.states):
            mapping[value] = self._leaves.setdefault(("state", method, number, value.type.dtype, value.type.dims), value)
        if all(old is new for old, new in mapping.items()):
            return graph
        swap = lambda value: mapping.get(value, value)  # noqa: E731
        return graph.with_nodes(
            [Node(n.op, tuple(map_values(arg, swap) for arg in n.args), n.results, n.source, n.alias) for n in graph.nodes],
            outputs=tuple(map_values(output, swap) for output in graph.outputs),
            constants={mapping[value]: constant for value, constant in graph.constants.items()},
            states={mapping[value]: first for value, first in graph.states.items()},
        )

    # -- lifetime -----------------------------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closed:
            raise PurevkError("the program is closed", where=self.name, next="load it again")

    def close(self) -> None:
        """Releases everything of the program on the device, and the file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if not self.context.closed:
            for method in self.methods.values():
                method.close()
            self._weights.close()
            self._states.close()
        if self._closing is not None:
            self._closing()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Program {self.name} on {self.device.name}: {', '.join(self.methods)}>"


def load(
    file: str | os.PathLike[str] | bytes,
    data_files: Iterable[str | os.PathLike[str]] = (),
    *,
    context: Context | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Program:
    """Loads a .pte file and makes it ready to run.

    Args:
        file: path, or the file's bytes.
        data_files: .ptd files with weights that are not in the program.
        context: device to run on; None: the best one, or that of PUREVK_DEVICE.
        progress: called with (phase, done, total) during long work; None: a progress bar on a terminal.

    Raises:
        FileFormatError: it is no .pte file, or damaged.
        UnsupportedProgramError: it holds a delegate of another backend, or control flow.
        DeviceError: there is no Vulkan device.
        ShaderCompilerError: kernels have to be compiled and there is no compiler.
    """
    from purevk.frontends.pte import read_method

    program = pte.read_program(file, data_files)
    try:
        sources = {
            name: (lambda sizes, name=name: read_method(program, name, sizes)) for name in program.methods
        }
        label = Path(program.name).name if not isinstance(file, bytes) else "<bytes>"
        shown = progress_bars.default() if progress is None else progress
        with progress_bars.closing(shown):
            return Program(label, sources, context or default_context(), shown, program.close)
    except BaseException:
        program.close()
        raise

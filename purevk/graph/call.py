"""One call of an executable: what it brings, what the host reads of it, and its outputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from purevk import fallback
from purevk.errors import InputError
from purevk.ir import Dim, Node, Symbol, Value
from purevk.ir import dims as _dims
from purevk.mapped import is_mapped

if TYPE_CHECKING:
    from purevk.dtypes import DType
    from purevk.graph.call_memory import CallMemory
    from purevk.graph.executable import Executable

# Bytes of an input, such as a position, that are copied by way of an object of Python: making an
# array over the memory of the device takes longer.
_SMALL = 1024


class HostForm(NamedTuple):
    """How the elements of a value lie in the memory of the host."""

    sizes: tuple[int, ...]
    dtype: np.dtype
    numel: int
    nbytes: int


class Call:
    """One call of an executable.

    Attributes:
        tensors: the tensors of the call: arrays of the right dtype, with any strides, or tensors of
            another API.
        env: values of the inputs' symbols. The executable adds unbacked symbols.
        targets: for each output, memory to write it to, or None.
        on_submit: called once, while the device runs if there is a segment for it. What it raises
            ends the call, before anything is written to `targets`.
        host: the elements that are on the host by now.
    """

    executable: Executable
    memory: CallMemory
    host: dict[Value, np.ndarray]

    def __init__(
        self,
        tensors: Mapping[Value, Any],
        env: dict[Symbol, int],
        targets: Sequence[Any] | None = None,
        on_submit: Callable[[], None] | None = None,
    ) -> None:
        self.tensors, self.env, self.targets = tensors, env, targets
        self.on_submit = on_submit

    def begin(self, executable: Executable, memory: CallMemory) -> None:
        """Has an executable run the call from the beginning, with inputs and outputs in `memory`."""
        self.executable, self.memory, self.host = executable, memory, dict(self.tensors)

    def submitted(self) -> None:
        """Calls `on_submit`, if nobody has."""
        on_submit, self.on_submit = self.on_submit, None
        if on_submit is not None:
            on_submit()

    # -- elements on the host --------------------------------------------------------------------
    def upload(self, value: Value) -> None:
        """Copies the elements of a value to memory that the device reads."""
        array = self.host[value] if value in self.host else self.read(value)
        target, nbytes = self.memory.upload_view(value), array.nbytes
        if 0 < nbytes <= _SMALL:
            target[:nbytes] = array.tobytes()
        elif nbytes:
            np.copyto(np.ndarray(array.shape, array.dtype, target), array)

    def read(self, value: Value) -> np.ndarray:
        """The elements of a value on the host, read from the device if they are not there."""
        array = self.host.get(value)
        if array is not None:
            return array
        executable = self.executable
        plan = executable.plan
        graph = plan.assignment.graph
        if value in graph.constants:
            array = executable.constants.get(value)
            if array is None:
                constant = graph.constants[value]
                array = constant.array(value.type)
                if is_mapped(constant.data):  # the memory of a module may change
                    executable.constants[value] = array
        else:
            storage = plan.assignment.storages.get(value, value)
            sizes, dtype, numel, nbytes = self.form(value)
            weights, states = executable.weights, executable.states
            if not numel:
                array = np.empty(sizes, dtype)
            elif storage in self.host and storage is not value:
                array = self.host[storage].reshape(-1).view(dtype)[:numel].reshape(sizes)
            elif storage in weights.ranges or storage in states.ranges:
                store = weights if storage in weights.ranges else states
                data = store.read(storage, max(nbytes, 4))[:nbytes]
                array = np.frombuffer(data, dtype).reshape(sizes)
            else:
                array = np.ndarray(sizes, dtype, self.memory.download_view(storage))
            if storage in states.ranges:
                return array  # a state may change during the call
        self.host[value] = array
        return array

    def form(self, value: Value) -> HostForm:
        """How the elements of a value lie in the memory of the host; the executable remembers it if
        no symbol changes it."""
        form = self.executable.forms.get(value)
        if form is not None:
            return form
        dims, dtype = value.type.dims, value.type.dtype
        sizes = tuple([_dims.evaluate(size, self.env) for size in dims])
        numel = math.prod(sizes)
        form = HostForm(sizes, dtype.numpy, numel, numel * dtype.itemsize)
        if not any(isinstance(size, Dim) for size in dims):
            self.executable.forms[value] = form
        return form

    # -- steps of the host -----------------------------------------------------------------------
    def run_on_cpu(self, node: Node) -> None:
        """Runs a node on the CPU."""
        name, reason, args = node.args
        assert isinstance(name, str)  # as `passes.placement` wraps nodes
        executable = self.executable
        arrays = {value: self.read(value) for value in node.inputs}
        arguments = evaluated(args, self.env)
        start = time.perf_counter()
        results = fallback.run(
            name,
            arguments,
            arrays,
            [value.type for value in node.results],
            node.source,
            executable.plan.graph.trusted,
            str(reason),
        )
        if executable.observation is not None:
            executable.observation.on_cpu.append((node, time.perf_counter() - start))
        self.host.update(zip(node.results, results))

    def bind_unbacked(self, number: int) -> None:
        """Reads the unbacked symbols that are known after step `number`, and checks them. -1: before
        the first step."""
        unbacked = self.executable.unbacked
        stage = unbacked.stages.get(number)
        if stage is None:
            return
        for symbol, source in stage.symbols:
            assert source.value is not None  # unbacked symbols have sources
            self.env[symbol] = source.read(self.read(source.value))
        unbacked.check(stage, self.env, self.executable.plan.graph)

    # -- outputs ---------------------------------------------------------------------------------
    def outputs(self) -> list[Any]:
        """The outputs in order, in memory of the caller: copies or the targets; integers or None. The
        next call overwrites the buffers that they are in now."""
        outputs: list[Any] = []
        for number, output in enumerate(self.executable.plan.assignment.graph.outputs):
            if not isinstance(output, Value):
                outputs.append(evaluated(output, self.env))
                continue
            array = self.read(output)
            target = None if self.targets is None else self.targets[number]
            if target is None:
                outputs.append(self.copy(array, output.type.dtype))
            else:
                self.check_target(target, array.shape)
                np.copyto(target, array)
                outputs.append(target)
        return outputs

    def copy(self, array: np.ndarray, dtype: DType) -> Any:
        """A copy of an output without a target. `array` has the bits of bfloat16 as uint16."""
        return array.copy()

    def check_target(self, target: Any, sizes: tuple[int, ...]) -> None:
        """Raises `InputError` if memory for an output has other sizes."""
        if tuple(target.shape) != sizes:
            raise InputError(
                f"out has sizes {list(target.shape)}",
                where=self.executable.plan.graph.name,
                why=f"the result has sizes {list(sizes)}",
                next="pass memory of the sizes of the result, or call it without out=",
            )


def evaluated(arg: Any, env: Mapping[Symbol, int]) -> Any:
    if isinstance(arg, Dim):
        return _dims.evaluate(arg, env)
    if isinstance(arg, tuple):
        return tuple(evaluated(item, env) for item in arg)
    return arg

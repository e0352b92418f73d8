"""Calls with tensors in the memory of another API on the same device, such as CUDA. Nothing passes
through the host: both APIs see the buffers of inputs and outputs, and semaphores order their work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from purevk import api
from purevk.dtypes import DType
from purevk.graph.call_memory import CallMemory
from purevk.graph.compute_graph import ComputeGraph
from purevk.graph.memory import BufferRange
from purevk.ir import Symbol, Value


class ExternalRange(NamedTuple):
    """A tensor in an exported buffer: row-major from the first byte of a buffer range."""

    span: BufferRange
    sizes: tuple[int, ...]
    dtype: DType


class ExternalMemory(Protocol):
    """Exported buffers and semaphores, imported by the other API.

    Work of the other API goes to a stream: that of the caller.
    """

    def begin(self) -> None:
        """Has the stream wait until the other API has finished with the buffers."""
        ...

    def write(self, target: ExternalRange, tensor: Any) -> None:
        """Copies a tensor of the same sizes into a buffer, in the stream."""
        ...

    def signal(self, value: int) -> None:
        """Signals a value of the first semaphore once the stream has got here."""
        ...

    def wait(self, value: int) -> None:
        """Has the stream wait for a value of the second semaphore."""
        ...

    def read(self, source: ExternalRange, target: Any) -> Any:
        """Copies from a buffer, in the stream: into `target`, or into a new tensor if it is None."""
        ...

    def end(self) -> None:
        """Notes that the stream is the last to use the buffers."""
        ...

    def close(self) -> None:
        """Waits for the streams, and gives the imports back."""
        ...


class ExternalDevice(Protocol):
    """The device, as the other API names it."""

    def open(
        self,
        buffers: Sequence[api.Buffer],
        semaphores: tuple[api.TimelineSemaphore, api.TimelineSemaphore],
    ) -> ExternalMemory:
        """Imports buffers of kind EXTERNAL and external semaphores.

        Raises:
            DeviceError: the other API refuses them.
        """
        ...


class ExternalCalls:
    """Calls of a segment with tensors of another API.

    Args:
        graph: has one segment, and its inputs and outputs in external memory.
        device: the device in the other API.
    """

    def __init__(self, graph: ComputeGraph, device: ExternalDevice) -> None:
        self._graph = graph
        self._count = 0
        self._semaphores: tuple[api.TimelineSemaphore, ...] = ()
        self._imported: ExternalMemory | None = None
        try:
            shared = graph.device.features.external_semaphore_fd
            first, second = (api.TimelineSemaphore(graph.device, external=shared) for _ in range(2))
            self._semaphores = pair = first, second
            self._imported = device.open(graph.memory.external_buffers, pair)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        inputs: Sequence[tuple[ExternalRange, Any]],
        outputs: Sequence[tuple[ExternalRange, Any] | None],
        env: Mapping[Symbol, int],
        on_submit: Callable[[], None],
    ) -> list[Any]:
        """One call. It returns before the device has finished; what the caller's stream does next
        waits for it.

        Args:
            inputs: where each tensor goes.
            outputs: where each result is, and a tensor to write it to or None; None for a result
                that is not in the buffers.
            env: values of the symbols.
            on_submit: called after the submission.

        Returns:
            The results, as the other API's tensors.
        """
        imported, graph = self._imported, self._graph
        assert imported is not None  # until it is closed
        graph.settle()
        imported.begin()
        for target, tensor in inputs:
            imported.write(target, tensor)
        self._count += 1
        imported.signal(self._count)
        first, second = self._semaphores
        graph.submit(0, env, ((first, self._count), (second, self._count)))
        imported.wait(self._count)
        try:
            on_submit()
            return [None if output is None else imported.read(*output) for output in outputs]
        except BaseException:
            graph.settle()
            graph.memory.take_note()  # of a call whose results nobody gets
            raise
        finally:
            imported.end()

    @property
    def memory(self) -> CallMemory:
        """The memory of calls."""
        return self._graph.memory

    def settle(self) -> None:
        """Waits until the device has finished the last call."""
        self._graph.settle()

    def range_of(self, storage: Value, sizes: tuple[int, ...], dtype: DType) -> ExternalRange:
        """Where a tensor is."""
        memory = self._graph.memory
        return ExternalRange(memory.copies.get(storage) or memory.ranges[storage], sizes, dtype)

    def close(self) -> None:
        """Waits for the last call, and releases its memory."""
        if self._imported is not None:
            self._imported.close()
            self._imported = None
        self._graph.close()
        for semaphore in self._semaphores:
            semaphore.destroy()
        self._semaphores = ()

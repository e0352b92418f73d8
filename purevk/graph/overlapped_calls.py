"""Calls that are submitted before the one before has finished."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from purevk import api
from purevk.errors import DeviceError
from purevk.graph.call_memory import CallMemory
from purevk.graph.compute_graph import ComputeGraph
from purevk.ir import Symbol


class StartedCall:
    """A call that was submitted to the device.

    Args:
        submission: of the call.
        read: reads the outputs when the device has finished.
    """

    def __init__(self, submission: api.Submission, read: Callable[[], Sequence[Any]]) -> None:
        self._submission, self._read = submission, read
        self._lock = threading.Lock()
        self._outputs: Sequence[Any] | None = None

    def result(self) -> Sequence[Any]:
        """Waits for the device, and gives copies of the outputs.

        Raises:
            DeviceLostError: the device is lost, or the time is over.
        """
        with self._lock:
            if self._outputs is None:
                self._submission.wait()
                self._outputs = self._read()
        return self._outputs


class OverlappedCalls:
    """Calls of an executable, each of which is one submission.

    The device runs submissions in order, and each waits for what the one before wrote. Two memories
    for inputs, outputs and temporaries alternate, so two calls may be unfinished. A third waits for
    the first.

    Args:
        make: makes the dispatches with a memory of their own.
    """

    def __init__(self, make: Callable[[], ComputeGraph]) -> None:
        self.graphs: list[ComputeGraph] = []
        self._calls: list[StartedCall | None] = [None, None]
        self._next = 0
        try:
            for _ in self._calls:
                self.graphs.append(make())
        except BaseException:
            self.close()
            raise

    def start(
        self,
        env: Mapping[Symbol, int],
        write: Callable[[CallMemory], None],
        read: Callable[[], Sequence[Any]],
    ) -> StartedCall:
        """Submits a call.

        Args:
            env: the values of its symbols.
            write: copies the inputs to the memory of a graph.
            read: copies the outputs from there.
        """
        graph, earlier = self.graphs[self._next], self._calls[self._next]
        if earlier is not None:
            earlier.result()  # before its outputs are overwritten
        write(graph.memory)
        call = StartedCall(graph.submit(0, env), read)
        self._calls[self._next] = call
        self._next ^= 1
        return call

    def close(self) -> None:
        """Waits for the calls, whose results can be had afterwards, and releases their memory."""
        for call in filter(None, self._calls):
            with contextlib.suppress(DeviceError):  # as `result` raises it again
                call.result()
        for graph in self.graphs:
            graph.settle()  # a start that was interrupted
            graph.close()
        self.graphs, self._calls = [], [None, None]

"""Calls that start before the device has finished the one before, so that it never waits for the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from purevk import api
from purevk.graph.compute_graph import ComputeGraph
from purevk.ir import Symbol, Value


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
        inputs, outputs: how to copy inputs to the memory of a graph, and outputs from it.
    """

    def __init__(
        self,
        make: Callable[[], ComputeGraph],
        inputs: Callable[[ComputeGraph, Mapping[Value, np.ndarray]], None],
        outputs: Callable[[ComputeGraph, Mapping[Symbol, int]], Sequence[Any]],
    ) -> None:
        self._inputs, self._outputs = inputs, outputs
        self.graphs: list[ComputeGraph] = []
        self._calls: list[StartedCall | None] = [None, None]
        self._next = 0
        try:
            for _ in self._calls:
                self.graphs.append(make())
        except BaseException:
            self.close()
            raise

    def start(self, inputs: Mapping[Value, np.ndarray], env: Mapping[Symbol, int]) -> StartedCall:
        """Submits a call. `env` has the values of its symbols."""
        graph, earlier = self.graphs[self._next], self._calls[self._next]
        if earlier is not None:
            earlier.result()  # before its outputs are overwritten
        self._inputs(graph, inputs)
        submission = graph.submit(0, env)
        call = StartedCall(submission, lambda: self._outputs(graph, env))
        self._calls[self._next] = call
        self._next ^= 1
        return call

    def close(self) -> None:
        """Waits for the calls, and releases their memory."""
        for graph in self.graphs:
            graph.settle()
            graph.close()
        self.graphs, self._calls = [], [None, None]

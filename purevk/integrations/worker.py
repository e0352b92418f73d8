"""A program that an engine serves: ready once it has run, with counters."""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from purevk.errors import InputError
from purevk.program.loading import load
from purevk.program.options import Compile
from purevk.program.specs import ArgumentSpec

LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the buckets of latencies, in seconds. One more has no bound."""


@dataclass(frozen=True)
class WorkerStats:
    """The counters of a worker. Calls of the warmup do not count.

    Attributes:
        calls: calls that ended, those that failed included.
        failures: calls that raised.
        compiles: kernels that were compiled for the worker's device since it began to load.
        queue: calls that wait or run now.
        seconds: latency of all calls that ended, in sum.
        latencies: number of calls for each bucket of `LATENCY_BOUNDS`, and of longer calls.
    """

    calls: int
    failures: int
    compiles: int
    queue: int
    seconds: float
    latencies: tuple[int, ...]


class Worker:
    """Loads a program and runs it for each batch size, so that the first request is fast. An engine
    makes one in each of its processes. Calls from several threads run one after another.

    Args:
        file: path of a .pte, .pvk or .pt2 file.
        device, compile: see `purevk.load`.
        batch_sizes: batch sizes to warm up; empty: the smallest that the program takes.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        device: int | str | None = None,
        compile: Compile = "allowed",
        batch_sizes: Sequence[int] = (),
    ) -> None:
        self._lock = threading.Lock()  # of a call
        self._counts = threading.Lock()
        self._calls = self._failures = self._queue = 0
        self._seconds = 0.0
        self._latencies = [0] * (len(LATENCY_BOUNDS) + 1)
        self.program = load(file, device=device, compile=compile)
        self._report = self.program.context.kernels.report
        self._compiled_before = self._report.compiled - self.program.report()["kernels"]["compiled"]
        try:
            for size in batch_sizes or (None,):
                self.program.forward(*[_example(spec, size) for spec in self.program.inputs])
            self.program.reset_state()
        except BaseException:
            self.program.close()
            raise

    @property
    def stats(self) -> WorkerStats:
        with self._counts:
            return WorkerStats(
                self._calls,
                self._failures,
                self._report.compiled - self._compiled_before,
                self._queue,
                self._seconds,
                tuple(self._latencies),
            )

    def forward(self, *arguments: Any) -> list[np.ndarray]:
        """Calls the program. Returns its outputs as arrays, in order."""
        start = time.perf_counter()
        with self._counts:
            self._queue += 1
        failed = True
        try:
            with self._lock:
                outputs = self.program.forward(*arguments)
                found = outputs if isinstance(outputs, (list, tuple)) else [outputs]
                arrays = [np.asarray(each) for each in found]
            failed = False
            return arrays
        finally:
            seconds = time.perf_counter() - start
            with self._counts:
                self._queue -= 1
                self._calls += 1
                self._failures += failed
                self._seconds += seconds
                self._latencies[bisect.bisect_left(LATENCY_BOUNDS, seconds)] += 1

    def columns(
        self, batch: Mapping[str, np.ndarray], *, keep_inputs: bool = True
    ) -> dict[str, np.ndarray]:
        """Runs a batch given by the names of inputs. Returns it with the outputs, by name; without
        the inputs if `keep_inputs` is False."""
        outputs = self.forward(*self.arguments(batch))
        found = self._named(outputs, len(next(iter(batch.values()))))
        inputs = () if keep_inputs else [spec.name for spec in self.program.inputs]
        return {**{name: each for name, each in batch.items() if name not in inputs}, **found}

    def arguments(self, batch: Mapping[str, np.ndarray], *, only: bool = False) -> list[np.ndarray]:
        """The inputs of a call, in order, from a batch given by their names. With `only`, the batch
        must have no others."""
        names = {spec.name for spec in self.program.inputs}
        if only and batch.keys() - names:
            raise InputError(
                f"there is no input {', '.join(sorted(batch.keys() - names))}",
                why=f"the inputs are {', '.join(sorted(names))}",
                next="leave the others out",
            )
        missing = [spec.name for spec in self.program.inputs if spec.name not in batch]
        if missing:
            raise InputError(
                f"the batch lacks the inputs {', '.join(missing)}",
                why=f"it has {', '.join(map(str, sorted(batch)))}",
                next="give each input of the program by its name, see Program.inputs",
            )
        return [batch[spec.name] for spec in self.program.inputs]

    def sample(self, values: Any) -> list[np.ndarray]:
        """The inputs of one request, checked alone: a wrong one must not fail its whole batch."""
        specs = self.program.inputs
        if not isinstance(values, Mapping) or values.keys() != {spec.name for spec in specs}:
            raise InputError(f"a request has the inputs {[spec.name for spec in specs]}")
        return [_checked(spec, values[spec.name]) for spec in specs]

    def batch(self, samples: Sequence[Sequence[np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """Runs samples, each without the batch dimension, in one call. Returns the outputs of each,
        by name. The first dimension of all inputs and outputs must be that of the batch."""
        try:
            inputs = [np.stack(each) for each in zip(*samples, strict=True)]
        except ValueError as error:
            raise InputError(f"these samples do not fit into one batch: {error}") from error
        outputs = self._named(self.forward(*inputs), len(samples))
        return [{name: each[at] for name, each in outputs.items()} for at in range(len(samples))]

    def _named(self, outputs: list[np.ndarray], size: int) -> dict[str, np.ndarray]:
        names = [spec.name for spec in self.program.outputs]
        for name, output in zip(names, outputs, strict=True):
            if output.ndim == 0 or len(output) != size:
                raise InputError(f"{name} has shape {output.shape} for a batch of {size}")
        return dict(zip(names, outputs, strict=True))

    def collect(self) -> Iterator[Any]:
        """The counters as metrics of prometheus_client. A worker is a collector:
        `prometheus_client.REGISTRY.register(worker)`."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        stats = self.stats
        yield CounterMetricFamily("purevk_calls", "Calls that ended", value=stats.calls)
        yield CounterMetricFamily("purevk_failures", "Calls that raised", value=stats.failures)
        yield CounterMetricFamily("purevk_compiles", "Kernels compiled", value=stats.compiles)
        yield GaugeMetricFamily("purevk_queue", "Calls that wait or run", value=stats.queue)
        total, buckets = 0, []
        for bound, count in zip((*map(str, LATENCY_BOUNDS), "+Inf"), stats.latencies, strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily(
            "purevk_latency_seconds", "Latency of calls", buckets, stats.seconds
        )

    def close(self) -> None:
        self.program.close()


def _example(spec: ArgumentSpec, batch: int | None) -> Any:
    """Zeros for an input, at the lower bounds of its sizes; the first is that of the batch."""
    if spec.kind != "tensor":
        return spec.value if spec.kind == "fixed" else (spec.bounds or (0, None))[0]
    sizes = [size if isinstance(size, int) else max(size.lower, 1) for size in spec.sizes]
    if batch is not None and sizes and not isinstance(spec.sizes[0], int):
        sizes[0] = batch
    return np.zeros(sizes, spec.dtype)


def _checked(spec: ArgumentSpec, value: Any) -> np.ndarray:
    """A value as an input without its batch dimension."""
    if spec.kind != "tensor" or not spec.sizes:
        raise InputError(f"{spec} has no batch dimension, so that requests cannot be batched")
    try:
        given = np.asarray(value)
        array = given.astype(spec.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{spec.name} is no tensor of {spec.dtype}: {error}") from error
    if array.dtype.kind in "iub" and not np.array_equal(array, given):
        raise InputError(f"{spec.name} has values that {spec.dtype} does not have")
    wanted = spec.sizes[1:]
    if array.ndim != len(wanted) or any(
        size != found for size, found in zip(wanted, array.shape) if isinstance(size, int)
    ):
        raise InputError(
            f"{spec.name} has shape {array.shape}, [{', '.join(map(str, wanted))}] "
            "is expected: a request has no batch dimension"
        )
    return array

"""A program that an engine serves: ready once it has run, with counters."""

from __future__ import annotations

import bisect
import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import FallbackError, FileFormatError, InputError, PurevkError, ShapeError
from purevk.integrations.values import (
    bfloat16_bits,
    bfloat16_values,
    read_values,
    request_dtype,
)
from purevk.program.loading import load
from purevk.program.options import Compile
from purevk.program.specs import ArgumentSpec, DimSpec

LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the buckets of latencies, in seconds. One more has no bound."""
CLIENT_ERRORS = (InputError, ShapeError, FileFormatError, FallbackError)
"""What only the inputs of a call can cause once the program has run: sizes that the program does not
take, or elements that one of its checks or an operator on the CPU refuses."""


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
        file: path of a .pte, .ptn, .pvk or .pt2 file.
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
        self.inputs, self.outputs = self.program.inputs, self.program.outputs
        self._report = self.program.context.kernels.report
        self._compiled_before = self._report.compiled - self.program.report()["kernels"]["compiled"]
        try:
            for size in batch_sizes or (None,):
                self._call([_example(spec, size) for spec in self.inputs])
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

    def forward(self, *inputs: Any) -> dict[str, np.ndarray]:
        """Calls the program.

        Args:
            inputs: a value for each of `Program.inputs`, in order. Those that are nested in
                containers, or that the model takes by name only, stand in this order too.

        Returns:
            The outputs, by the names of `Program.outputs`; bfloat16 as float32. An output that is
            None is left out.
        """
        start = time.perf_counter()
        with self._counts:
            self._queue += 1
        failed = True
        try:
            with self._lock:
                outputs = self._call(inputs)
            failed = False
            return outputs
        finally:
            seconds = time.perf_counter() - start
            with self._counts:
                self._queue -= 1
                self._calls += 1
                self._failures += failed
                self._seconds += seconds
                self._latencies[bisect.bisect_left(LATENCY_BOUNDS, seconds)] += 1

    def _call(self, inputs: Sequence[Any]) -> dict[str, np.ndarray]:
        outputs = self.program.method("forward").run_flat(self._bits(inputs))
        arrays = {}
        for spec, output in zip(self.outputs, outputs, strict=True):
            if output is not None:
                array = np.asarray(output)
                bits = spec.dtype == "bfloat16" and array.dtype == np.uint16
                arrays[spec.name] = bfloat16_values(array) if bits else array
        return arrays

    def _bits(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, with float32 arrays that stand for bfloat16 as its bits."""
        return [
            bfloat16_bits(value)
            if spec.dtype == "bfloat16" and getattr(value, "dtype", None) == np.float32
            else value
            for spec, value in zip(self.inputs, inputs)
        ] + list(inputs[len(self.inputs) :])

    def columns(
        self, batch: Mapping[str, np.ndarray], *, keep_inputs: bool = True
    ) -> dict[str, np.ndarray]:
        """Runs a batch given by the names of inputs. Returns it with the outputs, by name; without
        the inputs if `keep_inputs` is False."""
        outputs = self._rows(self.arguments(batch), len(next(iter(batch.values()))))
        inputs = () if keep_inputs else [spec.name for spec in self.inputs]
        return {**{name: each for name, each in batch.items() if name not in inputs}, **outputs}

    def arguments(self, batch: Mapping[str, Any], *, only: bool = False) -> list[Any]:
        """The inputs of a call, in order, from values by their names. An input that the export made
        part of the graph may be left out. With `only`, there must be no others."""
        names = {spec.name for spec in self.inputs}
        if only and batch.keys() - names:
            raise InputError(
                f"there is no input {', '.join(sorted(map(str, batch.keys() - names)))}",
                why=f"the inputs are {', '.join(sorted(names))}",
                next="leave the others out",
            )
        missing = [
            spec.name
            for spec in self.inputs
            if spec.name not in batch and spec.kind in ("tensor", "integer")
        ]
        if missing:
            raise InputError(
                f"the batch lacks the inputs {', '.join(missing)}",
                why=f"it has {', '.join(map(str, sorted(batch)))}",
                next="give each input of the program by its name, see Program.inputs",
            )
        return [batch.get(spec.name, spec.value) for spec in self.inputs]

    @functools.cached_property
    def batch_bounds(self) -> tuple[int, int | None]:
        """The smallest and the largest number of samples in a call; None: any number.

        Raises:
            InputError: samples cannot be batched: the first dim of a tensor is not that of the
                batch, or requests cannot carry its dtype.
        """
        first: int | DimSpec = 1
        integers = [spec for spec in self.outputs if spec.kind == "integer"]
        tensors = [spec for spec in (*self.inputs, *self.outputs) if spec.kind == "tensor"]
        for spec in (*tensors, *integers):
            request_dtype(spec.dtype)
            size = spec.sizes[0] if spec.sizes else None
            if isinstance(size, DimSpec) and not isinstance(first, DimSpec):
                first = size
            if size is None or str(size) != str(first):
                raise InputError(
                    f"{spec} has no batch dimension",
                    why="one dynamic size is expected as the first of all inputs and outputs",
                    next='export the model with dynamic_shapes={"x": {0: torch.export.Dim("batch")}}'
                    " for each input",
                )
        return (1, 1) if isinstance(first, int) else (max(first.lower, 1), first.upper)

    def sample(self, values: Any) -> list[Any]:
        """The inputs of one request, without the batch dimension, checked alone: a wrong one must
        not fail its whole batch.

        Args:
            values: by the names of inputs: numbers, or nested lists of them.

        Raises:
            InputError: a name, dtype, size or element is not what the program takes.
        """
        smallest, _ = self.batch_bounds
        names = [spec.name for spec in self.inputs]
        if not isinstance(values, Mapping):
            raise InputError(
                f"a request has the inputs {names}", why=f"{type(values).__name__} was given"
            )
        try:
            arguments = self.arguments(values, only=True)
        except InputError as error:
            raise InputError(f"a request has the inputs {names}", why=error.what) from None
        sample = [
            _without_batch(spec, value) if spec.kind == "tensor" else value
            for spec, value in zip(self.inputs, arguments)
        ]
        inputs = self._bits(_stacked(self.inputs, [sample] * smallest))
        self.program.method("forward").check_flat(inputs, outer=1)
        return sample

    def batch(self, samples: Sequence[Sequence[Any]]) -> list[dict[str, np.ndarray] | PurevkError]:
        """Runs samples, in as few calls as their sizes allow: a call has samples of the same sizes,
        at most as many as the program takes.

        Args:
            samples: of `sample`.

        Returns:
            For each sample its outputs by name, without the batch dimension; or the error of a call
            with this sample only.
        """
        _, largest = self.batch_bounds
        results: list[Any] = [None] * len(samples)
        groups: dict[Any, list[int]] = {}
        for number, sample in enumerate(samples):
            groups.setdefault(tuple(map(_group_key, sample)), []).append(number)
        for numbers in groups.values():
            step = largest or len(numbers)
            for start in range(0, len(numbers), step):
                self._run_group(samples, numbers[start : start + step], results)
        return results

    def _run_group(
        self, samples: Sequence[Sequence[Any]], numbers: Sequence[int], results: list[Any]
    ) -> None:
        """Runs samples of the same sizes in one call; if it fails, each in a call of its own."""
        smallest, _ = self.batch_bounds
        padding = [numbers[-1]] * (smallest - len(numbers))
        try:
            rows = [samples[number] for number in (*numbers, *padding)]
            outputs = self._rows(_stacked(self.inputs, rows), len(rows))
        except PurevkError as error:
            if len(numbers) == 1:
                results[numbers[0]] = error
                return
            for number in numbers:
                self._run_group(samples, [number], results)
            return
        for row, number in enumerate(numbers):
            results[number] = {name: output[row] for name, output in outputs.items()}

    def _rows(self, inputs: Sequence[Any], rows: int) -> dict[str, np.ndarray]:
        """Calls the program; each output must have as many rows as the batch."""
        outputs = self.forward(*inputs)
        for spec in self.outputs:
            if spec.kind == "fixed" and spec.name in outputs:  # the same for each row
                outputs[spec.name] = np.broadcast_to(outputs[spec.name], rows)
        for name, output in outputs.items():
            if output.ndim == 0 or len(output) != rows:
                raise InputError(f"{name} has shape {output.shape} for a batch of {rows}")
        return outputs

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
        return (spec.bounds or (0, None))[0] if spec.kind == "integer" else spec.value
    sizes = [size if isinstance(size, int) else max(size.lower, 1) for size in spec.sizes]
    if batch is not None and sizes and not isinstance(spec.sizes[0], int):
        sizes[0] = batch
    return np.zeros(sizes, DType[spec.dtype or "float32"].numpy)


def _without_batch(spec: ArgumentSpec, value: Any) -> np.ndarray:
    """A value as an input without its batch dimension."""
    array = read_values(spec.name, value, request_dtype(spec.dtype))
    expected = spec.sizes[1:]
    if array.ndim != len(expected) or any(
        size != length for size, length in zip(expected, array.shape) if isinstance(size, int)
    ):
        raise InputError(
            f"{spec.name} has shape {array.shape}, [{', '.join(map(str, expected))}] "
            "is expected: a request has no batch dimension"
        )
    return array


def _stacked(specs: Sequence[ArgumentSpec], samples: Sequence[Sequence[Any]]) -> list[Any]:
    """Samples of the same sizes as the inputs of one call."""
    return [
        np.stack(values) if spec.kind == "tensor" else values[0]
        for spec, values in zip(specs, zip(*samples, strict=True))
    ]


def _group_key(value: Any) -> Any:
    """What samples of one call have in common: the sizes of tensors, and all other values."""
    return value.shape if isinstance(value, np.ndarray) else repr(value)

"""What the benchmarks share: contenders that take turns, device time, errors, and limits of time.

A sampler runs a few calls and returns the milliseconds of each. `of_timestamps` measures purevk on
the device, `of_events` torch under CUDA, and `of_wall` anything on the host. Neither of the first two
counts copies from and to the host.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

Sampler = Callable[[], list[float]]
BATCH_MS = 10.0  # of one sample, about
_RUNS, _DISPATCHES = 200, 4096  # the most of one sample


class TimeLimitError(Exception):
    """A step has used up its seconds."""


class Budget:
    """Seconds of a whole benchmark.

    Args:
        seconds: all of them.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; negative: they are used up."""
        return self._end - time.monotonic()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeLimitError` in the block after some seconds. Only the main thread of a POSIX system
    can be interrupted; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise TimeLimitError(f"it took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reason_of(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def error_of(actual: Any, expected: Any) -> float:
    """The largest difference relative to the largest expected value. NaN if an element is NaN."""
    wanted = numpy.asarray(expected, numpy.float64)
    found = numpy.asarray(actual, numpy.float64)
    if found.shape != wanted.shape:
        raise ValueError(f"the result has sizes {found.shape}, not {wanted.shape}")
    return float(numpy.abs(found - wanted).max() / numpy.abs(wanted).max())


def array_of(tensor: Any) -> numpy.ndarray:
    """A torch tensor as an array. bfloat16 gives its bits, in uint16."""
    import torch

    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def floats_of(array: numpy.ndarray) -> numpy.ndarray:
    """An array, or the float32 of what is the bits of bfloat16 if it has uint16."""
    if array.dtype != numpy.uint16:
        return array
    return (array.astype(numpy.uint32) << 16).view(numpy.float32)


def machine() -> dict[str, Any]:
    """What has to stand beside the figures."""
    from purevk.graph.context import default_context

    device = default_context().device
    found = {
        "device": device.name,
        "driver": str(device.driver),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "unix_time": int(time.time()),
    }
    try:
        import torch
    except ImportError:
        return found | {"torch": None}
    cuda = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return found | {"torch": torch.__version__, "cuda": cuda}


# -- samplers ------------------------------------------------------------------------------------
def of_wall(call: Callable[[], Any], calls: int = 10) -> Sampler:
    """Samples wall time on the host."""

    def sample() -> list[float]:
        found = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - start))
        return found

    return sample


def of_events(call: Callable[[], Any]) -> Sampler:
    """Samples the time of calls on the CUDA device. Several follow one another between two events,
    so that short ones do not wait for the host."""
    import torch

    calls = 1

    def sample() -> list[float]:
        nonlocal calls
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(calls):
            call()
        after.record()
        torch.cuda.synchronize()
        found = before.elapsed_time(after) / calls
        calls = max(1, min(_RUNS, int(BATCH_MS / max(found, 1e-3))))
        return [found]

    return sample


def of_timestamps(executable: Any, arrays: Sequence[Any]) -> Sampler:
    """Samples the time of calls of an executable on the device, between its timestamps. Dispatches
    overlap as in a call.

    Args:
        executable: of a method. Its call with `arrays` is run once, so that the inputs are there.
        arrays: the inputs.
    """
    import numpy as np

    from purevk.graph.call import Call
    from purevk.ir import Value
    from purevk.ir.binding import bind_symbols, input_symbols

    graph = executable.plan.assignment.graph
    env = bind_symbols(input_symbols(graph), arrays)
    tensors = {
        value: np.ascontiguousarray(array)
        for value, array in zip(graph.inputs, arrays)
        if isinstance(value, Value)
    }
    executable.run(Call(tensors, env))
    compute, runs = executable.graph, 1

    def sample() -> list[float]:
        nonlocal runs
        times = [
            compute.time_runs(number, env, runs)
            for number, cut in enumerate(compute.cuts)
            if cut.first != cut.last
        ]
        found = [1e-6 * sum(each) for each in zip(*times)]
        most = max(_DISPATCHES // max(len(compute.dispatches), 1), 1)
        runs = max(1, min(_RUNS, most, int(BATCH_MS / max(statistics.median(found), 1e-3))))
        return found

    return sample


def interleave(
    samplers: dict[str, Sampler], seconds: float, settle: float = 0.0, rounds: int = 5
) -> dict[str, list[float]]:
    """Samples of all contenders, in milliseconds. They take turns, each round in another order.

    Args:
        samplers: by name.
        seconds: of sampling, for all together.
        settle: seconds before what counts, so that a GPU leaves its idle clocks.
        rounds: the turns of each. The first sample of a turn does not count, if there are more.
    """
    names = list(samplers)
    found: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + settle
    for sampler in samplers.values():
        sampler()
    while time.perf_counter() < end:
        for sampler in samplers.values():
            sampler()
    turn = seconds / (rounds * max(len(names), 1))
    for number in range(rounds):
        for position in range(len(names)):
            name = names[(position + number) % len(names)]
            end = time.perf_counter() + turn
            taken = [samplers[name]()]
            while time.perf_counter() < end:
                taken.append(samplers[name]())
            found[name] += [each for sample in taken[len(taken) > 1 :] for each in sample]
    return found


# -- CUDA ----------------------------------------------------------------------------------------
def exact_float32() -> None:
    """Has torch compute float32 as float32, not as TF32: what purevk computes."""
    import torch

    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def cuda_seconds(call: Callable[[], Any], seconds: float) -> float:
    """The median of the seconds of a call on the CUDA device, sampled for some time."""
    times = interleave({"torch": of_events(call)}, seconds)["torch"]
    return 1e-3 * statistics.median(times)


def captured(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A call as a CUDA graph, and its results, which each replay writes again.

    Args:
        call: runs three times before it is captured.
    """
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay(kept: Any = call) -> None:  # the graph reads the weights of the call
        graph.replay()

    return replay, results

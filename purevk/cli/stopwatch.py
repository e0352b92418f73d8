"""The parts of the time of a call: the device, operators on the CPU, and the rest of the host's
work."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from purevk import fallback


class Span(NamedTuple):
    """Something that the host did, and when: seconds of `time.perf_counter`."""

    name: str
    start: float
    end: float


class _Timed:
    """A submission whose waiting is timed."""

    def __init__(self, submission: Any, watch: Stopwatch) -> None:
        self._submission, self._watch = submission, watch

    def wait(self, *args: Any) -> None:
        start = time.perf_counter()
        self._submission.wait(*args)
        self._watch.device += self._watch.note("wait", start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._submission, name)


class Stopwatch:
    """A context manager that adds up the seconds spent on submitting to a queue and waiting for it,
    and in operators on the CPU.

    Args:
        device: whose queue.

    Attributes:
        device: seconds from each submission to the end of the wait for it. fallback: seconds in
            operators on the CPU.
        spans: all of these, "submit", "wait" and "CPU operator", in the order in which they ended.
    """

    def __init__(self, device: Any) -> None:
        self._queue = device.queue
        self.device = self.fallback = 0.0
        self.spans: list[Span] = []

    def reset(self) -> None:
        """Sets both sums to zero, and forgets the spans."""
        self.device = self.fallback = 0.0
        self.spans.clear()

    def note(self, name: str, start: float) -> float:
        """Adds a span that ends now; its seconds."""
        end = time.perf_counter()
        self.spans.append(Span(name, start, end))
        return end - start

    def __enter__(self) -> Stopwatch:
        submit, run = self._queue.submit, fallback.run
        self._run = run

        def timed_submit(*args: Any) -> Any:
            start = time.perf_counter()
            submission = submit(*args)
            self.device += self.note("submit", start)
            return _Timed(submission, self)

        def timed_run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*args)
            finally:
                self.fallback += self.note("CPU operator", start)

        self._queue.submit = timed_submit
        fallback.run = timed_run  # type: ignore[assignment]
        return self

    def __exit__(self, *exc: object) -> None:
        del self._queue.submit
        fallback.run = self._run

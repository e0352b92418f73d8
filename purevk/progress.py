"""Progress of long work: a bar on a terminal, nothing elsewhere.

A progress callback is any callable `(phase, done, total)`. `default()` gives the one that
`purevk.load` uses when its caller names none.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from purevk import knobs
from purevk.plain_text import printable

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int], None]

PHASES = {
    "lower": "lowering for sizes",
    "compile": "compiling kernels",
    "pipeline": "making pipelines",
    "dispatch": "running pipelines",
    "weights": "uploading weights",
}
_BYTES = ("weights",)  # phases that count bytes
_DELAY = 0.5  # seconds of work before a bar is worth showing
_INTERVAL = 0.1  # seconds between two drawings
_BAR = 30  # columns


def default() -> ProgressBar | None:
    """A bar on stderr if that is a terminal and PUREVK_PROGRESS allows it, otherwise None."""
    if sys.stderr is None or not sys.stderr.isatty() or not knobs.PROGRESS():
        return None
    return ProgressBar()


@contextlib.contextmanager
def closing(progress: Progress | None) -> Iterator[None]:
    """Removes the line of a `ProgressBar` when the work ends, also by an error. Other callbacks are
    left alone."""
    try:
        yield
    finally:
        if isinstance(progress, ProgressBar):
            progress.close()


class Steps:
    """The steps of a long command, on a terminal only: one line, which goes away. A context
    manager.

    `purevk.load(..., progress=steps.phase)` shows what it does beside the step.
    """

    def __init__(self) -> None:
        self._bar = default()

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, text: str) -> None:
        """Begins a step."""
        if self._bar is not None:
            self._bar.step(text)

    def phase(self, phase: str, done: int, total: int) -> None:
        """Reports a phase of the step; see `ProgressBar`."""
        if self._bar is not None:
            self._bar(phase, done, total)


class ProgressBar:
    """A bar on one line, which goes away when the phase is complete. May be called from several
    threads.

    It starts no thread and leaves the cursor as it is, so work that ends by an error leaves the
    terminal usable; `close()` then removes the line.

    Args:
        delay: seconds of work before it appears.
        console: where; None: stderr.
    """

    def __init__(self, delay: float = _DELAY, console: Console | None = None) -> None:
        self._delay, self._console = delay, console
        self._lock = threading.Lock()
        self._step = self._phase = ""
        self._started = self._last = float("-inf")  # of the work, and of the last report
        self._drawn = float("-inf")
        self._shown = False

    def step(self, text: str) -> None:
        """Begins a step of longer work, and shows its name at once: it may report nothing before it
        ends. Its phases are shown beside the name, which stays until the next step or `close`."""
        now = time.perf_counter()
        with self._lock:
            if not self._step:
                self._started = now
            self._step, self._phase = text, ""
            self._draw(0, 0, now)

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Reports that `done` of `total` steps (or bytes, for weights) of a phase are finished. With
        a `total` of 1, only the name of the phase is shown."""
        now = time.perf_counter()
        with self._lock:
            if phase != self._phase:
                # A phase that follows at once is more of the same work.
                if not self._step and now - self._last > _DELAY:
                    self._started = now
                # A phase that is over at once is not worth a line of its own.
                self._phase, self._drawn = phase, float("-inf") if self._step else now
            self._last = now
            if done >= total:
                self._phase = ""
                if not self._step:
                    self._erase()
                elif self._drawn > float("-inf"):  # the phase was shown
                    self._draw(0, 0, now)
            elif now - self._drawn >= _INTERVAL and (
                self._step or now - self._started >= self._delay
            ):
                self._draw(done, total, now)

    def _draw(self, done: int, total: int, now: float) -> None:
        from rich.text import Text

        console = self._stream()
        if console.is_dumb_terminal:  # TERM=dumb: a line cannot be cleared
            return
        names = (self._step, PHASES.get(self._phase, self._phase))
        label = printable(": ".join(name for name in names if name))
        count = (
            f"{done / 1e6:.0f}/{total / 1e6:.0f} MB" if self._phase in _BYTES else f"{done}/{total}"
        )
        width = max(min(_BAR, console.width - len(label) - len(count) - 10), 0)
        filled = width * done // max(total, 1)
        dot = "#" if console.options.ascii_only else "\u2501"
        line = Text(label)
        if total > 1:
            line = Text.assemble(
                f"{label} ",
                (dot * filled, "bar.complete"),
                (dot * (width - filled), "bar.back"),
                f" {count} {_clock(now - self._started)}",
            )
        line.truncate(max(console.width - 1, 1))
        self._clear(console)
        console.print(line, end="", no_wrap=True, highlight=False)
        console.file.flush()
        self._drawn, self._shown = now, True

    def _erase(self) -> None:
        if self._shown:
            console = self._stream()
            self._clear(console)
            console.file.flush()
            self._shown = False

    def _clear(self, console: Console) -> None:
        from rich.control import Control
        from rich.segment import ControlType

        console.control(Control((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 2)))

    def _stream(self) -> Console:
        if self._console is None:
            from rich.console import Console

            self._console = Console(stderr=True)
        return self._console

    def close(self) -> None:
        """Removes the line if it is there. The bar can be used again."""
        with self._lock:
            self._erase()
            self._step = self._phase = ""


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"

"""The progress bar: on a terminal, after a while, gone afterwards."""

from __future__ import annotations

import io
import sys
import threading

import pytest
from rich.console import Console

from purevk import knobs, progress
from purevk.progress import ProgressBar


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("purevk.progress.time.perf_counter", made)
    return made


def terminal(width: int = 80, term: str = "xterm") -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system=None,
        _environ={"TERM": term},
    )


def last_line(console: Console) -> str:
    """What a terminal shows of the line in the end."""
    return console.file.getvalue().split("\x1b[2K")[-1]


def test_short_work_shows_nothing(clock: Clock) -> None:
    console = terminal()
    bar = ProgressBar(console=console)
    for done in range(1, 11):
        clock.now += 0.04
        bar("compile", done, 10)
    assert console.file.getvalue() == ""


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_long_work_shows_a_bar_that_goes_away(clock: Clock, width: int) -> None:
    console = terminal(width)
    bar = ProgressBar(console=console)
    bar("compile", 0, 10)
    clock.now += 0.6
    bar("compile", 5, 10)
    line = last_line(console)
    assert "\n" not in line and len(line) < width
    assert line.startswith("compiling kernels"[: width - 2])
    if width >= 80:
        assert line.count("\u2501") == 30 and line.endswith("5/10 0:00")
    clock.now += 70
    bar("compile", 9, 10)
    assert width < 80 or last_line(console).endswith("9/10 1:10")
    bar("compile", 10, 10)
    assert last_line(console) == ""


def test_a_dumb_terminal_shows_nothing(clock: Clock) -> None:
    console = terminal(term="dumb")
    bar = ProgressBar(console=console)
    bar("compile", 0, 10)
    clock.now += 0.6
    bar("compile", 5, 10)
    bar.close()
    assert console.file.getvalue() == ""


def test_phases_that_follow_are_one_work(clock: Clock) -> None:
    console = terminal()
    bar = ProgressBar(console=console)
    for phase in ("compile", "pipeline", "weights"):
        for done in range(1, 11):
            clock.now += 0.03
            bar(phase, done * 1_000_000, 10_000_000)
    assert (
        "uploading weights" in console.file.getvalue()
        and "compiling" not in console.file.getvalue()
    )
    assert "/10 MB" in console.file.getvalue()
    clock.now += 60  # later work starts anew
    before = len(console.file.getvalue())
    bar("compile", 1, 10)
    clock.now += 0.1
    bar("compile", 2, 10)
    assert len(console.file.getvalue()) == before


def test_it_is_drawn_only_so_often(clock: Clock) -> None:
    console = terminal()
    bar = ProgressBar(delay=0.0, console=console)
    for done in range(1000):
        clock.now += 0.001
        bar("compile", done, 1001)
    assert 5 <= console.file.getvalue().count("compiling") <= 12


def test_an_error_leaves_no_line(clock: Clock) -> None:
    console = terminal()
    bar = ProgressBar(delay=0.0, console=console)
    with pytest.raises(RuntimeError), progress.closing(bar):
        bar("compile", 1, 10)
        clock.now += 1
        bar("compile", 2, 10)
        assert "2/10" in last_line(console)
        raise RuntimeError
    assert last_line(console) == ""
    with progress.closing(None), progress.closing(lambda *args: None):
        pass


def test_a_step_is_shown_at_once_and_stays(clock: Clock) -> None:
    console = terminal()
    bar = ProgressBar(console=console)
    bar.step("candidate 1 of 2")
    assert last_line(console) == "candidate 1 of 2"
    bar("compile", 0, 10)
    assert last_line(console).startswith("candidate 1 of 2: compiling kernels")
    assert last_line(console).endswith("0/10 0:00")
    clock.now += 5
    bar("compile", 10, 10)
    assert last_line(console) == "candidate 1 of 2"
    bar("the whole", 0, 1)
    assert last_line(console) == "candidate 1 of 2: the whole"
    bar.step("candidate 2 of 2")
    bar("compile", 5, 10)
    assert last_line(console).endswith("5/10 0:05")
    bar.close()
    assert last_line(console) == ""


@pytest.mark.device
@pytest.mark.parametrize(
    "arguments, steps",
    [
        (["bisect"], ["loading", "comparing: each node with eager torch", "the optimized program"]),
        (["bench", "--runs", "2", "--no-load"], ["loading", "timing: calls"]),
        (["profile"], ["loading", "profile: timing dispatches", "measuring the limits"]),
        (["report"], ["loading", "method forward: timing dispatches", "measuring the limits"]),
        (
            ["tune", "--candidates", "2", "--runs", "1"],
            ["the default kernels: timing dispatches", "comparing: the default kernels"],
        ),
    ],
)
def test_long_commands_show_their_steps(
    cli, data, tmp_path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], steps: list[str]
) -> None:
    command = [arguments[0], data / "linear_relu.pte", *arguments[1:]]
    if arguments == ["report"]:
        command += ["--output", tmp_path / "report.html"]
    assert cli(*command).err == ""  # no terminal
    console = terminal(120)
    monkeypatch.setattr(progress, "default", lambda: ProgressBar(console=console))
    ran = cli(*command, "--json")
    assert ran.code == 0 and ran.err == "" and ran.json["command"] == arguments[0]
    shown = console.file.getvalue()
    assert all(step in shown for step in steps)
    assert last_line(console) == ""


def test_threads(clock: Clock) -> None:
    console = terminal()
    bar = ProgressBar(delay=0.0, console=console)
    threads = [
        threading.Thread(target=lambda n=n: [bar("compile", n, 9) for _ in range(50)])
        for n in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bar("compile", 9, 9)
    assert last_line(console) == ""


def test_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv(knobs.PROGRESS.name, raising=False)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert progress.default() is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(progress.default(), ProgressBar)
    monkeypatch.setenv(knobs.PROGRESS.name, "0")
    assert progress.default() is None
    monkeypatch.setattr(sys, "stderr", None)
    assert progress.default() is None

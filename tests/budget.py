"""A pytest plugin for what the tests cost.

`--costs=FILE` appends a line of JSON to FILE for

- each test: CPU seconds of its setup, call and teardown, its outcome, the memory of its process in
  MiB after it, how slow the machine was, and the templates and operators that it asked for;
- each fixture that several tests share: its CPU seconds, which count for no test;
- each kernel: the template and macros that were asked for first by this test;
- each operator: its name and the dtypes of its inputs and results, that this test imported or
  lowered first.

`--budget` fails a test that takes more than tests/budget.txt allows: 1.5 times its figure and a
second more, or 2 seconds if it has no line. CPU seconds are those of the process and of the processes
that it waited for, divided by how much slower than the reference a loop is beside the tests. A
busy machine fails nothing therefore; neither do cold caches: a test that makes a pipeline, waits for a
process or imports much is judged only where a whole tier has filled the caches before.

The landing tier as a whole may take 38 CPU-minutes.

`scripts/budget.py` writes tests/budget.txt from such a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiers

REFERENCE = 0.05  # CPU seconds of `slowness`'s loop on the machine of tests/budget.txt
NEW = 2.0  # CPU seconds of a test without a line
FACTOR, SLACK = 1.5, 1.0
MODULES = 20  # that a test imports: their time is that of the first test that needs them
RECENT = 20.0  # seconds that a measurement of the loop holds
LANDING = 38 * 60.0  # CPU seconds of the landing tier

_totals: list[float] = []  # of each test, where the reports of all processes come together


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def slowness() -> float:
    """How many times the reference's CPU seconds a loop of Python takes now."""
    start = time.thread_time()
    total = 0
    for n in range(2_400_000):
        total += n & 7
    return (time.thread_time() - start) / REFERENCE


def allowed(item: pytest.Item) -> float:
    """The CPU seconds of the reference machine that a test may take."""
    lines = tiers.budget()
    for name in tiers.names(item):
        if name in lines:
            return max(lines[name][0] * FACTOR, lines[name][0] + SLACK)
    return NEW


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("budget", "what the tests cost")
    group.addoption("--costs", metavar="FILE", help="record what each test costs in this file")
    group.addoption(
        "--budget", action="store_true", help="fail tests that cost more than tests/budget.txt says"
    )


def pytest_configure(config: pytest.Config) -> None:
    runs_tests = bool(os.environ.get("PYTEST_XDIST_WORKER")) or not config.getoption(
        "numprocesses", None
    )
    if runs_tests and (config.getoption("--costs") or config.getoption("--budget")):
        config.pluginmanager.register(_Meter(config), "budget-meter")


def _warm_file() -> Path:
    from purevk import knobs

    return Path(knobs.cache_folder() or os.devnull, "warm")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that collects the reports: the sum of the tier."""
    if report.when == "teardown":
        _totals.append(sum(value for name, value in report.user_properties if name == "landing"))


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    result = yield
    config, file = session.config, _warm_file()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return result
    if config.getoption("--budget") and file.exists() and sum(_totals) > LANDING:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    whole = config.getoption("--tier") in ("landing", None) and not config.getoption("keyword")
    if whole and len(_totals) > 1000 and file.parent.is_dir():
        file.touch()  # the caches are warm now
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--budget"):
        terminalreporter.write_line(
            f"tests of the landing tier took {sum(_totals) / 60:.1f} CPU-minutes of the reference machine;"
            f" with warm caches they may take {LANDING / 60:.0f}"
        )


class _Meter:
    def __init__(self, config: pytest.Config) -> None:
        path = config.getoption("--costs")
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._judges = config.getoption("--budget")
        self._warm = _warm_file().exists()
        self._test = ""
        self._phases: list[float] = []
        self._outcome = ""
        self._shared = [0.0]  # of fixtures, for each that is under way
        self._seen: set[Any] = set()
        self._uses: set[str] = set()
        self._pipelines = 0
        self._hooked = False
        self._slowness, self._measured_at = slowness(), time.monotonic()

    # -- what is recorded
    def _write(self, **fields: Any) -> None:
        if self._file is not None:
            os.write(self._file, (json.dumps(fields) + "\n").encode())

    def _new(self, kind: str, key: Any) -> None:
        self._uses.add(key[0])
        if key not in self._seen:
            self._seen.add(key)
            self._write(**{kind: key, "test": self._test})

    def _hook(self) -> None:
        """Sees the kernels and operators; imports them after the tests were collected."""
        from purevk import api
        from purevk.frontends.importer import Importer
        from purevk.graph.kernels import KernelStore
        from purevk.schedule import planning
        from purevk.shaders.source import CompileJob

        key, lower, emit = KernelStore.key, planning._lower, Importer.emit
        of_template, pipeline = CompileJob.from_template, api.ComputePipeline.__init__

        def record_key(store: Any, spec: Any) -> Any:
            self._new("kernel", (spec.template, spec.macros))
            return key(store, spec)

        def record_template(template: str, macros: Any = None, *args: Any, **kwargs: Any) -> Any:
            texts = sorted((name, str(value)) for name, value in (macros or {}).items())
            self._new("kernel", (template, tuple(texts)))
            return of_template(template, macros, *args, **kwargs)

        def record_node(lowering: Any, node: Any) -> None:
            lower(lowering, node)
            self._new("lowered", _operator(node))

        def record_operator(importer: Any, *args: Any, **kwargs: Any) -> Any:
            results = emit(importer, *args, **kwargs)
            if importer.nodes:
                self._new("imported", _operator(importer.nodes[-1]))
            return results

        def count_pipeline(made: Any, *args: Any, **kwargs: Any) -> None:
            self._pipelines += 1
            pipeline(made, *args, **kwargs)

        if self._file is not None:
            Importer.emit = record_operator  # type: ignore[method-assign]
            KernelStore.key = record_key  # type: ignore[method-assign]
            planning._lower = record_node
            CompileJob.from_template = record_template  # type: ignore[method-assign]
        api.ComputePipeline.__init__ = count_pipeline  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not self._hooked:
            self._hook()
            self._hooked = True
        if time.monotonic() - self._measured_at > RECENT:
            self._slowness, self._measured_at = slowness(), time.monotonic()
        self._test, self._phases, self._outcome = item.nodeid, [], "passed"
        self._uses = set()
        self._before = (self._pipelines, os.times(), len(sys.modules))
        result = yield
        self._write(
            test=item.nodeid,
            seconds=[round(each, 3) for each in self._phases],
            slowness=round(self._slowness, 2),
            outcome=self._outcome,
            memory=_resident() >> 20,
            uses=sorted(self._uses),
        )
        return result

    def _phase(self) -> Iterator[None]:
        start, self._shared = cpu_seconds(), [0.0]
        try:
            return (yield)
        finally:
            self._phases.append(cpu_seconds() - start - self._shared[0])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        result = yield from self._phase()
        if tiers.is_landing(item):
            seconds = sum(self._phases) / max(self._slowness, 1.0)
            item.user_properties.append(("landing", round(seconds, 3)))
        if self._judges and self._outcome == "passed":
            self._judge(item)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope == "function":
            return (yield)
        start = cpu_seconds()
        self._shared.append(0.0)
        try:
            return (yield)
        finally:
            inner, seconds = self._shared.pop(), cpu_seconds() - start
            self._shared[-1] += seconds
            name = f"{fixturedef.baseid}::{fixturedef.argname}"
            self._write(fixture=name, seconds=round(seconds - inner, 3), test=self._test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._outcome = report.outcome

    # -- what is judged
    def _judge(self, item: pytest.Item) -> None:
        limit, seconds = allowed(item), sum(self._phases)
        if seconds <= limit or not self._is_fair():
            return
        slow = max(self._slowness, slowness())  # other processes may have come meanwhile
        if seconds / max(slow, 1.0) > limit:
            pytest.fail(over_budget(item, seconds / max(slow, 1.0), limit), pytrace=False)

    def _is_fair(self) -> bool:
        """Whether the test did only what it does each time."""
        pipelines, times, modules = self._before
        now = os.times()
        waited = now.children_user + now.children_system
        waited -= times.children_user + times.children_system
        cold = self._pipelines > pipelines or waited > 0
        return len(sys.modules) - modules < MODULES and (self._warm or not cold)


def over_budget(item: pytest.Item, seconds: float, limit: float) -> str:
    name = tiers.names(item)[0]
    return (
        f"{name} took {seconds:.1f} CPU seconds; tests/budget.txt allows {limit:.1f}. Make it cheaper, or"
        f" add the line `{seconds:.1f} landing {name}` there, with nightly in place of landing if something"
        " cheaper tests most of it"
    )


def _operator(node: Any) -> Any:
    return node.op, tuple(value.type.dtype.name for value in (*node.inputs, *node.results))


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0

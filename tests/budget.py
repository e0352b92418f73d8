"""A pytest plugin for what the tests cost.

`--costs=FILE` appends a line of JSON to FILE for

- each test: CPU seconds of its setup, call and teardown, its outcome, the memory of its process in
  MiB after it, how slow the machine was, whether it is marked `slow`, and the templates and operators
  that it asked for;
- each fixture that several tests share: its CPU seconds, which count for no test;
- each kernel: the template and macros that were asked for first by this test of its tier;
- each operator: its name and the dtypes of its inputs and results, that this test of its tier
  imported or lowered first.

`--budget` fails a test of the landing tier that takes more than tests/budget.txt allows: three times its
figure, or four seconds more if that is more; 5 seconds if it has no line. Tests of the nightly tier, of
which a landing runs a tenth, may take what they need. Runs of one test on shared machines differ by up to
2.4 times: of 8,800 tests a few go beyond twice their figures in each run, always others. A test over its
budget runs once or twice more, and only what it takes then counts: not what it imports, compiles or fills
a cache with. CPU seconds are those of the process and of the processes that it waited for, divided by how
much slower than the reference a loop is beside the tests: a busy machine fails nothing. Machines differ by
more than a loop shows, so a test's seconds are also divided by how many times their figures the tests
before it took (the median). Code that slows all tests down shows in their sum: the landing tier as a whole
may take 38 CPU-minutes. Nothing fails while tests/budget.txt is not from a run of the whole landing tier.

`scripts/budget.py` writes tests/budget.txt from such a file, and compares what tiers cover.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest import runner

from tests import tiers

REFERENCE = 0.05  # CPU seconds of `slowness`'s loop on the machine of tests/budget.txt
NEW = 5.0  # CPU seconds of a test without a line
FACTOR, SLACK = 3.0, 4.0
NOTABLE = 0.5  # CPU seconds of a test that says how slow the machine is for tests
RECENT = 20.0  # seconds that a measurement of the loop holds
LANDING = 38 * 60.0  # CPU seconds of the landing tier
RERUNS = 2  # of a test over its budget
PAUSE = 1.0  # seconds before each: drivers write their caches in threads of the lowest priority
BEFORE = (
    8,
    40,
)  # so many tests before one, at least and at most, say how slow the machine is for tests
DRIVER = 3.0  # times what shaderc takes for a kernel, the driver may take for it

# CPU seconds of each file, where the reports of all processes come together.
_totals: dict[str, float] = defaultdict(float)


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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that collects the reports: the sum of the tier."""
    if report.when == "teardown":
        file = report.nodeid.partition("::")[0].removeprefix("tests/")
        _totals[file] += sum(value for name, value in report.user_properties if name == "landing")


def _judges(config: pytest.Config) -> bool:
    return bool(config.getoption("--budget")) and tiers.is_whole()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _judges(session.config) and sum(_totals.values()) > LANDING:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--budget"):
        return
    total = sum(_totals.values())
    terminalreporter.write_line(
        f"tests of the landing tier took {total / 60:.1f} CPU-minutes of the reference machine, and may"
        f" take {LANDING / 60:.0f}"
    )
    if _judges(config) and total > LANDING:
        terminalreporter.write_line(
            "This fails the run. Make tests cheaper, or write nightly in place of landing in"
            " tests/budget.txt where something cheaper tests most of it. The files furthest above their"
            " sums there:"
        )
        sums = {file: tiers.budget().get(file, (0.0, ""))[0] for file in _totals}
        for file in sorted(sums, key=lambda file: sums[file] - _totals[file])[:10]:
            terminalreporter.write_line(f"  {_totals[file]:.1f} s, not {sums[file]:.1f}: {file}")


class _Meter:
    def __init__(self, config: pytest.Config) -> None:
        path = config.getoption("--costs")
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._judges = _judges(config)
        self._compiled = 0.0  # CPU seconds of shaderc in the test
        self._landing = False  # the tier of the test
        self._test = ""
        self._phases: list[float] = []
        self._outcome = ""
        self._shared = [0.0]  # of fixtures, for each that is under way
        self._seen: set[Any] = set()
        self._ratios: deque[float] = deque(maxlen=BEFORE[1])  # of what tests took to their figures
        self._uses: set[str] = set()
        self._hooked = False
        self._slowness, self._measured_at = slowness(), time.monotonic()

    # -- what is recorded
    def _write(self, **fields: Any) -> None:
        if self._file is not None:
            os.write(self._file, (json.dumps(fields) + "\n").encode())

    def _new(self, kind: str, key: Any) -> None:
        self._uses.add(key[0])
        if (kind, key, self._landing) not in self._seen:
            self._seen.add((kind, key, self._landing))
            self._write(**{kind: key, "test": self._test, "landing": self._landing})

    def _hook(self) -> None:
        """Sees the kernels and operators; imports them after the tests were collected."""
        from purevk.frontends.importer import Importer
        from purevk.graph.kernels import KernelStore
        from purevk.schedule import planning
        from purevk.shaders.shaderc import Compiler
        from purevk.shaders.source import CompileJob

        compile_job = Compiler.compile_job

        def time_job(compiler: Any, job: Any) -> bytes:
            start = time.thread_time()
            try:
                return compile_job(compiler, job)
            finally:
                self._compiled += time.thread_time() - start

        Compiler.compile_job = time_job  # type: ignore[method-assign]
        if self._file is None:
            return
        key, lower, emit = KernelStore.key, planning._lower, Importer.emit
        of_template = CompileJob.from_template

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

        Importer.emit = record_operator  # type: ignore[method-assign]
        KernelStore.key = record_key  # type: ignore[method-assign]
        planning._lower = record_node
        CompileJob.from_template = record_template  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        if not self._hooked:
            self._hook()
            if tiers.is_everything(item.config):
                self._write(landing_tests=tiers.landing_tests(item.config))
        self._hooked = True
        if time.monotonic() - self._measured_at > RECENT:
            self._slowness, self._measured_at = slowness(), time.monotonic()
        self._test, self._uses, self._landing = item.nodeid, set(), tiers.is_landing(item)
        self._phases, self._outcome, self._compiled = [], "passed", 0.0
        result = yield
        self._write(
            test=item.nodeid,
            seconds=[round(each, 3) for each in self._phases],
            slowness=round(self._slowness, 2),
            outcome=self._outcome,
            memory=_resident() >> 20,
            uses=sorted(self._uses),
            slow=item.get_closest_marker("slow") is not None,
            landing=self._landing,
        )
        if self._judges and self._landing and self._outcome == "passed":
            self._judge(item, nextitem)
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
            item.user_properties.append(("landing", round(self._scaled(), 3)))
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
    def _judge(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        limit = allowed(item)
        cold = self._compiled * (1 + DRIVER) / max(self._slowness, 1.0)
        if len(self._ratios) >= BEFORE[0]:
            limit *= max(statistics.median(self._ratios), 1.0)
        figure = tiers.budget().get(tiers.names(item)[0], (0.0, ""))[0]
        if figure >= NOTABLE:
            self._ratios.append((self._scaled() - cold) / figure)
        if self._scaled() - cold <= limit:
            return
        for _ in range(RERUNS):
            time.sleep(PAUSE)
            self._phases = []
            reports = runner.runtestprotocol(item, log=False, nextitem=nextitem)
            self._slowness, self._measured_at = slowness(), time.monotonic()
            if self._scaled() <= limit or not all(report.passed for report in reports):
                return
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=over_budget(item, self._scaled(), limit),
            when="teardown",
        )
        item.ihook.pytest_runtest_logreport(report=report)

    def _scaled(self) -> float:
        """CPU seconds of the test on the reference machine."""
        return sum(self._phases) / max(self._slowness, 1.0)


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

"""A pytest plugin that records what the tests cost: `--costs FILE` appends a line of JSON to FILE for

- each test: CPU seconds of its setup, call and teardown, its outcome, the memory of its process in
  MiB after it, and the templates and operators that it asked for;
- each fixture that several tests share: its CPU seconds, which count for no test;
- each kernel: the template and macros that were asked for first by this test;
- each operator: its name and the dtypes of its inputs and results, that this test imported or lowered first.

CPU seconds are those of the process and of the processes that it waited for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("budget", "what the tests cost")
    group.addoption("--costs", metavar="FILE", help="record what each test costs in this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--costs")
    if path is not None:
        if os.environ.get("PYTEST_XDIST_WORKER") or not config.getoption("numprocesses", None):
            config.pluginmanager.register(_Recorder(os.path.abspath(path)))


class _Recorder:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._test = ""
        self._phases: list[float] = []
        self._outcome = ""
        self._shared = [0.0]  # of fixtures, for each that is under way
        self._seen: set[Any] = set()
        self._uses: set[str] = set()
        self._hooked = False

    def _write(self, **fields: Any) -> None:
        os.write(self._file, (json.dumps(fields) + "\n").encode())

    def _new(self, kind: str, key: Any) -> None:
        self._uses.add(key[0])
        if key not in self._seen:
            self._seen.add(key)
            self._write(**{kind: key, "test": self._test})

    def _hook(self) -> None:
        """Sees the kernels and operators; imports them after the tests were collected."""
        from purevk.frontends.importer import Importer
        from purevk.graph.kernels import KernelStore
        from purevk.schedule import planning
        from purevk.shaders.source import CompileJob

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
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not self._hooked:
            self._hook()
            self._hooked = True
        self._test, self._phases, self._outcome = item.nodeid, [], "passed"
        self._uses = set()
        start = os.times().elapsed
        result = yield
        self._write(
            test=item.nodeid,
            seconds=[round(each, 3) for each in self._phases],
            wall=round(os.times().elapsed - start, 2),
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
    def pytest_runtest_teardown(self) -> Iterator[None]:
        return (yield from self._phase())

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


def _operator(node: Any) -> Any:
    return node.op, tuple(value.type.dtype.name for value in (*node.inputs, *node.results))


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0

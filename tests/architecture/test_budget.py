"""What the tests may cost."""

from __future__ import annotations

import pytest

from scripts import budget as script
from tests import budget, tiers

TESTS = """
    import time

    def busy(seconds):
        start = time.process_time()
        while time.process_time() < start + seconds:
            pass

    def test_listed(): busy(0.3)
    def test_new(): busy(0.3)
    def test_cheap(): pass
    def test_first(known=[]):
        if not known:
            busy(0.3)
        known.append(1)
"""


def test_a_test_over_its_budget_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "budget", lambda: {"test_it.py::test_listed": (0.5, "landing")})
    monkeypatch.setattr(budget, "NEW", 0.1)
    monkeypatch.setattr(budget, "slowness", lambda: 1.0)
    pytester.makepyfile(test_it=TESTS)
    plugins = (
        "-p",
        "no:xdist",
        "-W",
        "ignore::pytest.PytestWarning",
        "-p",
        "tests.tiers",
        "-p",
        "tests.budget",
    )
    made = pytester.runpytest_inprocess(*plugins, "--budget", "--costs=costs.jsonl")
    made.assert_outcomes(passed=4, errors=1)
    made.stdout.fnmatch_lines(["*test_it.py::test_new took 0.? CPU seconds*allows 0.1*"])
    monkeypatch.setattr(budget, "slowness", lambda: 9.0)  # a busy machine
    pytester.runpytest_inprocess(*plugins, "--budget").assert_outcomes(passed=4)
    costs = script.measured([str(pytester.path / "costs.jsonl")])
    assert 0.2 < costs["test_it.py::test_listed"].seconds < 3.0
    assert costs["test_it.py::test_cheap"].seconds < 0.2


def test_lines_of_a_run() -> None:
    """Tests that are listed keep their tier, cases share a line, and what did not run keeps its own."""
    before = {
        "a.py::test_slow": (9.0, "nightly"),
        "a.py::test_gone": (3.0, "landing"),
        "a.py": (12.0, "sum"),
        "b.py": (1.0, "sum"),
    }
    costs = {
        "a.py::test_slow": script.Cost(4.0, "nightly"),
        "a.py::test_case[1]": script.Cost(1.2),
        "a.py::test_case[2]": script.Cost(1.8),
        "b.py::test_case[1]": script.Cost(0.2),
        "b.py::test_case[2]": script.Cost(1.8),
        "b.py::test_mixed[1]": script.Cost(1.5),
        "b.py::test_mixed[2]": script.Cost(3.0, "nightly"),
        "c.py::test_quick": script.Cost(0.1),
    }
    assert script.lines(costs, before) == {
        "a.py::test_slow": (4.0, "nightly"),
        "a.py::test_gone": (3.0, "landing"),
        "a.py::test_case": (1.8, "landing"),
        "a.py": (12.0, "sum"),
        "b.py::test_case[2]": (1.8, "landing"),
        "b.py::test_mixed[1]": (1.5, "landing"),
        "b.py::test_mixed[2]": (3.0, "nightly"),
        "b.py": (6.5, "sum"),
        "c.py": (0.1, "sum"),
    }

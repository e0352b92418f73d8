"""What the tests may cost."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

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
    def test_nightly(): busy(0.3)
    def test_first(known=[]):
        if not known:
            busy(0.3)
        known.append(1)
"""


def test_a_test_over_its_budget_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {
        "test_it.py::test_listed": (0.5, "landing"),
        "test_it.py::test_nightly": (0.01, "nightly"),
    }
    monkeypatch.setattr(tiers, "budget", lambda: lines)
    monkeypatch.setattr(budget, "SLACK", 0.0)
    monkeypatch.setattr(budget, "NEW", 0.1)
    monkeypatch.setattr(budget, "_totals", defaultdict(float))  # not of the tests before
    monkeypatch.setattr(budget, "slowness", lambda: 1.0)
    monkeypatch.setattr(tiers, "is_whole", lambda: True)
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
    made.assert_outcomes(passed=5, errors=1)
    made.stdout.fnmatch_lines(["*test_it.py::test_new took 0.? CPU seconds*allows 0.1*"])
    monkeypatch.setattr(budget, "slowness", lambda: 9.0)  # a busy machine
    pytester.runpytest_inprocess(*plugins, "--budget").assert_outcomes(passed=5)
    monkeypatch.setattr(budget, "LANDING", 0.01)
    ran = pytester.runpytest_inprocess(*plugins, "--budget")
    assert ran.ret == pytest.ExitCode.TESTS_FAILED
    ran.stdout.fnmatch_lines(
        ["*This fails the run. Make tests cheaper*", "*s, not 0.0: test_it.py"]
    )
    files = [str(pytester.path / "costs.jsonl")]
    assert script.is_whole(files)
    costs = script.measured(files)
    assert 0.2 < costs["test_it.py::test_listed"].seconds < 3.0
    assert costs["test_it.py::test_cheap"].seconds < 0.2


def test_a_machine_that_is_slow_for_tests_fails_none(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tests before took beyond their figures, a test may take beyond its own."""
    spent = {**dict.fromkeys("abcdef", 1.5), "same": 1.9, "slower": 2.4}
    lines = {f"test_it.py::test_{name}": (1.0, "landing") for name in spent}
    monkeypatch.setattr(tiers, "budget", lambda: lines)
    monkeypatch.setattr(tiers, "is_whole", lambda: True)
    for name, value in (("BEFORE", (4, 40)), ("SLACK", 0.5), ("FACTOR", 1.5), ("PAUSE", 0.0)):
        monkeypatch.setattr(budget, name, value)
    monkeypatch.setattr(budget, "slowness", lambda: 1.0)
    monkeypatch.setattr(budget._Meter, "_scaled", lambda meter: spent[meter._test.split("_")[-1]])
    pytester.makepyfile(test_it="\n".join(f"def test_{name}(): pass" for name in spent))
    plugins = ("-p", "no:xdist", "-W", "ignore::pytest.PytestWarning")
    plugins += ("-p", "tests.tiers", "-p", "tests.budget")
    made = pytester.runpytest_inprocess(*plugins, "--budget")
    made.assert_outcomes(passed=8, errors=1)
    made.stdout.fnmatch_lines(["*test_it.py::test_slower took 2.4 CPU seconds*allows 2.2*"])


def test_a_run_is_whole_if_it_has_all_tests_of_the_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Skipped ones too, from several processes; a run of some files does not say how many there are."""
    path = tmp_path / "costs.jsonl"

    def entry(test: str, landing: bool = True, outcome: str = "passed") -> dict[str, Any]:
        return {"test": test, "seconds": [0, 90, 0], "outcome": outcome, "landing": landing}

    rows: list[dict[str, Any]] = [
        *({"landing_tests": 2}, {"landing_tests": 2}),
        *(entry("a"), entry("c", landing=False)),
        {"kernel": ["x.comp", [["M", "1"]]], "test": "a", "landing": True},
        {"kernel": ["y.comp", []], "test": "c", "landing": False},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert not script.is_whole([str(path)])
    script.report_coverage([str(path)])
    text = capsys.readouterr().out
    assert "landing: 1 tests, 1.5 CPU-minutes" in text
    assert "landing 1, nightly 1 more\n  only nightly: y.comp\n" in text
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry("b", outcome="skipped")) + "\n")
    assert script.is_whole([str(path)])
    assert not script.is_whole([])


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

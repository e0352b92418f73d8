"""The operators' tests on a driver of this system."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.drivers.rows import ROOT
from scripts.matrix import read_report

TESTS = ("tests/ops", "tests/program/test_program.py")


def operator_tests(environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs the fast tier of `TESTS`, and counts what passed. A test fails if the driver ends its
    process."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"]
        command += ["-p", "tests.tiers", "--tier=fast", "-n", "1", f"--junitxml={report}", *TESTS]
        subprocess.run(command, cwd=ROOT, env={**environment}, stdout=subprocess.DEVNULL)
        outcome = read_report(report)
    return {
        "passed": outcome.passed,
        "skipped": outcome.skipped,
        "failed": list(outcome.failed),
    }

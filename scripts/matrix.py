"""Runs tests with each optional device feature off in turn, and with the traits of a GPU.

    python scripts/matrix.py
    python scripts/matrix.py --only float16 int64
    python scripts/matrix.py --only none gpu -- tests/api tests/ops

A configuration is "none" (nothing is off), the name of a feature that the device has, "gpu" (a
software device gets the kernels and tiles of GPUs), or "least" (also the least limits that Vulkan
1.1 allows, and no optional feature). Without arguments all of them run. Each is one
pytest process, with its own kernel cache, over the landing tier of the tests after `--`, which are
tests of kernels and programs otherwise. It has one line of output, and the tests that failed follow
it. The exit code is 1 if a test failed, or if no test ran. PUREVK_DEVICE and VK_DRIVER_FILES choose
the device and the driver.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# One family of kernels each, then programs: about a minute on two cores.
TESTS = (
    "tests/ops/attention/test_attention.py",
    "tests/ops/matmul/test_matmul.py",
    "tests/ops/quantized/test_linear.py",
    "tests/ops/reduce/test_reductions.py",
    "tests/ops/sort/test_sort.py",
    "tests/program/test_program.py",
)
NONE, GPU, LEAST = "none", "gpu", "least"


@dataclass(frozen=True)
class Outcome:
    """What one configuration has done."""

    passed: int
    skipped: int
    failed: tuple[str, ...]
    trouble: str = ""  # what pytest said, if it ended without a report

    @property
    def is_ok(self) -> bool:
        return bool(self.passed) and not self.failed and not self.trouble


def available_features() -> tuple[str, list[str]]:
    """The device, and the names of the optional features that purevk switches on."""
    from purevk.api import Instance
    from purevk.api.features import FEATURES, choose

    with Instance() as instance:
        physical = instance.pick()
        chosen = choose(physical.available, ())
        names = [feature.name for feature in FEATURES if feature.name in chosen]
        return f"{physical.name}, {physical.driver}", names


def read_report(path: Path) -> Outcome:
    """Counts the cases of a JUnit report."""
    passed = skipped = 0
    failed: list[str] = []
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Outcome(passed, skipped, tuple(dict.fromkeys(failed)))


def run(configuration: str, tests: Sequence[str], timeout_s: float) -> Outcome:
    """Runs the tests in one configuration."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = {**os.environ, "PUREVK_CACHE": f"{folder}/cache", "PYTHONPATH": str(ROOT)}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if configuration in (GPU, LEAST):
            environment["PUREVK_TEST_TRAITS"] = configuration
        elif configuration != NONE:
            environment["PUREVK_DISABLE"] = configuration
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "tests.tiers", "--tier=landing"]
        command += ["--tb=no", f"--junitxml={report}", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return Outcome(0, 0, (), f"not done after {timeout_s:.0f} s")
        if report.exists():
            return read_report(report)
        lines = (done.stdout + done.stderr).strip().splitlines()
        return Outcome(0, 0, (), f"exit code {done.returncode}: {' '.join(lines[-3:])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these configurations")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of each")
    parser.add_argument("tests", nargs="*", default=TESTS, help="files, folders or cases of pytest")
    args = parser.parse_args()
    device, features = available_features()
    configurations = [NONE, *features, GPU, LEAST]
    unknown = set(args.only or ()).difference(configurations)
    if unknown:
        parser.error(
            f"{', '.join(sorted(unknown))}: not of {device}, which has {', '.join(configurations)}"
        )
    print(device, flush=True)
    ok = True
    for configuration in args.only or configurations:
        start = time.monotonic()
        outcome = run(configuration, args.tests, args.timeout)
        ok &= outcome.is_ok
        print(
            f"{configuration:34}{outcome.passed:6} passed {len(outcome.failed):5} failed "
            f"{outcome.skipped:5} skipped {time.monotonic() - start:6.0f} s  {outcome.trouble}",
            flush=True,
        )
        for name in outcome.failed:
            print(f"    {name}", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

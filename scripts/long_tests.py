"""Writes tests/long.txt: the tests that the tier `fast` leaves out because they take long.

.venv/bin/python -m pytest -n 2 -m "not slow and not sweep" --durations=0 tests > run.log
python scripts/long_tests.py run.log
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

SECONDS = 0.5  # of a test with its fixtures, with kernels in the cache
LIST = Path(__file__).resolve().parent.parent / "tests" / "long.txt"


def long_tests(log: str) -> list[str]:
    """The names of a pytest log. Where most cases of a test take long, the test without its cases."""
    times: dict[str, float] = defaultdict(float)
    for seconds, name in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(\S.*)$", log, re.M):
        times[name.removeprefix("tests/")] += float(seconds)
    cases: dict[str, list[str]] = defaultdict(list)
    for name in times:
        cases[name.partition("[")[0]].append(name)
    found = []
    for test, names in cases.items():
        slow = [name for name in names if times[name] > SECONDS]
        found += [test] if 2 * len(slow) > len(names) else slow
    return sorted(found)


if __name__ == "__main__":
    names = long_tests(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))
    LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    print(f"{len(names)} names in {LIST}")

"""Writes tests/budget.txt: what each test may cost, and each file. With warm caches:

    .venv/bin/python -m pytest -q -n 2 --costs=costs.jsonl tests
    python scripts/budget.py costs.jsonl

Tests keep their tier; a new one is of the landing tier. Where a file has several runs of a test, the quickest
counts. A test that did not run keeps its line.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import tiers

LISTED = 0.5  # CPU seconds, from which a test has a line
HEAD = """\
# CPU seconds with warm caches, the tier, and a test or all its cases (as long as the longest); then the sum of a file.
# scripts/budget.py writes this from a run; to allow one more test its time, add a line.
"""


def measured(files: Iterable[str]) -> dict[str, float]:
    """CPU seconds of each test on the reference machine."""
    found: dict[str, float] = {}
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry.get("outcome") == "passed":
                name = entry["test"].removeprefix("tests/")
                seconds = sum(entry["seconds"]) / max(entry.get("slowness", 1.0), 1.0)
                found[name] = min(seconds, found.get(name, seconds))
    return found


def lines(
    costs: dict[str, float], before: dict[str, tuple[float, str]]
) -> dict[str, tuple[float, str]]:
    """The lines of the budget, by name. Cases of a test share a line, unless they have one already."""
    found = {name: line for name, line in before.items() if "::" in name}
    cases: dict[str, list[float]] = defaultdict(list)
    for name, seconds in costs.items():
        if name in found:
            found[name] = seconds, found[name][1]
        else:
            cases[name.partition("[")[0]].append(seconds)
    for test, seconds in cases.items():
        if test in found or max(seconds) >= LISTED:
            found[test] = max(seconds), found.get(test, (0.0, "landing"))[1]
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in costs.items():
        sums[name.partition("::")[0]] += seconds
    known = {name: seconds for name, (seconds, _) in before.items() if "::" not in name}
    for file, total in {**known, **sums}.items():
        found[file] = max(total, known.get(file, 0.0)), "sum"
    return found


def write(found: dict[str, tuple[float, str]]) -> None:
    rows = [f"{max(seconds, 0.1):.1f} {tier} {name}\n" for name, (seconds, tier) in found.items()]
    rows.sort(key=lambda row: row.split(maxsplit=2)[2])
    tiers.BUDGET.write_text(HEAD + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    found = lines(measured(sys.argv[1:]), tiers.budget())
    write(found)
    print(f"{len(found)} lines in {tiers.BUDGET}")

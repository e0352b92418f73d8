"""Writes tests/budget.txt: what each test may cost, and each file. With warm caches:

    .venv/bin/python -m pytest -q -n 2 --costs=costs.jsonl tests
    python scripts/budget.py costs.jsonl

Tests keep their tier; a new one is of the landing tier, or nightly if it is marked `slow`. Where a file
has several runs of a test, the quickest counts. A test that did not run keeps its line.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import tiers

LISTED = 1.0  # CPU seconds, from which a test has a line: less is below what any test may take
HEAD = """\
# CPU seconds with warm caches, the tier, and a test or all its cases (as long as the longest); then the sum of a file.
# scripts/budget.py writes this from a run; to allow one more test its time, add a line.
"""


@dataclass
class Cost:
    """What a test takes: CPU seconds on the reference machine; and the tier that it has without a line."""

    seconds: float
    tier: str = "landing"


def measured(files: Iterable[str]) -> dict[str, Cost]:
    found: dict[str, Cost] = {}
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry.get("outcome") == "passed":
                name = entry["test"].removeprefix("tests/")
                seconds = sum(entry["seconds"]) / max(entry.get("slowness", 1.0), 1.0)
                if name not in found or seconds < found[name].seconds:
                    found[name] = Cost(seconds, "nightly" if entry.get("slow") else "landing")
    return found


def lines(
    costs: dict[str, Cost], before: dict[str, tuple[float, str]]
) -> dict[str, tuple[float, str]]:
    """The lines of the budget, by name. Cases of a test share a line if most of them take long."""
    found = {name: line for name, line in before.items() if "::" in name}
    tests: dict[tuple[str, str], dict[str, Cost]] = defaultdict(dict)
    for name, cost in costs.items():
        if name in found:
            found[name] = cost.seconds, found[name][1]
        else:
            tests[name.partition("[")[0], cost.tier][name] = cost
    shared = {test for test, _ in tests if test in found}
    for (test, tier), cases in tests.items():
        seconds = {name: cost.seconds for name, cost in cases.items()}
        long = {name: (n, tier) for name, n in seconds.items() if n >= LISTED}
        alone = len({each for name, each in tests if name == test}) == 1
        if test in shared:
            found[test] = max(*seconds.values(), found[test][0] * (not alone)), found[test][1]
        elif alone and 2 * len(long) > len(cases):
            found[test] = max(seconds.values()), tier
        else:
            found |= long
    sums: dict[str, float] = defaultdict(float)
    for name, cost in costs.items():
        sums[name.partition("::")[0]] += cost.seconds
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

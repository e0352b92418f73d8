"""Writes tests/budget.txt: what each test may cost, and each file. With warm caches:

    scripts/test.sh landing --costs=costs.jsonl
    .venv/bin/python scripts/budget.py costs.jsonl

Tests keep their tier; a new one is of the landing tier, or nightly if it is marked `slow`. Where a file
has several runs of a test, the quickest counts. A test that did not run keeps its line. If every test of
the landing tier ran, `--budget` begins to judge.

    .venv/bin/python scripts/budget.py --covered costs.jsonl [costs of the nightly tier]

prints how many kernels and operators each tier covers, the tests that take longest, and which kernels
and operators only nightly tests reach.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def entries(files: Iterable[str]) -> Iterable[dict[str, Any]]:
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def measured(files: Iterable[str]) -> dict[str, Cost]:
    found: dict[str, Cost] = {}
    for entry in entries(files):
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


def is_whole(files: Iterable[str]) -> bool:
    """Whether every test of the landing tier ran, skipped ones included."""
    tests, expected = set(), 0
    for entry in entries(files):
        expected = max(expected, entry.get("landing_tests", 0))
        if "outcome" in entry and entry.get("landing"):
            tests.add(entry["test"])
    return 0 < expected <= len(tests)


KINDS = {
    "kernel": "kernels (template, macros)",
    "imported": "imported operators (name, dtypes)",
    "lowered": "lowered operators (name, dtypes)",
}


def report_coverage(files: Iterable[str]) -> None:
    covered: dict[str, dict[bool, set[str]]] = {kind: defaultdict(set) for kind in KINDS}
    tests: dict[bool, dict[str, float]] = defaultdict(dict)
    memory = 0
    for entry in entries(files):
        memory = max(memory, entry.get("memory", 0))
        landing = entry.get("landing", False)
        for kind in KINDS.keys() & entry.keys():
            covered[kind][landing].add(json.dumps(entry[kind]))
        if "outcome" in entry:
            seconds = sum(entry["seconds"]) / max(entry.get("slowness", 1.0), 1.0)
            tests[landing][entry["test"]] = seconds
    for landing, tier in ((True, "landing"), (False, "nightly alone")):
        total = sum(tests[landing].values())
        print(f"{tier}: {len(tests[landing])} tests, {total / 60:.1f} CPU-minutes")
        for name, seconds in sorted(tests[landing].items(), key=lambda test: -test[1])[:20]:
            print(f"  {seconds:6.1f} s  {name}")
    print(f"a process had up to {memory} MiB")
    for kind, name in KINDS.items():
        landing_keys, nightly_keys = covered[kind][True], covered[kind][False]
        alone = sorted(nightly_keys - landing_keys)
        print(f"{name}: landing {len(landing_keys)}, nightly {len(alone)} more")
        firsts = {json.loads(key)[0] for key in alone}
        firsts -= {json.loads(key)[0] for key in landing_keys}
        for first in sorted(firsts):
            print(f"  only nightly: {first}")


def write(found: dict[str, tuple[float, str]], whole: bool) -> None:
    rows = [f"{max(seconds, 0.1):.1f} {tier} {name}\n" for name, (seconds, tier) in found.items()]
    rows.sort(key=lambda row: row.split(maxsplit=2)[2])
    head = HEAD + tiers.WHOLE if whole else HEAD
    tiers.BUDGET.write_text(head + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--covered"]:
        report_coverage(sys.argv[2:])
    else:
        found = lines(measured(sys.argv[1:]), tiers.budget())
        write(found, tiers.is_whole() or is_whole(sys.argv[1:]))
        print(f"{len(found)} lines in {tiers.BUDGET}")

"""A pytest plugin that selects the tests of a tier. CONTRIBUTING.md says when to run which.

- `--tier=landing`: all tests but those that are `nightly` in tests/budget.txt, or that have the
  marker `slow` and no line there. Of a test with several `parametrize` it takes as many cases as
  every row of each needs to occur once.
- `--tier=fast`: of these, no test that tests/budget.txt lists, and the first case of each test
  of operators and kernels.
- `--slice=TEXT`: with a tier, also a tenth of the other tests. The text decides which: a commit, for
  instance.

Without a tier all tests run that are named: the nightly tier.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import pytest

TIERS = ("fast", "landing")
SLICES = 10
TESTS = Path(__file__).parent
BUDGET = TESTS / "budget.txt"
WHOLE = "# From a run of the whole landing tier: --budget fails what costs more.\n"
_CHOSEN = pytest.StashKey[set[str]]()
_SWEPT = ("tests/ops/", "tests/glsl/", "tests/lower/")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "which tests to run")
    group.addoption("--tier", choices=TIERS, help="only the tests of a tier")
    group.addoption("--slice", metavar="TEXT", help="with a tier: also a tenth of the other tests")


def pytest_report_header(config: pytest.Config) -> list[str]:
    text = config.getoption("--slice")
    return [f"with a tenth of the nightly tier: --slice={text}"] if text else []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier, text = config.getoption("--tier"), config.getoption("--slice")
    chosen = set(select(items, tier or "landing"))
    config.stash[_CHOSEN] = set() if tier == "fast" else {item.nodeid for item in chosen}
    if tier is None:
        return
    if text:
        chosen |= {item for item in items if in_slice(item.nodeid, text)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def is_landing(item: pytest.Item) -> bool:
    """Whether a test is of the landing tier, and not only of a slice or of the nightly tier."""
    return item.nodeid in item.config.stash.get(_CHOSEN, set())


def is_everything(config: pytest.Config) -> bool:
    """Whether all files are collected, and the tiers alone select."""
    folders = {(config.invocation_params.dir / each).resolve() for each in config.args}
    some = config.getoption("keyword") or config.getoption("markexpr")
    return not some and folders <= {config.rootpath, config.rootpath / "tests"}


def landing_tests(config: pytest.Config) -> int:
    """How many tests of the landing tier are to run."""
    return len(config.stash.get(_CHOSEN, set()))


@functools.cache
def budget() -> dict[str, tuple[float, str]]:
    """The lines of tests/budget.txt: seconds, and `landing` or `nightly`, by the name of a test, of all its
    cases or of a file."""
    found = {}
    for line in BUDGET.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            seconds, tier, name = line.split(maxsplit=2)
            found[name] = float(seconds), tier
    return found


@functools.cache
def is_whole() -> bool:
    """Whether the budget is from a run of the whole landing tier, so that a test without a line is new."""
    return WHOLE in BUDGET.read_text(encoding="utf-8")


def names(item: pytest.Item) -> tuple[str, str]:
    """The names of a test that a line of the budget may have: that of the case, and that of all cases."""
    name = item.nodeid.removeprefix("tests/")
    return name, name.partition("[")[0]


def select(items: list[pytest.Item], tier: str) -> list[pytest.Item]:
    """The tests of a tier."""
    lines, tests = budget(), dict[str, list[pytest.Item]]()
    for item in items:
        name, function = names(item)
        seconds, listed = lines.get(name) or lines.get(function) or (0.0, "")
        if not listed:
            listed = "nightly" if item.get_closest_marker("slow") else "landing"
        if listed == "landing" and not (tier == "fast" and seconds):
            tests.setdefault(function, []).append(item)
    if tier == "fast":
        return [
            case
            for cases in tests.values()
            for case in (cases[:1] if cases[0].nodeid.startswith(_SWEPT) else cases)
        ]
    return [case for cases in tests.values() for case in covering(cases)]


def covering(cases: list[Any]) -> list[Any]:
    """The cases of one test, nearly as few as every row of every `parametrize` needs to occur once."""
    if not all(hasattr(case, "callspec") for case in cases):
        return cases
    values = [frozenset(enumerate(case.callspec._idlist)) for case in cases]
    left, chosen = set[Any]().union(*values), set[int]()
    while left:
        best = max(range(len(cases)), key=lambda n: (len(values[n] & left), -n))
        chosen.add(best)
        left -= values[best]
    return [cases[n] for n in sorted(chosen)]


def in_slice(name: str, text: str) -> bool:
    """Whether a test is in the tenth that a text chooses."""
    return int(hashlib.sha256(f"{text} {name}".encode()).hexdigest(), 16) % SLICES == 0

"""Changed files read, or raise an error of purevk. `scripts/fuzz.py` runs as many as one likes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.fuzz.mutations import apply, draw_changes
from tests.fuzz.targets import check, parse, pick, run, seeds


def outcomes(first: int, count: int, runs: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    for number in range(first, first + count):
        draw = random.Random(number)
        seed = pick(draw, seeds())
        changes = draw_changes(draw, seed.kind, seed.data)
        try:
            found[check(run if runs else parse, seed, apply(seed.data, changes))] += 1
        except Exception as error:
            pytest.fail(f"{seed.name} {changes}: {error!r}")
    return found


def test_seeds_are_sound() -> None:
    kinds = Counter(seed.kind for seed in seeds())
    assert set(kinds) == {"pte", "ptd", "pvk", "bundle", "entry"}
    for seed in seeds():
        assert check(parse, seed, seed.data) == "read", seed.name


def test_changed_files() -> None:
    found = outcomes(0, 150, runs=False)
    assert found["read"] > 10 and found["FileFormatError"] > 50


@pytest.mark.slow
def test_many_changed_files() -> None:
    found = outcomes(1000, 2000, runs=False)
    assert found["read"] > 150 and found["FileFormatError"] > 700


@pytest.mark.slow
@pytest.mark.device
def test_changed_files_on_the_device() -> None:
    assert outcomes(5000, 100, runs=True)["read"] > 4

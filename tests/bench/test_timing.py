"""What the benchmarks share: contenders that take turns, errors, limits of time."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bench.timing import Budget, Sampler, TimeLimitError, error_of, interleave, time_limit


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def sampler(name: str) -> Sampler:
        def sample() -> list[float]:
            order.append(name)
            return [float(len(order))]

        return sample

    found = interleave({"a": sampler("a"), "b": sampler("b")}, 0.0, rounds=3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"  # the first two warm up
    assert found == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}


def test_the_first_sample_of_a_turn_does_not_count() -> None:
    count = 0

    def sample() -> list[float]:
        nonlocal count
        count += 1
        time.sleep(2e-3)
        return [float(count)]

    found = interleave({"a": sample}, 0.02, rounds=1)["a"]
    assert found == [float(n) for n in range(3, count + 1)] and len(found) > 1


def test_errors() -> None:
    assert error_of([1.0, 4.5], [1.0, 5.0]) == pytest.approx(0.1)
    assert not error_of([np.nan, 5.0], [1.0, 5.0]) <= 1e9
    with pytest.raises(ValueError, match=r"\(1,\), not \(2,\)"):
        error_of([1.0], [1.0, 5.0])  # which would broadcast


def test_a_step_that_takes_too_long_is_stopped() -> None:
    start = time.monotonic()
    with pytest.raises(TimeLimitError, match="more than 0 s"), time_limit(0.05):
        time.sleep(30)
    assert time.monotonic() - start < 10
    with time_limit(0.05):
        pass
    time.sleep(0.1)  # nothing comes later


def test_a_budget() -> None:
    assert 99 < Budget(100.0).left <= 100 and Budget(0.0).left <= 0

"""Calls that start before the one before has finished."""

from __future__ import annotations

import copy
import functools
import random
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402

pytestmark = pytest.mark.device


class _Sums(torch.nn.Module):
    """Adds inputs up; the result has the sum so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return torch.sin(self.total) + x


# What calls give: states, parts and other views of them, what they were, inputs, constants.
_RESULTS = {
    "state": lambda m, x: m.a.add_(x),
    "views of a state": lambda m, x: (m.a.add_(x).view(-1), m.a.t(), m.a[1:3]),
    "before and after": lambda m, x: (m.a.clone(), m.a.add_(x)),
    "part of a state": lambda m, x: (m.a[2:4].add_(x[:2]), m.a[2:4], m.b),
    "states that change places": lambda m, x: (
        m.b.clone(),
        m.b.copy_(m.a + x),
        m.a.copy_(m.b.flip(0)),
    ),
    "inputs": lambda m, x: (x, x.t(), x[1], m.a.add_(x)),
    "a state and its new elements": lambda m, x: (y := x * 2 + m.a, m.a.copy_(y), y.view(8, 4)),
    "a state that nothing writes": lambda m, x: (m.b, m.b.view(-1), m.a.add_(x) + m.b),
}


class _States(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("a", torch.zeros(4, 8))
        self.register_buffer("b", torch.arange(32.0).view(4, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = _RESULTS[self.name](self, x)
        return results if isinstance(results, tuple) else (results,)


class _Lookup(torch.nn.Module):
    def forward(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return table[index + 1]


def _saved(path: Path, module: torch.nn.Module, *inputs: torch.Tensor) -> purevk.Program:
    with purevk.compile(module, inputs) as program:
        program.save(path)
    return purevk.load(path)


@pytest.mark.parametrize("seed", range(3))
def test_results_are_those_of_calls_one_by_one(seed: int, tmp_path: Path) -> None:
    """In any order of starting, waiting, plain calls and reading the state."""
    choices, numbers = random.Random(seed), np.random.default_rng(seed)
    with _saved(tmp_path / "sums.pvk", _Sums(), torch.zeros(64)) as program:
        method, total = program.method("forward"), np.zeros(64, np.float32)
        unfinished, count = [], 0
        assert method.executable.overlapped is not None
        while count < 40 or unfinished:
            step = choices.choice(("start", "start", "wait", "call", "state"))
            if step in ("start", "call") and count < 40:
                x = numbers.standard_normal(64).astype(np.float32)
                total, count = total + x, count + 1
                result = (
                    method.start(x) if step == "start" else functools.partial(np.copy, method(x))
                )
                unfinished.append((result, np.sin(total) + x))
            elif step == "state":
                np.testing.assert_array_equal(program.state["total"], total)
            elif unfinished:
                result, want = unfinished.pop(choices.randrange(len(unfinished)))
                np.testing.assert_allclose(result(), want, rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(result(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", _RESULTS)
def test_results_are_of_their_call(name: str, tmp_path: Path) -> None:
    """Later calls change the states before the results of earlier ones are read."""
    choices, module = random.Random(name), _States(name)
    torch.manual_seed(len(name))
    with _saved(tmp_path / "states.pvk", copy.deepcopy(module), torch.zeros(4, 8)) as program:
        method, unfinished = program.method("forward"), []
        for _ in range(24):
            x = torch.randn(4, 8)
            want = [result.numpy().copy() for result in module(x.clone())]
            start = (
                method.start
                if choices.random() < 0.8
                else lambda x: functools.partial(tuple, method(x))
            )
            unfinished.append((start(x.numpy()), want))
            x.fill_(9)
            while unfinished and choices.random() < 0.3:
                result, want = unfinished.pop(choices.randrange(len(unfinished)))
                np.testing.assert_equal(result(), tuple(want))
        for result, want in unfinished:
            np.testing.assert_equal(result(), tuple(want))


def test_two_calls_are_unfinished(tmp_path: Path) -> None:
    with _saved(tmp_path / "sums.pvk", _Sums(), torch.zeros(64)) as program:
        method = program.method("forward")
        for _ in range(3):
            result = method.start(np.ones(64, np.float32))
        first, second = method.executable.overlapped.graphs
        assert first._running is not None and second._running is not None
    np.testing.assert_allclose(result(), np.full(64, np.sin(3.0) + 1), rtol=1e-5)
    with pytest.raises(purevk.PurevkError, match="closed"):
        method.start(np.ones(64, np.float32))


def test_calls_that_may_refuse_an_index_run_at_once(tmp_path: Path) -> None:
    table, index = torch.arange(6.0), torch.tensor([0, 4])
    with _saved(tmp_path / "lookup.pvk", _Lookup(), table, index) as program:
        method = program.method("forward")
        result = method.start(table, index)
        assert method.executable.overlapped is None
        np.testing.assert_array_equal(result(), [1, 5])
        with pytest.raises(purevk.InputError, match="9"):
            method.start(table, torch.tensor([1, 8]))


def test_wrong_inputs_raise_at_once(tmp_path: Path) -> None:
    with _saved(tmp_path / "sums.pvk", _Sums(), torch.zeros(64)) as program:
        with pytest.raises(purevk.InputError):
            program.method("forward").start(np.ones(63, np.float32))

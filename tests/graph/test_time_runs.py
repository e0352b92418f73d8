"""The time of whole runs of a segment on the device."""

from __future__ import annotations

import numpy as np
import pytest

import purevk
from purevk.ir.binding import bind_symbols, input_symbols
from purevk.report.timings import time_call

pytestmark = pytest.mark.device
torch = pytest.importorskip("torch")


class TwoSizes(torch.nn.Module):
    def forward(self, x):
        return (x @ x.T).softmax(-1) @ x


def test_runs_are_timed_and_calls_stay_right() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    length = torch.export.Dim("length", min=2, max=600)
    with purevk.compile(TwoSizes(), (x,), dynamic_shapes=({0: length},)) as program:
        executable = program.method("forward").executable
        found = {}
        for rows in (16, 600):
            given = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
            before = program.forward(given)
            graph = executable.plan.assignment.graph
            env = bind_symbols(input_symbols(graph), [given.numpy()])
            times = executable.graph.time_runs(0, env, 5)
            assert len(times) == 5 and min(times) > 0
            found[rows] = float(np.median(times))
            torch.testing.assert_close(program.forward(given), before, rtol=0, atol=0)
        assert found[600] > 1.3 * found[16]  # 1400 times the work, which a GPU does at once


class Position(torch.nn.Module):
    """Each call reads the next element."""

    def __init__(self):
        super().__init__()
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("table", torch.arange(10.0) + 1)

    def forward(self, x):
        found = self.table[self.position] + x
        self.position.add_(1)
        return found


def test_indices_of_timed_runs_are_no_errors_of_the_next_call() -> None:
    x = torch.zeros(1)
    with purevk.compile(Position(), (x,)) as program:
        time_call(program.method("forward").executable, [x.numpy()], runs=20)
        program.reset_state()
        assert [program.forward(x).item() for _ in range(3)] == [1, 2, 3]
        program.method("forward").executable.graph.time_runs(0, {}, 20)
        program.reset_state()
        assert program.forward(x).item() == 1


class Chosen(torch.nn.Module):
    def forward(self, x):
        rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
        return (x[rows] * 2).relu()


def test_sizes_that_a_segment_finds_out() -> None:
    x = torch.ones(20, 4)
    x[:11] = -1
    with purevk.compile(Chosen(), (x,)) as program:
        made = time_call(program.method("forward").executable, [x.numpy()])
        assert program.forward(x).shape == (9, 4)
    assert len(made.order) == 2 and all(each.seconds > 0 for each in made.dispatches)
    assert made.dispatches[-1].nbytes >= 2 * 9 * 16  # rows that are read and written

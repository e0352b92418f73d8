"""Which generator random operators draw from: torch's default one, one that the model passes, or
purevk's own without torch; through modules, torch.compile and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import purevk
from purevk import generators
from purevk.errors import PurevkError
from tests.harness import python
from tests.ops.random.harness import correlation

pytestmark = pytest.mark.device


class Noise(torch.nn.Module):
    def __init__(self, generator=None):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        chosen = {} if self.generator is None else {"generator": self.generator}
        return F.dropout(x, 0.5), torch.rand(x.shape, **chosen), torch.normal(x, 1.0, **chosen)


X = torch.ones(40, 25)


def _same(a, b):
    return [torch.equal(left, right) for left, right in zip(a, b)]


def test_manual_seed():
    with purevk.compile(Noise(), (X,)) as program, purevk.compile(Noise(), (X,)) as other:
        torch.manual_seed(5)
        first, second = program.forward(X), program.forward(X)
        torch.manual_seed(5)
        again, next_ = program.forward(X), other.forward(X)
        purevk.manual_seed(5)
        third = other.forward(X)
        torch.manual_seed(6)
        moved = program.forward(X)
        state = torch.get_rng_state()
        left = program.forward(X)
        torch.set_rng_state(state)
        right = program.forward(X)
    assert all(_same(first, again)) and all(_same(second, next_)) and all(_same(first, third))
    assert all(_same(left, right))
    for a, b in ((first, second), (first, moved), (second, moved)):
        assert not any(_same(a, b))
        assert correlation(a[1], b[1]) < 4.5 and correlation(a[1], a[2]) < 4.5


def test_a_call_advances_the_generator_of_torch_by_one_seed():
    with purevk.compile(Noise(), (X,)) as program:
        torch.manual_seed(7)
        program.forward(X)
        after = torch.rand(3)
    torch.manual_seed(7)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(after, torch.rand(3))


def test_programs_without_random_operators_leave_the_generator():
    with purevk.compile(torch.nn.Dropout().eval(), (X,)) as program:
        state = torch.get_rng_state()
        program.forward(X)
        assert torch.equal(state, torch.get_rng_state())


def test_generators_that_the_model_passes():
    mine = torch.Generator().manual_seed(9)
    with purevk.compile(Noise(mine), (X,)) as program:
        assert program.report()["cpu_nodes"] == 0
        torch.manual_seed(1)
        first = program.forward(X)
        torch.manual_seed(1)
        second = program.forward(X)
        mine.manual_seed(9)
        third = program.forward(X)
    assert _same(first, second) == [True, False, False]
    assert _same(first, third) == [False, True, True]


def test_a_file_keeps_no_generator(tmp_path: Path):
    mine = torch.Generator().manual_seed(9)
    with purevk.compile(Noise(mine), (X,)) as program:
        program.save(tmp_path / "noise.pvk")
    generators._passed.clear()  # as in another process
    with (
        purevk.load(tmp_path / "noise.pvk") as program,
        pytest.raises(PurevkError, match="generator that this process does not know"),
    ):
        program.forward(X)


SOURCE = """
import sys
import numpy as np
import purevk

with purevk.load(sys.argv[1]) as program:
    x = np.ones((40, 25), np.float32)
    first = program.forward(x)
    purevk.manual_seed(5)
    seeded = [program.forward(x), program.forward(x)]
    assert "torch" not in sys.modules
    import torch
    late = program.forward(x)
    torch.manual_seed(8)
    own = program.forward(x)
    print([[float(each.sum(dtype=np.float64)) for each in call] for call in (first, *seeded, late, own)])
"""


@pytest.mark.slow
def test_without_torch(tmp_path: Path):
    """The same numbers as with torch, also when a process imports torch later."""
    path = tmp_path / "noise.pvk"
    with purevk.compile(Noise(), (X,)) as program:
        program.save(path)
        found = []
        torch.manual_seed(77)
        found.append(program.forward(X))
        torch.manual_seed(5)
        found += [program.forward(X) for _ in range(3)]
        torch.manual_seed(8)
        found.append(program.forward(X))
    wanted = [[each.double().sum().item() for each in call] for call in found]
    assert python(SOURCE, path, PUREVK_SEED="77") == [pytest.approx(sums) for sums in wanted]


@pytest.mark.slow
def test_loops_draw_in_each_iteration():
    class Loop(torch.nn.Module):
        def forward(self, x, n):
            def more(i, x):
                return i < n.sum()

            def body(i, x):
                return i + 1, torch.cat([x[1:], torch.rand(1)])

            return torch.while_loop(more, body, (torch.tensor(0), x))[1]

    x, n = torch.zeros(50), torch.tensor([50])
    with purevk.compile(Loop(), (x, n)) as program:
        torch.manual_seed(2)
        made = program.forward(x, n)
        torch.manual_seed(2)
        again = program.forward(x, n)
    assert torch.equal(made, again) and len(made.unique()) == 50


def test_a_call_that_is_planned_again_begins_with_the_same_seeds():
    class Kept(torch.nn.Module):
        def forward(self, x):
            noise = torch.rand(x.shape)
            count = (noise < x).sum().item()
            torch._check(count >= 2)
            return noise, torch.rand(count)

    x = torch.full((400,), 0.9)
    with purevk.compile(Kept(), (x,)) as program:
        made = []
        for _ in range(2):  # the first time, more elements than were planned for
            torch.manual_seed(4)
            made.append(program.forward(x))
    assert all(_same(*made))
    assert len(made[0][1]) == (made[0][0] < 0.9).sum()


@pytest.mark.slow
def test_torch_compile():
    torch._dynamo.reset()
    module = torch.nn.Sequential(torch.nn.Linear(25, 64), torch.nn.Dropout(0.5)).train()
    compiled = torch.compile(module, backend="purevk")
    with torch.no_grad():
        compiled(X)
        made = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            made.append((compiled(X), compiled(X), torch.rand(3)))
    torch._dynamo.reset()
    assert all(_same(made[0], made[1])) and not any(_same(made[0], made[2]))
    assert not torch.equal(made[0][0], made[0][1])
    kept = made[0][0] != 0
    torch.testing.assert_close(made[0][0][kept], (module[0](X) * 2)[kept], rtol=1e-4, atol=1e-5)
    assert abs(kept.double().mean() - 0.5) < 0.05


@pytest.mark.slow
def test_a_pte_file(tmp_path: Path):
    exir = pytest.importorskip("executorch.exir")

    class Chance(torch.nn.Module):
        def forward(self, x):
            return torch.rand(x.shape), x + torch.randn(x.shape)

    exported = torch.export.export(Chance(), (X,))
    lowered = exir.to_edge(exported).to_executorch()
    (tmp_path / "noise.pte").write_bytes(lowered.buffer)
    with purevk.load(tmp_path / "noise.pte") as program:
        assert program.report()["cpu_nodes"] == 0
        torch.manual_seed(5)
        first, second = program.forward(X), program.forward(X)
        torch.manual_seed(5)
        again = program.forward(X)
    assert all(_same(first, again)) and not any(_same(first, second))

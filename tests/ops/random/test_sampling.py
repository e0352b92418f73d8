"""Random choices: dropout, multinomial, attention with dropout, random leaky ReLU, and the samples
of fractional pooling."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import purevk
from tests.ops.harness import Case, aten, check, dispatches, program_of, tensor
from tests.ops.random.harness import QUANTILE, chi_square, correlation, distance

pytestmark = pytest.mark.device


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def drawn(run, *args):
    with program_of(run, args) as program:
        assert program.report()["cpu_nodes"] == 0
        torch.manual_seed(12)
        return program.forward(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dropout(dtype):
    x = torch.full((100, 200), 3.0, dtype=dtype)
    with program_of(lambda x: aten.native_dropout.default(x, 0.25, True), (x,)) as program:
        made, kept = program.forward(x)
        again, _ = program.forward(x)
    assert (
        torch.equal(made == 0, ~kept)
        and abs(kept.float().mean() - 0.75) < 0.02
        and not torch.equal(made, again)
    )
    torch.testing.assert_close(made[kept], torch.full_like(made[kept], 4.0))
    with program_of(lambda x: aten.native_dropout.default(x, 0.25, False), (x,)) as program:
        made, kept = program.forward(x)
        assert torch.equal(made, x) and kept.all() and len(dispatches(program)) <= 2


@pytest.mark.slow
def test_kinds_of_dropout():
    def run(x):
        return (
            F.dropout(x, 0.4),
            F.alpha_dropout(x, 0.4, True),
            F.dropout2d(x, 0.4),
            F.feature_alpha_dropout(x, 0.4, True),
            F.dropout(x, 1.0),
            F.dropout(x, 0.0),
        )

    x = torch.ones(50, 40, 4, 4)
    torch.manual_seed(12)
    with purevk.compile(Function(run), (x,)) as program:
        assert program.report()["cpu_nodes"] == 0
        single, alpha, planes, planes_alpha, none, all_ = program.forward(x)
    for made in (single, alpha):
        low = made == made.min()
        assert abs(low.double().mean() - 0.4) < 4.5 * math.sqrt(0.24 / x.numel())
        assert len(made.unique()) == 2
    assert correlation((single == 0).double(), (alpha == alpha.min()).double()) < 4.5
    for made in (planes, planes_alpha):
        flat = made.flatten(2)
        assert (flat == flat[..., :1]).all()
        low = flat[..., 0] == flat.min()
        assert abs(low.double().mean() - 0.4) < 4.5 * math.sqrt(0.24 / 2000)
    assert not none.any() and torch.equal(all_, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_multinomial_with_replacement(dtype):
    weights = torch.tensor([[0.0, 1.0, 2.0, 0.0, 5.0, 0.0], [3.0, 0.0, 0.0, 1.0, 1.0, 0.0]])

    def run(x):
        return (
            torch.multinomial(x, 20000, True),
            torch.multinomial(x[0], 20000, True),
            torch.multinomial(x.repeat(10000, 1), 1, True),
        )

    pairs, single, once = drawn(run, weights.to(dtype))
    assert pairs.shape == (2, 20000) and pairs.dtype is torch.int64
    for row, chances in zip(
        (*pairs, single, once[::2, 0], once[1::2, 0]), (*weights, weights[0], *weights)
    ):
        assert chi_square(torch.bincount(row, minlength=6), chances) < 5


def test_multinomial_without_replacement():
    """The first sample is distributed as the weights, the second as those that are left."""
    weights = torch.tensor([1.0, 0.0, 2.0, 3.0, 4.0])

    def run(x):
        return torch.multinomial(x.expand(20000, 5), 4), torch.multinomial(x, 2)

    made, few = drawn(run, weights)
    assert few.shape == (2,)
    assert torch.equal(made.sort(-1).values, torch.tensor([0, 2, 3, 4]).expand(20000, 4))
    assert chi_square(torch.bincount(made[:, 0], minlength=5), weights) < 5
    second = made[made[:, 0] == 4, 1]
    assert chi_square(torch.bincount(second, minlength=5), weights * (weights < 4)) < 5


def test_large_weights_stay_in_range():
    """A vocabulary whose cumulative weights are rounded, and most of whose weights are 0."""
    weights = tensor(50000, low=0.1, high=1.0)
    weights[torch.arange(50000) % 7 != 3] = 0
    made = drawn(lambda x: torch.multinomial(x, 30000, True), weights)
    assert (weights[made] > 0).all()


def test_attention_with_dropout():
    """Values of ones: the result is the sum of the weights that are kept."""
    q, k = tensor(2, 3, 64, 16), tensor(2, 3, 256, 16, seed=1)
    v = torch.ones(2, 3, 256, 8)

    def run(q, k, v):
        # Twice the same: each has its own mask.
        attend = F.scaled_dot_product_attention
        return attend(q, k, v, dropout_p=0.3), attend(q, k, v, dropout_p=0.3)

    first, second = drawn(run, q * 0, k, v)
    for made in (first, second):
        kept = made[..., 0].double() * 0.7 * 256
        torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-2)
        assert abs(kept.mean() / 256 - 0.7) < 0.01
        assert (made == made[..., :1]).all()
    assert not torch.equal(first, second)
    check(Case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.0), (q, k, v)))


def test_random_leaky_relu():
    x = torch.cat([tensor(20000, low=-2.0, high=-1.0), tensor(100, low=0.0, high=3.0)])

    def run(x):
        return (
            aten.rrelu.default(x, 0.1, 0.4, True),
            *aten.rrelu_with_noise_functional.default(x, torch.zeros_like(x), 0.1, 0.4, True),
            aten.rrelu.default(x, 0.1, 0.4, False),
        )

    plain, made, noise, mean = drawn(run, x)
    torch.testing.assert_close(made, x * noise)
    assert (noise[20000:] == 1).all() and torch.equal(plain[20000:], x[20000:])
    for slopes in (noise[:20000], (plain / x)[:20000]):
        assert distance(slopes, lambda v: ((v - 0.1) / 0.3).clamp(0, 1)) < QUANTILE
    torch.testing.assert_close(mean, F.leaky_relu(x, 0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fractional_pooling(dtype):
    """The positions, from given samples, are those of torch."""
    cases = []
    for shape, kernel, sizes in (
        ((2, 3, 17, 13), (2, 3), (7, 5)),
        ((3, 17, 13), (2, 2), (1, 12)),
        ((2, 2, 9, 8, 11), (2, 2, 3), (4, 3, 5)),
        ((2, 9, 8, 11), (2, 2, 3), (4, 1, 5)),
    ):
        rank = len(kernel)
        pool = (aten.fractional_max_pool2d if rank == 2 else aten.fractional_max_pool3d).default
        x = tensor(*shape).to(dtype)
        x.view(-1)[5] = math.nan
        batch = shape[0] if len(shape) == rank + 2 else 1
        samples = tensor(batch, shape[-rank - 1], rank, low=0.0, high=0.99).to(dtype)
        run = lambda x, s, pool=pool, kernel=kernel, sizes=sizes: pool(x, kernel, sizes, s)  # noqa: E731
        cases.append(Case(run, (x, samples), rtol=0, atol=0))
    check(cases)


def test_fractional_pooling_draws_its_samples():
    x = tensor(1, 1, 40, 40)
    with program_of(lambda x: F.fractional_max_pool2d(x, 2, output_size=(23, 27)), (x,)) as program:
        made = [program.forward(x) for _ in range(2)]
        assert program.report()["cpu_nodes"] == 0
    assert not torch.equal(*made)

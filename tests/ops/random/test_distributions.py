"""Distributions of random operators, with fixed seeds. The limits are those that a right generator
exceeds once in thousands of seeds."""

from __future__ import annotations

import math

import pytest
import torch
from torch.special import gammainc, gammaln, ndtr

from purevk.errors import ShapeError
from tests.ops.harness import aten, program_of
from tests.ops.random.harness import QUANTILE, chi_square, correlation, counted, distance

pytestmark = pytest.mark.device
COUNT = 20000


def drawn(run, *args, traced=None):
    with program_of(run, traced or args) as program:
        assert program.report()["cpu_nodes"] == 0
        torch.manual_seed(11)
        return program.forward(*args)


CONTINUOUS = {
    "uniform": (lambda x: torch.rand_like(x), lambda v: v.clamp(0, 1)),
    "uniform_": (
        lambda x: aten.uniform.default(x, -2.0, 5.0),
        lambda v: ((v + 2) / 7).clamp(0, 1),
    ),
    "normal": (lambda x: torch.randn_like(x), ndtr),
    "normal_": (
        lambda x: aten.normal_functional.default(x, -1.0, 3.0),
        lambda v: ndtr((v + 1) / 3),
    ),
    "normal of tensors": (lambda x: torch.normal(x * 2, x * 4), lambda v: ndtr((v - 1) / 2)),
    "normal of a mean": (lambda x: torch.normal(x, 2.0), lambda v: ndtr((v - 0.5) / 2)),
    "normal of a deviation": (lambda x: torch.normal(1.0, x), lambda v: ndtr((v - 1) / 0.5)),
    "log_normal": (
        lambda x: aten.log_normal.default(x, 0.5, 0.25),
        lambda v: ndtr((v.log() - 0.5) / 0.25),
    ),
    "exponential": (lambda x: aten.exponential.default(x, 3.0), lambda v: -torch.expm1(-3 * v)),
    "cauchy": (
        lambda x: aten.cauchy.default(x, 1.0, 2.0),
        lambda v: 0.5 + ((v - 1) / 2).atan() / math.pi,
    ),
    **{
        f"gamma {shape}": (
            lambda x, shape=shape: torch._standard_gamma(x * 0 + shape),
            lambda v, shape=shape: gammainc(torch.tensor(shape, dtype=torch.float64), v),
        )
        for shape in (0.3, 1.0, 4.5, 1000.0)
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_continuous(dtype):
    x = torch.full((COUNT,), 0.5, dtype=dtype)
    made = drawn(lambda x: tuple(run(x) for run, _ in CONTINUOUS.values()), x)
    found = {
        name: distance(values, cumulative)
        for (name, (_, cumulative)), values in zip(CONTINUOUS.items(), made)
    }
    assert all(values.dtype is dtype for values in made)
    assert {name: far for name, far in found.items() if not far < QUANTILE} == {}


def poisson(mean):
    return lambda k: torch.exp(k * math.log(mean) - mean - gammaln(k + 1))


def binomial(count, p):
    size = math.lgamma(count + 1)
    return lambda k: (
        torch.exp(
            size
            - gammaln(k + 1)
            - gammaln((count - k).clamp(min=0) + 1)
            + k * math.log(p)
            + (count - k) * math.log1p(-p)
        )
        * (k <= count)
    )


WHOLE = {
    "geometric": (
        lambda x: aten.geometric.default(x, 0.2),
        lambda k: torch.where(k > 0, 0.2 * 0.8 ** (k - 1), 0.0),
        50,
    ),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.6), lambda k: torch.tensor([0.7, 0.3, 0.0]), 2),
    "bernoulli of p": (
        lambda x: aten.bernoulli.p(x, 0.9),
        lambda k: torch.tensor([0.1, 0.9, 0.0]),
        2,
    ),
    "bernoulli of a tensor": (
        lambda x: aten.bernoulli.Tensor(x, x[:1]),
        lambda k: torch.tensor([0.5, 0.5, 0.0]),
        2,
    ),
    "random_": (
        lambda x: aten.random.to(x, 7),
        lambda k: torch.tensor([1.0] * 7 + [0]).double() / 7,
        7,
    ),
    **{
        f"poisson {mean}": (lambda x, mean=mean: torch.poisson(x * 0 + mean), poisson(mean), most)
        for mean, most in ((0.7, 12), (9.5, 40), (10.5, 45), (300.0, 500), (50000.0, 52000))
    },
    **{
        f"binomial {count} {p}": (
            lambda x, count=count, p=p: torch.binomial(x * 0 + count, x * 0 + p),
            binomial(count, p),
            most,
        )
        for count, p, most in (
            (10.0, 0.3, 10),
            (9.0, 0.8, 9),
            (40.0, 0.4, 40),
            (1000.0, 0.97, 1000),
            (100000.0, 0.02, 2600),
        )
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_whole_numbers(dtype):
    x = torch.full((COUNT,), 0.5, dtype=dtype)
    made = drawn(lambda x: tuple(run(x) for run, _, _ in WHOLE.values()), x)
    found = {
        name: counted(values, chance, most)
        for (name, (_, chance, most)), values in zip(WHOLE.items(), made)
    }
    assert {name: far for name, far in found.items() if not far < 5} == {}


def test_edges_of_parameters():
    """Parameters with one possible result, and parameters that mean nothing, which give NaN: a
    device cannot raise an error."""
    rates = torch.tensor([0.0, math.nan, -1.0, 1e8])
    counts = torch.tensor([5.0, 5.0, 0.0, 7.0, math.nan])
    chances = torch.tensor([0.0, 1.0, 0.5, math.nan, 0.5])
    shapes = torch.tensor([0.0, 1e-6, math.nan])

    def run(rates, counts, chances, shapes):
        return (
            torch.poisson(rates),
            torch.binomial(counts, chances),
            torch._standard_gamma(shapes),
            torch.bernoulli(chances.nan_to_num()),
        )

    args = rates, counts, chances, shapes
    made = drawn(run, *args, traced=tuple(torch.ones_like(each) for each in args))
    poisson, binomial, gamma, bernoulli = made
    assert poisson[0] == 0 and poisson[1:3].isnan().all()
    assert abs(poisson[3] - 1e8) < 8e4
    assert binomial[:3].tolist() == [0, 5, 0] and binomial[3:].isnan().all()
    assert (gamma[:2] > 0).all() and (gamma[:2] < 1e-30).all() and gamma[2].isnan()
    assert bernoulli[:2].tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    """1 is not in [0, 1) after rounding, and all numbers are equally likely."""
    x = torch.zeros(COUNT * 2, dtype=dtype)

    def run(x):
        return torch.rand_like(x), aten.uniform.default(x, 1.0, 1.5), aten.exponential.default(x)

    uniform, between, exponential = drawn(run, x)
    steps = 2048 if dtype is torch.float16 else 256
    assert uniform.max() < 1 and (uniform.double() * steps % 1 == 0).all()
    counts = torch.bincount((uniform.double() * 128).long(), minlength=128)
    assert chi_square(counts, torch.ones(128)) < 5
    assert between.min() == 1 and between.max() < 1.5
    assert abs(exponential.double().mean() - 1) < 0.02


def test_integers():
    def run(x):
        return (
            torch.randint(-3, 7, (COUNT,)),
            torch.randint(0, 100000, (COUNT,), dtype=torch.int32),
            torch.randint(0, 3 * 2**30, (COUNT,)),
            torch.randint(-(2**63), 2**63 - 1, (COUNT,)),
            torch.randint_like(x, 5, 25),
            torch.randint(0, 256, (COUNT,), dtype=torch.uint8),
            aten.random.default(x),
            aten.random.default(x.long()),
            aten.random.default(x.bool()),
        )

    made = drawn(run, torch.zeros(COUNT))
    small, middle, large, whole, like, byte, floats, longs, flags = made
    assert small.min() == -3 and small.max() == 6
    assert chi_square(torch.bincount(small + 3), torch.ones(10)) < 5
    assert middle.dtype is torch.int32 and like.dtype is torch.float32
    for values, low, span in (
        (middle, 0, 100000),
        (large, 0, 3 * 2**30),
        (whole, -(2**63), 2**64),
        (like, 5, 20),
        (byte, 0, 256),
        (floats, 0, 2**24),
        (longs, 0, 2**63),
        (flags, 0, 2),
    ):
        share = (values.double() - float(low)) / float(span)
        assert share.min() >= 0 and share.max() <= 1
        bins = 2 if values is flags else 4
        counts = torch.bincount((share * bins).long().clamp(max=bins - 1), minlength=bins)
        assert chi_square(counts, torch.ones(bins)) < 5
    # Each number as often as the next: 32 bits are not enough for a range of 3 2^30.
    assert chi_square(torch.bincount(large % 3), torch.ones(3)) < 5


def test_permutations():
    def run(x):
        return torch.randperm(1000), torch.randperm(7, dtype=torch.int32), torch.randperm(1000)

    first, short, second = drawn(run, torch.zeros(1))
    for made in (first, second):
        assert torch.equal(made.sort().values, torch.arange(1000))
    assert not torch.equal(first, second) and correlation(first, second) < 4.5
    assert short.dtype is torch.int32 and sorted(short.tolist()) == list(range(7))


def test_dirichlet():
    """Shares add up to 1, and each is beta distributed. With tiny parameters one share is 1."""
    weights = torch.tensor([1.0, 1.0, 3.0]).expand(COUNT, 3)
    tiny = torch.full((2000, 4), 1e-3)
    made, few = drawn(
        lambda a, b: (torch._sample_dirichlet(a), torch._sample_dirichlet(b)), weights, tiny
    )
    torch.testing.assert_close(made.sum(-1), torch.ones(COUNT), rtol=1e-5, atol=1e-5)
    assert distance(made[:, 0], lambda v: 1 - (1 - v) ** 4) < QUANTILE  # beta(1, 4)
    assert torch.allclose(few.sum(-1), torch.ones(2000), atol=1e-5)
    assert chi_square(torch.bincount(few.argmax(-1), minlength=4), torch.ones(4)) < 5
    assert (few.max(-1).values > 0.999).double().mean() > 0.97


def test_parameters_out_of_range_are_refused():
    x = torch.zeros(3)
    for run in (
        lambda x: aten.exponential.default(x, 0.0),
        lambda x: aten.geometric.default(x, 1.0),
        lambda x: aten.uniform.default(x, 2.0, 1.0),
        lambda x: aten.normal_functional.default(x, 0.0, -1.0),
    ):
        with pytest.raises((ShapeError, RuntimeError), match="needs|expects|found|>="):
            program_of(run, (x,))

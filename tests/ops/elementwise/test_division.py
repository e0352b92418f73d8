"""Division with rounding, and remainders: how torch rounds in half precision, and numbers below the
least normal one."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.harness import Case, check, program_of, tensor

pytestmark = pytest.mark.device

ODD = (1.0, 0.334, -1.0, 0.1, 3.0, 0.0999, 7.5, -2.5, 1e4, 6.1e-5, 0.0, math.inf, math.nan, -0.7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_each_step_is_rounded_as_in_torch(dtype):
    odd = torch.tensor(ODD)
    pairs = torch.cartesian_prod(odd, odd)
    x = torch.cat([pairs[:, 0], tensor(4000, low=-20.0, high=20.0)]).to(dtype)
    y = torch.cat([pairs[:, 1], tensor(4000, seed=1)]).to(dtype)
    functions = [
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        torch.floor_divide,
        torch.remainder,
        torch.fmod,
        lambda x, y: torch.div(x, 0.334, rounding_mode="trunc"),
        lambda x, y: torch.div(x, 0.334, rounding_mode="floor"),
        lambda x, y: torch.remainder(x, 0.334),
        lambda x, y: torch.fmod(x, -0.1),
    ]
    check([Case(function, (x, y), rtol=0, atol=0) for function in functions])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_whole_quotients_of_large_numbers(dtype):
    """Quotients at which a half cannot be added, and dividends at which products are infinite."""
    top, digits = torch.finfo(dtype).max, 24 if dtype is torch.float32 else 53
    edges = (2.0**digits - 1, 2.0**digits - 3, 2.0 ** (digits + 8), top, top / 2, 1.0, 0.0)
    quotients = torch.randint(1, 2**digits, (200,), generator=torch.Generator().manual_seed(3))
    x = torch.cat([torch.tensor(edges, dtype=torch.float64), quotients.double() * 3]).to(dtype)
    x = torch.cat([x, -x])

    def run(x, y):
        modes, divisors = ("floor", "trunc"), (1, -1, 3, 300, -math.inf, math.inf, 2.0**40)
        made = [
            torch.div(x, divisor, rounding_mode=mode)
            for mode in modes
            for divisor in (*divisors, y)
        ]
        return [*made, *map(torch.signbit, made)]

    check([Case(run, (x, x.flip(0).abs().sqrt() + 1), rtol=0, atol=0)])


def test_doubles_below_the_least_normal_one():
    """Against C's fmod: that of torch overflows for such quotients where it is vectorized."""
    odd = (1.0, 5e-324, -3.7, 1e-310, 2.0**-1022, 1e308, -1e-320, 3.0)
    pairs = torch.cartesian_prod(*[torch.tensor(odd, dtype=torch.float64)] * 2)
    x, y = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    run = lambda x, y: (torch.fmod(x, y), torch.remainder(x, y), torch.floor_divide(x, y))  # noqa: E731
    with program_of(run, (x, y)) as program:
        fmod, remainder, quotient = (each.tolist() for each in program.forward(x, y))
    assert fmod == [math.fmod(a, b) for a, b in pairs.tolist()]
    assert remainder == [a % b for a, b in pairs.tolist()]
    assert quotient == torch.floor_divide(x, y).tolist()

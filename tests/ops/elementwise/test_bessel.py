"""Bessel and Airy functions against mpmath, which need not be there, and against torch."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.harness import Case, check, program_of

pytestmark = pytest.mark.device

NAMES = (
    "bessel_j0",
    "bessel_j1",
    "bessel_y0",
    "bessel_y1",
    "modified_bessel_k0",
    "modified_bessel_k1",
    "scaled_modified_bessel_k0",
    "scaled_modified_bessel_k1",
    "airy_ai",
)
ODD = (math.inf, -math.inf, math.nan, 0.0, -0.0, -1.0, -3.0, 1e-30, 1.5)
FUNCTIONS = {name: getattr(torch.special, name) for name in NAMES}


def points(dtype):
    """Where the pieces of the functions meet, and around; no roots of the functions."""
    small = torch.logspace(-8, 0, 40, dtype=dtype)
    rest = torch.cat([torch.linspace(1, 9.9, 150, dtype=dtype), torch.logspace(1, 2, 40).to(dtype)])
    edges = torch.tensor([2.0, 2.5, 8.0, 2.0 - 1e-6, 8.0 + 1e-6], dtype=dtype)
    return torch.cat([small, rest, edges, -small, -rest, -edges])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_special_values(dtype):
    x = torch.tensor(ODD, dtype=dtype)
    check([Case(function, (x,), name=name) for name, function in FUNCTIONS.items()])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_against_mpmath(dtype):
    mp = pytest.importorskip("mpmath").mp
    exact = {
        "bessel_j0": lambda x: mp.besselj(0, x),
        "bessel_j1": lambda x: mp.besselj(1, x),
        "bessel_y0": lambda x: mp.bessely(0, x),
        "bessel_y1": lambda x: mp.bessely(1, x),
        "modified_bessel_k0": lambda x: mp.besselk(0, x),
        "modified_bessel_k1": lambda x: mp.besselk(1, x),
        "scaled_modified_bessel_k0": lambda x: mp.exp(x) * mp.besselk(0, x),
        "scaled_modified_bessel_k1": lambda x: mp.exp(x) * mp.besselk(1, x),
        "airy_ai": mp.airyai,
    }
    x = points(dtype)
    with program_of(lambda x: tuple(f(x) for f in FUNCTIONS.values()), (x,)) as program:
        assert program.report()["cpu_nodes"] == 0
        made = program.forward(x)
    unit = torch.finfo(dtype).eps
    for name, values in zip(NAMES, made):
        if name == "airy_ai":
            some = x.abs() < 30  # the phase loses digits
        else:
            some = (x > 0) | ("_j" in name)
        wanted = torch.tensor(
            [float(exact[name](mp.mpf(float(each)))) for each in x[some]], dtype=torch.float64
        )
        have = values[some].double()
        # An oscillation is as exact as its amplitude, and what decays as its exponent.
        scale = wanted.abs().clamp(min=0 if "_k" in name else 0.3)
        scale = scale * (1 + (x[some].double().abs() ** (1.5 if name == "airy_ai" else 1)) / 4)
        normal = wanted.abs() > torch.finfo(dtype).tiny
        error = ((have - wanted).abs() / scale / unit)[normal]
        assert error.max() < 16, (name, float(error.max()), float(x[some][normal][error.argmax()]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_whole_numbers(dtype):
    x = torch.tensor([0, 1, 3, 9, 20]).to(dtype)
    check([Case(function, (x,), name=name) for name, function in FUNCTIONS.items()])

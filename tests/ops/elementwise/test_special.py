"""Less common operators on one element against torch; those with one or two operands are also in
test_pointwise.py."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, aten, check, tensor

pytestmark = pytest.mark.device

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def test_functions_far_from_zero():
    """Ranges that need other formulas than those around 0."""
    wide = torch.cat(
        [
            torch.linspace(-30, 60, 301),
            torch.tensor([1e-20, 1e-3, 1e4, 1e20, 3e38, 1.0, 2.0, -1.0, -7.0]),
        ]
    )
    unit = torch.cat([torch.linspace(-1, 1, 201), torch.tensor([1 - 1e-6, 1e-7 - 1, 1e-30, 1.5])])
    cases = [
        Case(torch.lgamma, (wide,), rtol=2e-5, atol=2e-5),
        Case(torch.erfc, (wide,), rtol=1e-5, atol=1e-30),
    ]
    # torch's own float32 digamma is off by 1e-5 near its poles.
    cases += [
        Case(torch.digamma, (wide[wide != -7.0],), rtol=1e-4, atol=2e-4),
        Case(torch.exp2, (wide,)),
        Case(torch.erfinv, (unit,)),
    ]
    cases += [
        Case(torch.polygamma, (n, tensor(40, low=0.2, high=30)), rtol=2e-5) for n in (0, 1, 2, 4)
    ]
    cases += [
        Case(torch.logaddexp, (wide, wide.flip(0))),
        Case(torch.logaddexp2, (wide, wide.flip(0))),
        Case(torch.hypot, (wide, wide.flip(0))),
    ]
    cases += [
        Case(F.mish, (wide,)),
        Case(F.logsigmoid, (wide * 3,)),
        Case(F.softsign, (wide,)),
        Case(F.tanhshrink, (tensor(30),), atol=1e-6),
    ]
    check(cases)


def test_activations_with_weights():
    x = tensor(2, 4, 5, 3)
    cases = [Case(aten.prelu.default, (x, tensor(n, low=0, high=1))) for n in (1, 4)]
    cases += [
        Case(aten.prelu.default, (tensor(6), tensor(1))),
        Case(
            aten.prelu.default, (tensor(3, 4, dtype=torch.float16), tensor(4, dtype=torch.float16))
        ),
    ]
    cases += [Case(F.glu, (x, dim)) for dim in (1, -3)] + [
        Case(F.glu, (tensor(3, 6, dtype=torch.bfloat16), -1))
    ]
    check(cases)


def test_shifts_and_divisors():
    cases = []
    for dtype in INTS:
        x, n = tensor(5, 7, dtype=dtype, low=-100, high=100), tensor(7, dtype=dtype, low=0, high=6)
        cases += [Case(fn, (x, n)) for fn in (torch.bitwise_left_shift, torch.bitwise_right_shift)]
        cases += [Case(torch.gcd, (x, tensor(5, 1, dtype=dtype, low=-12, high=12)))]
    check(cases)


def test_three_operands():
    cases = []
    for dtype in FLOATS:
        a, b, c = (
            tensor(3, 5, dtype=dtype),
            tensor(5, dtype=dtype, seed=1),
            tensor(3, 1, dtype=dtype, seed=2, low=1, high=3),
        )
        cases += [
            Case(torch.lerp, (a, b, 0.3)),
            Case(torch.lerp, (a, b, 0.8)),
            Case(torch.lerp, (a, b, c)),
        ]
        # The product is rounded to half by torch before it is added.
        loose = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        cases += [
            Case(torch.addcmul, (a, b, c), {"value": 0.5}, **loose),
            Case(torch.addcdiv, (a, b, c), {"value": -2}, **loose),
        ]
    cases += [
        Case(
            torch.addcmul,
            (tensor(3, 5, dtype=dtype), tensor(5, dtype=dtype), tensor(3, 5, dtype=dtype, seed=1)),
            {"value": 3},
        )
        for dtype in (torch.int32, torch.int64)
    ]
    check(cases)


def test_losses_and_closeness():
    x, y = tensor(3, 5), tensor(3, 5, seed=1)
    cases = [
        Case(fn, (x, y), {"reduction": kind})
        for fn in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
        for kind in ("none", "mean", "sum")
    ]
    cases += [
        Case(F.smooth_l1_loss, (x, y), {"beta": 0.3}),
        Case(F.huber_loss, (x, y), {"delta": 2.0}),
        Case(F.smooth_l1_loss, (x, y), {"beta": 0.0}),
    ]
    near = torch.tensor([1.0, 1.0 + 1e-6, 1.1, math.nan, math.inf, -math.inf, 0.0])
    cases += [
        Case(torch.isclose, (near, near[:, None]), {"equal_nan": flag}) for flag in (False, True)
    ]
    cases += [
        Case(torch.isclose, (tensor(5, dtype=torch.int32), tensor(5, dtype=torch.int32, seed=2)))
    ]
    check(cases)


def test_trigonometry_near_and_far_from_zero():
    """Relative precision where the result is small, and arguments of many turns."""
    small = torch.logspace(-30, 0, 61)
    x = torch.cat(
        [
            small,
            -small,
            torch.linspace(-20, 20, 401),
            torch.linspace(-8000, 8000, 301),
            torch.tensor([0.0, -0.0, math.pi, math.inf, -math.inf, math.nan]),
        ]
    )
    cases = [Case(fn, (x,), rtol=2e-6, atol=2e-7) for fn in (torch.sin, torch.cos)]
    cases += [
        Case(torch.sin, (small,), rtol=1e-6, atol=0.0),
        Case(torch.tan, (x[x.abs() < 1.5],), rtol=5e-6, atol=1e-7),
        Case(torch.sinc, (x,)),
    ]
    cases += [
        Case(torch.sin, (tensor(64, dtype=torch.float16),)),
        Case(torch.cos, (tensor(64, dtype=torch.bfloat16),)),
    ]
    check(cases)


def test_quotients_of_large_numbers():
    """A device may take the reciprocal of the largest numbers for 0."""
    big = torch.tensor([3e38, -3e38, 1.7e38, 8.6e37, 4.1e37, 3.9e37, 1.0])
    check(
        [
            Case(torch.div, (big[:, None], big)),
            Case(torch.div, (big, 3e38)),
            Case(torch.div, (torch.ones(3), torch.tensor([math.inf, 2.0, -math.inf]))),
        ]
    )

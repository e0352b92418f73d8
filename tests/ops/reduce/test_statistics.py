"""Indices of extremes, variances, norms and logarithms of sums against torch."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.harness import Case, aten, check, program_of, tensor

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore:.*degrees of freedom")]

INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def distinct(*shape, dtype=torch.float32):
    """Numbers without ties, so that there is one answer."""
    count = math.prod(shape)
    return (
        torch.randperm(count, generator=torch.Generator().manual_seed(count))
        .reshape(shape)
        .to(dtype)
        - count // 2
    )


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_places(name):
    fn = getattr(aten, name).default
    cases = [
        Case(fn, (distinct(3, 5, 7, dtype=dtype), dim, keep))
        for dtype in (torch.float32, torch.int64, torch.int8)
        for dim in (0, 1, -1, None)
        for keep in (False, True)
    ]
    cases += [Case(fn, (tensor(4, 9, dtype=dtype), 1)) for dtype in (*FLOATS, *INTS)]
    cases += [
        Case(
            fn,
            (torch.tensor([[1.0, math.nan, 3.0, math.nan], [-math.inf, -math.inf, 2.0, 2.0]]), d),
        )
        for d in (0, 1, None)
    ]
    cases += [
        Case(fn, (torch.tensor(2.5), 0)),
        Case(fn, (distinct(2, 3, 4, 5).permute(2, 0, 3, 1),)),
        Case(fn, (distinct(1, 1031), 1)),
    ]
    cases += [Case(fn, (distinct(3, 64, 8), 1)), Case(fn, (torch.zeros(0, 3), 1))]
    check(cases)


@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_with_places(name):
    fn = getattr(aten, name).dim
    cases = [
        Case(fn, (distinct(3, 5, 7, dtype=dtype), dim, keep))
        for dtype in (torch.float32, torch.int64, torch.int16)
        for dim in (0, 1, -1)
        for keep in (False, True)
    ]
    cases += [Case(fn, (tensor(5, 3, dtype=dtype), 1)) for dtype in (*FLOATS, *INTS, torch.bool)]
    cases += [
        Case(
            fn,
            (torch.tensor([[1.0, math.nan, 3.0, math.nan], [-math.inf, -math.inf, 2.0, 2.0]]), d),
        )
        for d in (0, 1)
    ]
    cases += [
        Case(fn, (torch.tensor(2.5), 0)),
        Case(aten.aminmax.default, (tensor(3, 5),), {"dim": 1}),
        Case(aten.aminmax.default, (tensor(3, 5),)),
    ]
    cases += [Case(fn, (distinct(64, 8, 12), 1)), Case(fn, (distinct(2, 4096), 1))]
    check(cases)


def test_variance():
    x, far = tensor(3, 5, 7), tensor(4, 1031) + 1000.0
    cases = []
    for fn in (torch.var, torch.std, torch.var_mean, torch.std_mean):
        cases += [
            Case(fn, (x,), {"dim": dim, "correction": c, "keepdim": keep})
            for dim in (0, (1, 2), -1)
            for c in (0, 1, 2)
            for keep in (False, True)
        ]
        cases += [Case(fn, (tensor(5, 64, 3, dtype=dtype),), {"dim": 1}) for dtype in FLOATS]
        # The sums of squares lose digits of 1000 + x in float32.
        cases += [
            Case(fn, (far,), {"dim": 1}, rtol=1e-4),
            Case(fn, (x, False)),
            Case(fn, (x.permute(2, 0, 1), (0, 2), False)),
        ]
        cases += [Case(fn, (torch.ones(3, 1),), {"dim": 1})]
    check(cases)


def test_norms():
    x = tensor(3, 5, 7)
    cases = [
        Case(aten.linalg_vector_norm.default, (x, p, dim, keep))
        for p in (0, 1, 2, 3.5, math.inf, -math.inf, -2)
        for dim, keep in [((1,), False), ((0, 2), True), (None, False)]
    ]
    cases += [
        Case(aten.linalg_vector_norm.default, (tensor(5, 7, dtype=dtype), 2, (1,)))
        for dtype in FLOATS
    ]
    cases += [
        Case(torch.norm, (x, 2, 1)),
        Case(torch.norm, (x, 3)),
        Case(aten.norm.Scalar, (x, 2)),
        Case(aten.norm.ScalarOpt_dim_dtype, (x.half(), 2, [1], True), {"dtype": torch.float32}),
        Case(torch.dist, (x, tensor(5, 7, seed=1), 2)),
    ]
    check(cases)


def test_sums():
    x = tensor(3, 5, 7)
    holes = torch.tensor([[1.0, math.nan, 3.0], [math.inf, -math.inf, 2.0], [-math.inf] * 3])
    cases = [
        Case(torch.logsumexp, (v, dim, keep))
        for v in (x * 30, holes)
        for dim, keep in [(1, False), ((0, 1), True), (-1, True)]
    ]
    cases += [
        Case(torch.logsumexp, (tensor(4, 5, dtype=dtype), 1)) for dtype in (*FLOATS, torch.int32)
    ]
    cases += [
        Case(torch.count_nonzero, (tensor(4, 5, dtype=dtype), dim))
        for dtype in (torch.float32, torch.int32, torch.bool)
        for dim in (1, (0, 1), None)
    ]
    cases += [
        Case(torch.nansum, (holes[:1], 1)),
        Case(torch.nansum, (holes, 0)),
        Case(torch.nansum, (tensor(4, 5, dtype=torch.int32), 1)),
    ]
    check(cases)


def test_dynamic_sizes():
    def run(x):
        return (
            x.argmax(1),
            x.max(0).values,
            x.var(1),
            x.logsumexp(0),
            torch.linalg.vector_norm(x, dim=1),
            x.argmin(),
        )

    with program_of(run, (tensor(11, 13),), dynamic=True) as program:
        for size in [(11, 13), (5, 7), (4, 12), (3, 2)]:
            x = distinct(*size) / 16
            for have, want in zip(program.forward(x), run(x)):
                torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)

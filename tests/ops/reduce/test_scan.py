"""Running sums, products and extremes against torch."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.harness import Case, check, program_of, tensor
from tests.ops.quantized.harness import kernels_of

pytestmark = pytest.mark.device

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@pytest.mark.parametrize("fn", [torch.cumsum, torch.cumprod], ids=["sum", "prod"])
def test_running_sums(fn):
    cases = [Case(fn, (tensor(3, 5, 7, low=0.5, high=1.5), dim)) for dim in (0, 1, 2, -1)]
    cases += [Case(fn, (tensor(3, 9, dtype=dtype), 1)) for dtype in (*FLOATS, *INTS)]
    cases += [
        Case(fn, (tensor(3, 9, dtype=a), 0), {"dtype": b})
        for a, b in [
            (torch.int32, torch.float32),
            (torch.float32, torch.int64),
            (torch.int8, torch.int32),
            (torch.float16, torch.float32),
        ]
    ]
    cases += [
        Case(fn, (torch.tensor(3.0), 0)),
        Case(fn, (torch.zeros(0, 3), 0)),
        Case(fn, (tensor(2, 3, 5, 2, 3, low=0.9, high=1.1).permute(4, 1, 0, 3, 2), 1)),
    ]
    cases += [
        Case(fn, (torch.tensor([1.0, math.nan, 2.0]), 0)),
        Case(fn, (torch.tensor([1.0, math.inf, -1.0, -math.inf]), 0)),
    ]
    check(cases)


def test_long_rows():
    long = tensor(2, 70001, low=-1, high=1)
    # float32 sums of 70000 numbers in another order; torch adds up in float64.
    cases = [
        Case(torch.cumsum, (long, 1), rtol=1e-4, atol=2e-3),
        Case(torch.cumsum, (tensor(70001, dtype=torch.int64), 0)),
    ]
    cases += [
        Case(torch.cumsum, (tensor(3, 1031), 1), rtol=1e-4, atol=1e-4),
        Case(torch.cumsum, (tensor(20001, 3, dtype=torch.int32), 0)),
    ]
    cases += [Case(torch.cummax, (long, 1)), Case(torch.logcumsumexp, (long[:1], 1), rtol=2e-5)]
    check(cases)


@pytest.mark.purevk("float64")
@pytest.mark.parametrize("fn", [torch.cumsum, torch.cumprod], ids=["sum", "prod"])
def test_running_sums_have_the_digits_of_float32(fn):
    """Torch adds up and multiplies in double precision: all strategies, rows and columns."""
    shapes = (((70001,), 0), ((2, 20001), 1), ((130, 999), 1), ((5000, 24), 0), ((64, 4096), 1))
    check(
        [
            Case(fn, (1 + 0.01 * tensor(*sizes, low=-1, high=1), dim), rtol=2e-7, atol=0)
            for sizes, dim in shapes
        ]
    )


def test_running_extremes():
    cases = []
    for fn in (torch.cummax, torch.cummin):
        cases += [Case(fn, (tensor(3, 5, 7), dim)) for dim in (0, 1, 2)]
        cases += [Case(fn, (tensor(3, 9, dtype=dtype), 1)) for dtype in (*FLOATS, *INTS)]
        cases += [
            Case(fn, (torch.tensor([1.0, 2.0, 2.0, math.nan, 3.0, math.nan, 1.0]), 0)),
            Case(fn, (torch.tensor(1.0), 0)),
        ]
        cases += [Case(fn, (tensor(1, 301, dtype=torch.int32), 1))]
    check(cases)


def test_logarithms_of_running_sums():
    cases = [
        Case(torch.logcumsumexp, (tensor(3, 9, dtype=dtype) * 20, dim))
        for dtype in FLOATS
        for dim in (0, 1)
    ]
    cases += [
        Case(
            torch.logcumsumexp, (torch.tensor([-math.inf, -math.inf, 1.0, 2.0, math.inf, 3.0]), 0)
        ),
        Case(torch.logcumsumexp, (torch.tensor([-math.inf, math.nan, 1.0]), 0)),
    ]
    check(cases)


@pytest.mark.parametrize("device", ["gpu", "plain"])
def test_rows_of_subgroups_and_shared_columns(device):
    odd = tensor(600, 64)
    odd[3, 5], odd[:, 7], odd[9, 8], odd[599, 9], odd[:4, 20] = (
        math.nan,
        -math.inf,
        math.inf,
        math.nan,
        -math.inf,
    )
    cases = [
        Case(fn, (odd, dim), atol=1e-4)
        for fn in (torch.cummax, torch.logcumsumexp, torch.cumsum)
        for dim in (0, 1)
    ]
    for x, dim in ((tensor(1031, 96), 0), (tensor(5, 4100), 1), (tensor(70, 1028), 1)):
        cases += [
            Case(torch.cumsum, (x, dim), atol=1e-4),
            Case(torch.cummax, (x, dim)),
            Case(torch.logcumsumexp, (x * 30, dim)),
        ]
    for x, dim in ((tensor(2, 515, 13), 1), (tensor(70, 1027), 1), (tensor(7, 5, 12), 1)):
        cases += [Case(torch.cumsum, ((x * 9).int(), dim)), Case(torch.cummin, (x.half(), dim))]
    with kernels_of(device):
        check(cases)


def test_dynamic_sizes():
    def run(x):
        return x.cumsum(1), x.cumprod(0), x.cummax(1).indices

    with program_of(run, (tensor(11, 301),), dynamic=True) as program:
        for size in [(11, 301), (5, 7), (1, 300), (3, 1)]:
            x = tensor(*size, low=0.5, high=1.5)
            for have, want in zip(program.forward(x), run(x)):
                torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)

"""Functions of mathematics that few models call, counts of values, segments, and products of three,
against torch."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.harness import Case, aten, check, tensor

pytestmark = pytest.mark.device

WIDE = torch.cat(
    [
        torch.linspace(-40, 80, 241),
        torch.tensor([0.0, -0.0, 1e-20, 1e-3, 7.99, 8.01, 3e4, math.inf, -math.inf, math.nan]),
    ]
)


def close(fn, *args, rtol=1e-5, atol=1e-6, **kwargs):
    """A case that is held against torch's float64 result, since torch's own float32 ones are off by
    more."""
    wide = [
        arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
        for arg in args
    ]
    return Case(fn, args, kwargs, expected=fn(*wide, **kwargs).float(), rtol=rtol, atol=atol)


def test_one_operand():
    cases = [
        close(fn, WIDE, rtol=3e-6) for fn in (torch.special.i0e, torch.special.i1e, torch.angle)
    ]
    # torch's own i0 and i1 of infinity are NaN.
    cases += [
        close(fn, WIDE[WIDE.abs() < 1e3], rtol=1e-5) for fn in (torch.special.i0, torch.special.i1)
    ] + [close(torch.special.spherical_bessel_j0, WIDE)]
    # e^(x^2) has a rounding for each of the 128 bits of its exponent.
    cases += [close(torch.special.erfcx, WIDE[WIDE > -9.3], rtol=3e-5)]
    unit = torch.cat(
        [torch.linspace(0, 1, 101), torch.tensor([1e-6, 1 - 1e-6, 1e-7, 1e-30, -0.5, 1.5])]
    )
    cases += [close(torch.special.ndtri, unit, atol=1e-5)]
    cases += [
        Case(torch.frexp, (torch.tensor([1.0, -0.75, 3e38, 1e-38, 0.0, 12.5, math.inf]),)),
        Case(torch.frexp, (tensor(9, dtype=torch.float16),)),
    ]
    cases += [
        Case(torch.round, (tensor(40, low=-2000, high=2000),), {"decimals": n}, rtol=1e-6)
        for n in (-2, 0, 2)
    ]
    check(cases)


def test_two_operands():
    a, x = (
        torch.tensor([0.0, 0.1, 0.7, 1.0, 3.0, 9.9, 10.1, 40.0, 200.0])[:, None],
        torch.tensor([0.0, 0.05, 0.5, 1.1, 4.0, 11.0, 42.0, 190.0, math.inf]),
    )
    cases = [close(fn, a, x, rtol=3e-5) for fn in (torch.special.gammainc, torch.special.gammaincc)]
    large = torch.tensor([201.0, 3000.0, 6e4])[:, None]
    near = large * torch.tensor([0.6, 0.75, 0.98, 0.999, 1.0, 1.001, 1.02, 1.3, 1.5])
    tiny = torch.tensor([1e-3, 0.02, 0.4])[:, None], torch.tensor([1e-3, 0.3, 1.0, 1.2, 5.0])
    cases += [
        close(fn, *both, rtol=2e-5, atol=1e-7)
        for fn in (torch.special.gammainc, torch.special.gammaincc)
        for both in ((large, near), tiny)
    ]
    cases += [
        close(
            torch.special.zeta,
            torch.tensor([1.5, 2.0, 5.0, 60.0, 1.0, 0.5, -1.0, math.inf, math.nan])[:, None],
            torch.tensor(
                [
                    0.5,
                    1.0,
                    7.0,
                    1e-3,
                    1e10,
                    1e30,
                    math.inf,
                    math.nan,
                    0.0,
                    -1.0,
                    -0.5,
                    -2.5,
                    -88.7,
                    -1e6,
                ]
            ),
            rtol=1e-5,
            atol=3e-45,  # two of the least float32 numbers
        )
    ]
    cases += [
        Case(torch.ldexp, (tensor(5), torch.tensor([-3, 0, 1, 10, 20]))),
        Case(torch.lcm, (torch.arange(-6, 6), torch.tensor(4))),
    ]
    points, degrees = (
        torch.tensor([-1.5, -1.0, -0.3, 0.0, 0.6, 1.0, 2.5])[:, None],
        torch.arange(-1, 9).float(),
    )
    names = [f"{shift}chebyshev_polynomial_{kind}" for shift in ("", "shifted_") for kind in "tuvw"]
    names += [
        "hermite_polynomial_h",
        "hermite_polynomial_he",
        "laguerre_polynomial_l",
        "legendre_polynomial_p",
    ]
    cases += [
        close(getattr(torch.special, name), points, degrees, rtol=1e-4, atol=1e-4) for name in names
    ]
    # Powers whose inverse is infinite, and which are below the normal numbers.
    large, whole = torch.tensor([1e10, -5e9, 3e12, 7e37])[:, None], torch.arange(-6.0, 0.0)
    cases.append(close(torch.pow, large, whole, rtol=1e-4, atol=0.0))
    check(cases)


def test_counts_of_values():
    few = torch.randint(0, 4, (3, 7, 5), generator=torch.Generator().manual_seed(0))
    cases = [Case(torch.mode, (few.float(), dim)) for dim in (0, 1, -1)] + [
        Case(torch.mode, (few, 1, True)),
        Case(torch.mode, (torch.tensor(3.0),)),
    ]
    x = tensor(6, 11)
    cases += [
        Case(torch.histc, (x,), {"bins": 7}),
        Case(torch.histc, (x,), {"bins": 5, "min": -1, "max": 2}),
        Case(torch.histc, (torch.ones(4),), {"bins": 3}),
    ]
    check(cases)


def test_segments():
    x, lengths = tensor(7, 3), torch.tensor([2, 0, 4, 1])
    cases = [
        Case(aten.segment_reduce.default, (x, kind), {"lengths": lengths, "unsafe": True})
        for kind in ("sum", "mean", "max", "min", "prod")
    ]
    cases += [
        Case(
            aten.segment_reduce.default,
            (x, kind),
            {"offsets": torch.tensor([0, 2, 2, 7]), "initial": 1.0},
        )
        for kind in ("sum", "mean", "max")
    ]
    cases += [
        Case(
            aten.segment_reduce.default,
            (tensor(2, 5, 3), "sum"),
            {"lengths": torch.tensor([[2, 3], [4, 1]]), "axis": 1},
        )
    ]
    check(cases)


def test_products_of_three():
    cases = [
        Case(
            torch.nn.functional.bilinear,
            (tensor(4, 5), tensor(4, 6), tensor(3, 5, 6), tensor(3)),
            rtol=1e-5,
            atol=1e-5,
        )
    ]
    cases += [
        Case(
            aten._trilinear.default,
            (tensor(2, 3), tensor(3, 4), tensor(2, 4), [2], [0], [1], [1]),
            rtol=1e-5,
            atol=1e-5,
        )
    ]
    check(cases)


def test_rows_that_are_scaled_and_windows_backward():
    table, rows = tensor(6, 4), torch.tensor([[0, 3], [3, 5]])
    cases = [
        Case(
            aten.embedding_renorm.default,
            (table.clone(), rows, norm, 2.0),
            expected=_renormed(table, rows, norm),
        )
        for norm in (0.5, 2.0)
    ]
    x = tensor(2, 3, 6, 7)
    values, where = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    cases += [
        Case(
            aten.max_pool2d_with_indices_backward.default,
            (tensor(*values.shape, seed=1), x, [3, 3], [2, 2], [1, 1], [1, 1], False, where),
        )
    ]
    check(cases)


def _renormed(table, rows, norm):
    made = table.clone()
    for row in rows.unique().tolist():
        if made[row].norm() > norm:
            made[row] *= norm / (made[row].norm() + 1e-7)
    return made


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.bool], ids=str)
def test_extremes_without_the_element_itself(dtype):
    """The number to begin with is one of the type."""
    x = torch.full((4, 3), 1, dtype=dtype)
    source = torch.tensor([[-100, 0, -7], [-90, 0, 5]]).to(dtype)
    index = torch.tensor([[0, 1, 2], [3, 1, 2]])
    check(
        [
            Case(
                torch.scatter_reduce, (x, 0, index, source), {"reduce": kind, "include_self": False}
            )
            for kind in ("amax", "amin")
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_histograms_with_edges(dtype):
    x, weight = tensor(40, 2, dtype=dtype), tensor(40, 2, dtype=dtype, low=0)
    edges, flat = torch.tensor([-2.0, -1, 0.5, 3], dtype=dtype), torch.ones(5, 2, dtype=dtype)
    odd = torch.tensor([-2.0, 3, torch.nan, torch.inf, 0.5, -2.1], dtype=dtype)
    cases = [
        Case(aten.histogram.bin_ct, (x, 7)),
        Case(
            aten.histogram.bin_ct, (x, 5), {"range": (-1.0, 2.0), "weight": weight, "density": True}
        ),
    ]
    cases += [Case(aten.histogram.bins_tensor, (t, edges)) for t in (x, odd)] + [
        Case(aten.histogram.bin_ct, (flat, 4)),
        Case(aten.histogram.bin_ct, (x[:0], 4)),
    ]
    cases += [Case(torch.histogramdd, (x, [4, 3]), {"density": d}) for d in (False, True)] + [
        Case(
            aten._histogramdd_from_bin_tensors.default,
            (x, [edges, edges * 0.5]),
            {"weight": weight[:, 0]},
        )
    ]
    check(
        [
            Case(
                each.fn,
                each.args,
                each.kwargs,
                rtol=2e-5 if dtype is torch.float32 else 1e-12,
                atol=1e-6,
            )
            for each in cases
        ]
    )

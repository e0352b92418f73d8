"""Matmuls, convolutions and reductions of complex numbers, beside torch's."""

import pytest
import torch

from tests.ops.complex.harness import numbers
from tests.ops.harness import Case, check

aten = torch.ops.aten
F = torch.nn.functional
pytestmark = pytest.mark.device
# Sums of up to 30 products of numbers up to 18.
SUM = {"rtol": 1e-5, "atol": 2e-4}


def test_matmuls():
    a, b, batch = numbers(7, 5), numbers(5, 6, seed=1), numbers(3, 7, 5, seed=2)
    square, vector = numbers(3, 5, 6, seed=3), numbers(5, seed=4)
    bias = numbers(6, seed=5)
    check(
        Case(aten.mm.default, (a, b), **SUM),
        Case(aten.bmm.default, (batch, square), **SUM),
        Case(aten.matmul.default, (batch, b), **SUM),
        Case(aten.matmul.default, (vector, b), **SUM),
        Case(aten.matmul.default, (batch, vector), **SUM),
        Case(aten.mv.default, (a, vector), **SUM),
        Case(aten.dot.default, (vector, vector), **SUM),
        Case(aten.vdot.default, (vector, numbers(5, seed=6)), **SUM),
        Case(aten.addmm.default, (bias, a, b), {"beta": 2, "alpha": 1 - 1j}, **SUM),
        Case(aten.baddbmm.default, (numbers(3, 7, 6), batch, square), **SUM),
        Case(aten.addbmm.default, (numbers(7, 6), batch, square), **SUM),
        Case(aten.addmv.default, (numbers(7), a, vector), **SUM),
        Case(aten.addr.default, (numbers(7, 5), numbers(7), vector), **SUM),
        Case(aten.outer.default, (vector, bias), **SUM),
        Case(aten.linear.default, (batch, numbers(6, 5), bias), constants=(1, 2), **SUM),
        Case(aten.mm.default, (a.to(torch.complex128), b.to(torch.complex128))),
        Case(lambda a, b: torch.einsum("bij,jk->bki", a, b), (batch, b), **SUM),
    )


@pytest.mark.slow
def test_convolutions():
    x, image = numbers(2, 4, 11), numbers(1, 4, 6, 5)
    bias = numbers(6, seed=3)
    check(
        Case(F.conv1d, (x, numbers(6, 4, 3), bias), {"padding": 1, "stride": 2}, **SUM),
        Case(F.conv1d, (x, numbers(6, 2, 3)), {"groups": 2, "dilation": 2}, **SUM),
        Case(F.conv2d, (image, numbers(6, 4, 3, 3), bias), constants=(1, 2), **SUM),
        Case(F.conv_transpose1d, (x, numbers(4, 3, 3)), {"stride": 2, "groups": 2}, **SUM),
    )


@pytest.mark.slow
def test_reductions():
    x = numbers(5, 7, 3)
    double = x.to(torch.complex128)
    x[2, 3, 1] = 0
    check(
        Case(aten.sum.default, (x,), **SUM),
        Case(aten.sum.dim_IntList, (x, [1, -1], True), **SUM),
        Case(aten.mean.default, (x,)),
        Case(aten.mean.dim, (x, [0])),
        Case(aten.cumsum.default, (x, 1), **SUM),
        Case(aten.prod.default, (numbers(9),), **SUM),
        Case(aten.prod.dim_int, (x, 1), rtol=1e-5, atol=1e-2),
        Case(aten.prod.dim_int, (double, 0, True)),
        Case(aten.cumprod.default, (x, -1), **SUM),
        Case(aten.any.dim, (x, 0)),
        Case(aten.all.default, (x,)),
        Case(aten.count_nonzero.dim_IntList, (x, [1])),
        Case(aten.linalg_vector_norm.default, (x,), rtol=1e-5),
        Case(aten.linalg_vector_norm.default, (x, 1, [1]), rtol=1e-5),
        Case(aten.var.correction, (x, [1]), {"correction": 1}, rtol=1e-5),
        Case(aten.std.correction, (x, [0, 2]), {"correction": 0}, rtol=1e-5),
        Case(aten.var_mean.correction, (x, [2]), rtol=1e-5, atol=1e-5),
    )


@pytest.mark.parametrize("columns", [5, 6, 192])
def test_sums(columns):
    """Of pairs in memory, and of parts that were computed."""
    x = numbers(2, 3, columns)
    dims = ([2], [0], [0, 2], [-1, 1], [0, 1, 2])
    check(
        *(Case(aten.sum.dim_IntList, (x, dim, keep), **SUM) for dim in dims for keep in (False, True)),
        *(Case(aten.mean.dim, (x, dim), **SUM) for dim in dims),
        Case(aten.sum.default, (x,), rtol=1e-5, atol=2e-3),
        Case(aten.mean.default, (x,), **SUM),
        Case(lambda z: (z.transpose(1, 2).sum(2), z[:, :, ::2].sum(2), (z * z).sum(-1)), (x,), rtol=1e-5, atol=2e-3),
        Case(aten.sum.dim_IntList, (x.to(torch.complex128), [2])),
    )  # fmt: skip

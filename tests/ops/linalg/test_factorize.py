"""Factors of matrices and what follows from them, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.ops.harness import Case, aten, check, host_nodes, program_of, tensor

pytestmark = pytest.mark.device

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def definite(*shape: int) -> torch.Tensor:
    x = tensor(*shape)
    return x @ x.mT + torch.eye(shape[-1])


@pytest.mark.parametrize("shape", [(3, 3), (7, 7), (2, 3, 4, 4), (1, 1), (0, 3, 3)], ids=str)
def test_squares(shape):
    a, b = tensor(*shape) + 3 * torch.eye(shape[-1]), tensor(*shape[:-1], 2, seed=1)
    # The further results of the determinants are torch's own notes, of the transposed matrix.
    cases = [
        Case(fn, (a,), **CLOSE)
        for fn in (
            torch.linalg.det,
            torch.linalg.slogdet,
            aten.linalg_inv_ex.default,
            aten.linalg_lu_factor_ex.default,
        )
    ]
    cases += [
        Case(aten._linalg_solve_ex.default, (a, b), **CLOSE),
        Case(aten._linalg_solve_ex.default, (a, b.mT), {"left": False}, **CLOSE),
    ]
    cases += [Case(aten._linalg_solve_ex.default, (a, b[..., 0]), **CLOSE)]
    lu, pivots, _ = torch.linalg.lu_factor_ex(a)
    cases += [
        Case(aten.linalg_lu_solve.default, (lu, pivots, b), {"adjoint": flag}, **CLOSE)
        for flag in (False, True)
    ]
    cases += [
        Case(
            aten.linalg_solve_triangular.default,
            (a, b),
            {"upper": flag, "unitriangular": unit},
            **CLOSE,
        )
        for flag in (False, True)
        for unit in (False, True)
    ]
    cases += [
        Case(aten.triangular_solve.default, (b, a, True, flag), **CLOSE) for flag in (False, True)
    ]
    check(cases)


@pytest.mark.parametrize("upper", [False, True])
def test_definite_matrices(upper):
    a, b = definite(2, 5, 5), tensor(2, 5, 3)
    factor = torch.linalg.cholesky(a, upper=upper)
    cases = [
        Case(aten.linalg_cholesky_ex.default, (a,), {"upper": upper}, **CLOSE),
        Case(aten.cholesky.default, (a, upper), **CLOSE),
    ]
    cases += [
        Case(aten.cholesky_solve.default, (b, factor, upper), **CLOSE),
        Case(aten.cholesky_inverse.default, (factor, upper), **CLOSE),
    ]
    check(cases)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5), (2, 6, 4)], ids=str)
def test_rectangles(shape):
    a = tensor(*shape)
    packed, factors = torch.geqrf(a)
    lu, pivots, _ = torch.linalg.lu_factor_ex(a)
    cases = [
        Case(aten.geqrf.default, (a,), **CLOSE),
        Case(aten.linalg_lu.default, (a,), **CLOSE),
        Case(aten.lu_unpack.default, (lu, pivots)),
    ]
    cases += [Case(aten.linalg_qr.default, (a, mode), **CLOSE) for mode in ("reduced", "complete")]
    if shape[-2] >= shape[-1]:
        cases += [Case(aten.linalg_householder_product.default, (packed, factors), **CLOSE)]
        other = tensor(*shape[:-1], 2)
        cases += [
            Case(aten.ormqr.default, (packed, factors, other, True, flag), **CLOSE)
            for flag in (False, True)
        ]
        cases += [
            Case(aten.ormqr.default, (packed, factors, other.mT.contiguous(), False, flag), **CLOSE)
            for flag in (False, True)
        ]
    check(cases)


def test_singular_matrices_say_so():
    check(
        [
            Case(
                lambda a: aten.linalg_lu_factor_ex.default(a)[2],
                (torch.tensor([[[1.0, 2], [2, 4]], [[1, 2], [3, 4]]]),),
            )
        ]
    )
    check(
        [
            Case(
                lambda a: aten.linalg_cholesky_ex.default(a)[1],
                (torch.tensor([[[1.0, 2], [2, 1]], [[2, 1], [1, 2]]]),),
            )
        ]
    )


def test_large_matrices_stay_on_the_cpu():
    with program_of(torch.linalg.inv_ex, (definite(40, 40),)) as program:
        assert "above 32 rows" in host_nodes(program)[0]

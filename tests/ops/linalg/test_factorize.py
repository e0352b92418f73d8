"""Factors of matrices and what follows from them, against torch."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

import purevk
from purevk.errors import InputError
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
    cases = [Case(aten.linalg_cholesky_ex.default, (a,), {"upper": upper}, **CLOSE)]
    if hasattr(aten, "cholesky"):  # until torch 2.14
        cases.append(Case(aten.cholesky.default, (a, upper), **CLOSE))
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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_reflections_of_any_size(large, seed):
    """Element for element as LAPACK's, with signs, also where an element on the diagonal is 0."""
    draw = random.Random(seed)
    shapes = ((33, 5), (4, 70), (2, 45, 40), (40, 50), (9000, 3), (1, 90))
    shape = draw.choice(shapes if large else ((32, 32), (5, 4), (3, 7, 3), (2, 9), (1, 1)))
    dtype = draw.choice((torch.float32, torch.float64))
    a = tensor(*shape, dtype=dtype, seed=seed)
    if shape[-2] > 1 and draw.random() < 0.7:
        a[..., 0, 0] = draw.choice((0.0, -0.0))
        a[..., 1:, min(2, shape[-1] - 1)] = 0.0
    a *= draw.choice((1.0, 1e-25, 1e25))
    size, rows, columns = float(a.abs().max()), *shape[-2:]
    close = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    )
    # Columns of R grow with the number of rows.
    scaled = {**close, "atol": close["atol"] * size * rows**0.5}
    packed, factors = torch.geqrf(a)
    mode = "complete" if rows < 100 and seed % 2 else "reduced"
    cases = [
        Case(lambda a: aten.geqrf.default(a)[0].triu(), (a,), **scaled),
        Case(lambda a: aten.geqrf.default(a)[0].tril(-1), (a,), **close),
        Case(lambda a: aten.geqrf.default(a)[1], (a,), **close),
        Case(lambda a: aten.linalg_qr.default(a, mode)[0], (a,), **close),
        Case(lambda a: aten.linalg_qr.default(a, mode)[1], (a,), **scaled),
    ]
    other = tensor(*shape[:-1], 3, dtype=dtype)
    cases += [
        Case(aten.ormqr.default, (packed, factors, other, True, flag), **close)
        for flag in (False, True)
        if rows >= columns
    ]
    check(cases)


def test_sizes_of_qr_that_change():
    """One program for all numbers of rows and columns."""
    rows, columns = torch.export.Dim("rows", max=200), torch.export.Dim("columns", max=90)

    class Factors(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q, r = torch.linalg.qr(a)
            return q, r

    with purevk.compile(Factors(), (tensor(50, 40),), ({0: rows, 1: columns},)) as program:
        assert program.report()["cpu_nodes"] == 0
        for shape in ((50, 40), (200, 3), (7, 90), (90, 90)):
            a = tensor(*shape)
            torch.testing.assert_close(program.forward(a), torch.linalg.qr(a), **CLOSE)


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


class Operation(torch.nn.Module):
    """A function that raises for some matrices."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x):
        if self.name == "solve":
            return torch.linalg.solve(x, torch.ones(x.shape[-1], 1))
        made = getattr(torch.linalg, self.name)(x)
        return made if isinstance(made, torch.Tensor) else tuple(made)


@pytest.mark.parametrize("name, shape", [
    ("cholesky", (3, 4, 4)), ("inv", (3, 3)), ("solve", (2, 5, 5)), ("lu_factor", (3, 3, 3)), ("inv", (2, 40, 40)),
])  # fmt: skip
def test_files_raise_what_torch_raises(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """`.pt2` and `.pvk` files, on the device, for matrices that are singular or not definite by chance."""
    module, draw = Operation(name), random.Random(str((name, shape)))
    torch.export.save(torch.export.export(module, (definite(*shape),)), tmp_path / "m.pt2")
    with purevk.load(tmp_path / "m.pt2") as program:
        program.save(tmp_path / "m.pvk")
        if shape[-1] <= 32:
            assert not host_nodes(program)
    raised = 0
    for suffix in ("pt2", "pvk"):
        with purevk.load(tmp_path / f"m.{suffix}") as program:
            for number in range(8):
                x = definite(*shape)
                matrix = x.reshape(-1, *shape[-2:])[draw.randrange(x[..., 0, 0].numel())]
                row = draw.randrange(shape[-1])
                if number % 2 and name == "cholesky":
                    matrix[row, row] = -draw.random() * 9 - 0.1
                elif number % 2:
                    matrix[row] = matrix[:, row] = 0
                try:
                    expected = module(x)
                except RuntimeError as error:
                    text = re.sub(r" \(Batch element \d+\):", "", str(error))
                    with pytest.raises(InputError) as caught:
                        program(x)
                    assert caught.value.what == text and caught.value.where
                    raised += 1
                else:
                    torch.testing.assert_close(program(x), expected, rtol=1e-3, atol=1e-3)
    assert raised == 8

"""Singular values, eigenvalues of symmetric matrices, pseudo-inverses and ranks, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.ops.harness import Case, aten, check, host_nodes, program_of, tensor

pytestmark = pytest.mark.device


def values(a: torch.Tensor) -> torch.Tensor:
    return aten._linalg_svd.default(a, False, False)[1]


def inverse(a: torch.Tensor, *tolerances: torch.Tensor, hermitian: bool = False) -> torch.Tensor:
    atol, rtol = (*tolerances, None, None)[:2]
    return aten.linalg_pinv.atol_rtol_tensor(a, atol=atol, rtol=rtol, hermitian=hermitian)


@pytest.mark.parametrize(
    "dtype, digits, shapes",
    [(torch.float64, 1e-12, [(4, 4), (2, 5, 3)]), (torch.float32, 1e-5, [(2, 6), (5, 5)])],
    ids=str,
)
def test_small_matrices(dtype, digits, shapes):
    cases = []
    for shape in shapes:
        a = tensor(*shape, dtype=dtype)
        cases += [
            Case(values, (a,)),
            Case(inverse, (a,)),
            Case(inverse, (a, torch.tensor(1.5, dtype=dtype))),
            Case(values, (torch.zeros_like(a),)),
        ]
        cases += [
            Case(values, (a * 1e-25,), atol=digits * 1e-24),
            Case(torch.linalg.matrix_norm, (a, "nuc")),
        ]
        if shape[-1] > 1:
            less = a.clone()
            less[..., -1] = less[..., 0] * 2
            cases += [
                Case(values, (less,)),
                Case(inverse, (less,)),
                Case(torch.linalg.matrix_rank, (less,)),
                Case(inverse, (a, torch.tensor(0.0, dtype=dtype), torch.tensor(0.5, dtype=dtype))),
            ]
        if shape[-1] == shape[-2]:
            both = a + a.mT
            cases += [
                Case(lambda a, side=side: aten._linalg_eigh.default(a, side, False)[0], (a,))
                for side in "LU"
            ]
            cases += [
                Case(torch.linalg.eigvalsh, (both,)),
                Case(inverse, (both,), {"hermitian": True}),
                Case(torch.linalg.matrix_rank, (a,)),
            ]
    swap = torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, -1]], dtype=dtype)
    cases += [Case(torch.linalg.eigvalsh, (swap,)), Case(values, (swap,))]
    for case in cases:
        case.rtol, case.atol = 20 * digits, 50 * digits if case.atol is None else case.atol
    check(cases)


def test_vectors_and_large_matrices_are_on_the_cpu():
    for fn, a in (
        (lambda a: torch.linalg.svd(a)[0].abs(), tensor(3, 3)),
        (torch.linalg.svdvals, tensor(40, 33)),
        (lambda a: torch.linalg.eigh(a + a.mT)[1].abs(), tensor(3, 3)),
    ):
        with program_of(fn, (a,)) as program:
            assert host_nodes(program)
            torch.testing.assert_close(program.forward(a), fn(a), rtol=1e-4, atol=1e-4)

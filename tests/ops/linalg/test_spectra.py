"""Singular values and vectors, eigenvectors of symmetric matrices, pseudo-inverses and ranks, against
torch."""

from __future__ import annotations

import random

import pytest
import torch

import purevk
from tests.ops.harness import Case, aten, check, context, host_nodes, program_of, tensor
from tests.ops.quantized.harness import kernels_of

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


EPSILON = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}


def kinds(*shape: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Matrices with all values apart, of less than full rank, with values that are equal, and of
    zeros."""
    a = tensor(*shape, dtype=dtype)
    less = a.clone()
    less[..., -1] = less[..., 0] * 2
    equal = torch.eye(shape[-2], shape[-1], dtype=dtype).expand(shape).clone()
    equal[..., 0, 0] = -1
    return {
        "apart": a,
        "less": less,
        "equal": equal,
        "zero": torch.zeros_like(a),
        "tiny": a * 1e-25,
    }


def on_device(fn, *args):
    with program_of(fn, args) as program:
        assert not host_nodes(program)
        return program.forward(*args)


def near(have: torch.Tensor, want: torch.Tensor, scale: torch.Tensor | float, count: int) -> None:
    """Equal but for `count` roundings of numbers up to `scale`."""
    limit = float(scale) * EPSILON[want.dtype] * count
    torch.testing.assert_close(have, want, rtol=0, atol=limit)


def orthonormal(vectors: torch.Tensor) -> None:
    """The columns are orthogonal and of length 1."""
    size = vectors.shape[-1]
    eye = torch.eye(size, dtype=vectors.dtype).expand(*vectors.shape[:-2], size, size)
    near(vectors.mT @ vectors, eye, 1, 8 + 4 * size)


@pytest.mark.parametrize("full", [False, True], ids=["reduced", "full"])
@pytest.mark.parametrize(
    "dtype, shapes",
    [(torch.float32, [(2, 7, 4), (3, 8), (1, 5)]), (torch.float64, [(5, 3), (6, 6)])],
    ids=str,
)
def test_singular_vectors(dtype, shapes, full):
    """Signs are free, so the factors are multiplied again."""
    given = [matrix for shape in shapes for matrix in kinds(*shape, dtype=dtype).values()]
    made = on_device(
        lambda *all: [part for a in all for part in torch.linalg.svd(a, full_matrices=full)], *given
    )
    for a, u, s, v in zip(given, made[::3], made[1::3], made[2::3], strict=True):
        for have, want in zip((u, s, v), torch.linalg.svd(a, full_matrices=full), strict=True):
            assert have.shape == want.shape
        want, count = torch.linalg.svdvals(a), s.shape[-1]
        near(s, want, want.max(), 20)
        near((u[..., :count] * s[..., None, :]) @ v[..., :count, :], a, want.max(), 20 + 4 * count)
        orthonormal(u)
        orthonormal(v.mT)


@pytest.mark.parametrize("side", "LU")
@pytest.mark.parametrize("dtype", EPSILON, ids=str)
def test_eigenvectors_of_symmetric_matrices(dtype, side):
    shape = (2, 7, 7) if dtype is torch.float32 else (6, 6)
    swap = torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, -1]], dtype=dtype)
    given = [*kinds(*shape, dtype=dtype).values(), swap, swap[:1, :1] - 2]
    made = on_device(
        lambda *all: [part for a in all for part in torch.linalg.eigh(a, UPLO=side)], *given
    )
    for a, values_of, vectors in zip(given, made[::2], made[1::2], strict=True):
        half = a.tril() if side == "L" else a.triu()
        whole = half + half.mT - torch.diag_embed(a.diagonal(dim1=-2, dim2=-1))
        want = torch.linalg.eigvalsh(whole)
        near(values_of, want, want.abs().max(), 20)
        rebuilt = (vectors * values_of[..., None, :]) @ vectors.mT
        near(rebuilt, whole, want.abs().max(), 60)
        orthonormal(vectors)


def test_what_follows_from_vectors():
    a, b = tensor(6, 4), tensor(6, 2, seed=1)
    forms = [
        Case(lambda a: torch.linalg.cond(a), (a,)),
        Case(lambda a: torch.linalg.matrix_norm(a, 2), (a,)),
        Case(lambda a, b: torch.linalg.pinv(a) @ b, (a, b)),
        Case(lambda a: torch.linalg.pinv(a @ a.mT, hermitian=True, rtol=1e-4), (a,)),
    ]
    for case in forms:
        case.rtol = case.atol = 2e-4  # products with condition numbers of up to 20
    check(forms)


@pytest.mark.slow
def test_matrices_of_many_blocks():
    """Blocks of 16 columns meet in rounds, on the kernels of a GPU; the last block is not full."""
    a = tensor(50, 37)
    both = torch.cat([a, a[:, :13]], 1)
    with kernels_of("gpu"):
        u, s, v = on_device(lambda a: torch.linalg.svd(a, full_matrices=True), a)
        values_of, vectors = on_device(torch.linalg.eigh, both + both.mT)
    want = torch.linalg.svdvals(a)
    near(s, want, want.max(), 40)
    near((u[:, :37] * s) @ v, a, want.max(), 200)
    orthonormal(u)
    orthonormal(v.mT)
    want = torch.linalg.eigvalsh(both + both.mT)
    near(values_of, want, want.abs().max(), 40)
    near((vectors * values_of) @ vectors.mT, both + both.mT, want.abs().max(), 200)


def test_batches_of_any_size():
    """One program for batches of all sizes."""
    batch = torch.export.Dim("batch", max=9)

    class Values(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            u, s, v = torch.linalg.svd(a, full_matrices=False)
            return (u * s[:, None]) @ v

    with purevk.compile(Values(), (tensor(5, 4, 3),), ({0: batch},)) as program:
        assert program.report()["cpu_nodes"] == 0
        for count in (5, 2, 9):
            a = tensor(count, 4, 3, seed=count)
            near(program.forward(a), a, 10, 40)


def _any_shape(draw: random.Random) -> tuple[int, ...]:
    """Of tall or wide matrices, one of whose sides is beyond what an invocation takes."""
    short, long = draw.randrange(1, 12), draw.choice((33, 100, 1030, 5000))
    batch = draw.choice(((), (2,))) if long < 1000 else ()
    return *batch, *draw.choice(((short, long), (long, short)))


@pytest.mark.parametrize("seed", range(4))
def test_tall_and_wide_matrices(seed):
    draw = random.Random(seed)
    shape, dtype = _any_shape(draw), draw.choice((torch.float32, torch.float64))
    given = kinds(*shape, dtype=dtype) if seed % 2 else {"apart": tensor(*shape, dtype=dtype)}
    full, longest = max(shape[-2:]) < 200, max(shape[-2:]) ** 0.5
    made = on_device(
        lambda *all: [
            part
            for a in all
            for part in (*torch.linalg.svd(a, full_matrices=full), torch.linalg.pinv(a))
        ],
        *given.values(),
    )
    for a, u, s, v, inverse in zip(
        given.values(), made[::4], made[1::4], made[2::4], made[3::4], strict=True
    ):
        want, count = torch.linalg.svdvals(a), s.shape[-1]
        near(s, want, want.max(), 20 + longest)
        rebuilt = (u[..., :count] * s[..., None, :]) @ v[..., :count, :]
        near(rebuilt, a, want.max(), 20 + 4 * count + longest)
        orthonormal(u)
        orthonormal(v.mT)
        want = torch.linalg.pinv(a)
        near(inverse, want, want.abs().max(), 400 + 20 * longest)


@pytest.mark.parametrize("size", [33, 50, pytest.param(128, marks=pytest.mark.slow)])
def test_square_matrices_of_many_blocks(size):
    a = tensor(size, 3) @ tensor(3, size, seed=1)
    u, s, v, values_of, vectors, inverse = on_device(
        lambda a: (*torch.linalg.svd(a), *torch.linalg.eigh(a + a.mT), torch.linalg.pinv(a)), a
    )
    want, both = torch.linalg.svdvals(a), a + a.mT
    near(s, want, want.max(), 40)
    near((u * s) @ v, a, want.max(), 200)
    near((vectors * values_of) @ vectors.mT, both, 2 * want.max(), 200)
    for each in (u, v.mT, vectors):
        orthonormal(each)
    near(a @ inverse @ a, a, want.max(), 200)


def test_large_square_matrices_are_on_the_cpu():
    if context().traits.profile.has_fast_shared_memory:
        pytest.skip("a GPU takes them itself")
    a = tensor(130, 129)
    with program_of(torch.linalg.svdvals, (a,)) as program:
        assert host_nodes(program)
        torch.testing.assert_close(program.forward(a), torch.linalg.svdvals(a))

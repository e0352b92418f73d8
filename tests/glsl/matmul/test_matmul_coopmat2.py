"""Cooperative matrices of a workgroup, and the same element by element, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.harness import Out, ceil_div, close, run, workgroup_matrices
from tests.glsl.matmul.harness import dense_matmul

pytestmark = pytest.mark.device

TEMPLATE = "matmul/matmul_coopmat2.comp"
TILE = {"TILE_M": 64, "TILE_N": 64, "TILE_K": 32, "LOCAL": 128}
HALF = {"T_A": "float16_t", "T_B": "float16_t", "T_OUT": "float16_t"}
SIZES = [(128, 64, 64), (72, 136, 32), (97, 64, 160)]


@pytest.fixture(params=[0, 1], ids=["elements", "matrices"])
def coopmat(request):
    if request.param:
        workgroup_matrices()
    return request.param


def operands(m, n, k, transposed, batch=1):
    """A, B and their product; the rows of A, and of B if it is transposed, are followed by 8 NaN."""
    rng = np.random.default_rng(m * 31 + n)
    a = np.full((batch, m, k + 8), np.nan, np.float16)
    a[:, :, :k] = rng.standard_normal((batch, m, k))
    b = rng.standard_normal((batch, k, n)).astype(np.float16)
    want = a[:, :, :k].astype(np.float64) @ b.astype(np.float64)
    if transposed:
        turned = np.full((batch, n, a.shape[2]), np.nan, np.float16)
        turned[:, :, :k] = b.swapaxes(1, 2)
        b = turned
    return a, b, want


def sizes(m, n, k, transposed):
    pitch = k + 8
    b_row, b_rows = (pitch, n) if transposed else (n, k)
    strides = {"lda": pitch, "ldb": b_row, "batch_a": m * pitch, "batch_b": b_rows * b_row}
    return {**dense_matmul(m, n, k, transposed), **strides}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("specialize", [False, True])
def test_agrees(coopmat, size, transposed, specialize):
    m, n, k = size
    a, b, want = operands(m, n, k, transposed, 2)
    bias = np.linspace(-2, 2, n, dtype=np.float32)
    macros = {**HALF, **TILE, "COOPMAT": coopmat, "B_TRANSPOSED": int(transposed), "BIAS": 1}
    (got,) = run(
        TEMPLATE,
        [a, b, bias, Out(want.shape, np.float16)],
        sizes(m, n, k, transposed),
        (ceil_div(n, 64), ceil_div(m, 64), 2),
        macros,
        coopmat=bool(coopmat),
        specialize=specialize,
    )
    close(got, want + bias, np.float16)


@pytest.mark.parametrize("size", [(97, 136, 160), (64, 64, 128)])
def test_split_along_k(coopmat, size):
    m, n, k = size
    a, b, want = operands(m, n, k, False)
    macros = {**HALF, **TILE, "COOPMAT": coopmat, "SPLIT_K": 1, "T_OUT": "float"}
    (parts,) = run(
        TEMPLATE,
        [a, b, Out((3, *want.shape), np.float32)],
        {**sizes(m, n, k, False), "splits": 3, "split_size": 64},
        (ceil_div(n, 64), ceil_div(m, 64), 3),
        macros,
        coopmat=bool(coopmat),
    )
    close(parts.sum(0), want, np.float32)


def test_epilogue_that_places_elements(coopmat):
    """The epilogue gets the position of each element, and may say where it goes."""
    m, n, k = 72, 88, 96
    a, b, want = operands(m, n, k, False)
    rows = np.linspace(-1, 1, m, dtype=np.float32)
    macros = {
        **HALF,
        **TILE,
        "COOPMAT": coopmat,
        "EPILOGUE(v, b, m, n)": "((v) * 2.0 + float((m) * 3 + (n)))",
        "ELEMENT(b, m, n)": "((n) * M + (m))",
        "BIAS": 1,
        "BIAS_OF_ROWS": 1,
    }
    (got,) = run(
        TEMPLATE,
        [a, b, rows, Out((n, m), np.float16)],
        sizes(m, n, k, False),
        (ceil_div(n, 64), ceil_div(m, 64), 1),
        macros,
        coopmat=bool(coopmat),
    )
    position = np.arange(m)[:, None] * 3 + np.arange(n)
    close(got.T, 2 * (want[0] + rows[:, None]) + position, np.float16)

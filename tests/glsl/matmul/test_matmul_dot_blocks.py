"""matmul_dot_blocks.comp against numpy."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.glsl.harness import Out, ceil_div, close, run
from tests.glsl.matmul.harness import right_blocks

pytestmark = pytest.mark.device

TEMPLATE = "matmul/matmul_dot_blocks.comp"
HALVES = {name: "float16_t" for name in ("T_A", "T_B", "T_OUT")}
CASES = [
    # rows and columns of a workgroup, slices, steps, (m, n, k)
    (1, 16, 1, 1, (1, 16, 16)),
    (1, 8, 4, 2, (1, 48, 208)),
    (2, 4, 4, 3, (3, 32, 272)),
    (8, 16, 8, 2, (7, 64, 2000)),
]


def operands(m, n, k):
    """A with NaN behind its rows, B, and their product."""
    rng = np.random.default_rng(m * 7919 + n * 31 + k)
    a = np.full((m, k + 4), np.nan, np.float16)
    a[:, :k] = rng.standard_normal((m, k))
    b = rng.standard_normal((k, n)).astype(np.float16)
    return a, b, a[:, :k].astype(np.float64) @ b.astype(np.float64)


def macros_of(rows, columns, slices, steps):
    return {**HALVES, "ROWS": rows, "COLUMNS": columns, "SLICES": slices, "STEPS": steps}


def params_of(m, n, k, ldo=None):
    return {"M": m, "N": n, "K": k, "lda": k + 4, "ldo": ldo or n}


@pytest.mark.parametrize(("rows", "columns", "slices", "steps", "size"), CASES)
@pytest.mark.parametrize("specialize", [False, True])
def test_agrees(rows, columns, slices, steps, size, specialize):
    m, n, k = size
    a, b, want = operands(m, n, k)
    bias = np.linspace(-2, 2, n, dtype=np.float32)
    (got,) = run(
        TEMPLATE,
        [a, right_blocks(b), bias, Out(want.shape, np.float16)],
        params_of(m, n, k),
        (n // columns, ceil_div(m, rows), 1),
        {**macros_of(rows, columns, slices, steps), "BIAS": 1},
        specialize=specialize,
    )
    close(got, want + bias, np.float16)


def test_infinities_stay_what_they_are():
    """Invocations behind the end of K add nothing."""
    a, b, want = operands(1, 16, 48)
    a[0, 47], b[47] = np.inf, 1
    (got,) = run(
        TEMPLATE,
        [a, right_blocks(b), Out(want.shape, np.float16)],
        params_of(1, 16, 48),
        (1, 1, 1),
        macros_of(1, 16, 2, 2),
    )
    assert np.isposinf(got).all()


@pytest.mark.parametrize(("rows", "columns", "slices", "steps", "size"), CASES[1:])
def test_norm_and_pairs(rows, columns, slices, steps, size):
    m, n, k = size
    pair = n // 2 if n % 32 == 0 else 16
    n = n // (2 * pair) * 2 * pair
    a, b, _ = operands(m, n, k)
    scale = np.linspace(0.5, 1.5, k).astype(np.float16)
    eps = 1e-3
    given = a[:, :k].astype(np.float64)
    normed = given / np.sqrt((given**2).mean(1, keepdims=True) + eps) * scale.astype(np.float64)
    product = (normed @ b.astype(np.float64)).reshape(m, n // (2 * pair), 2, pair)
    want = (product[:, :, 0] * 0.5 + product[:, :, 1]).reshape(m, n // 2)
    (got,) = run(
        TEMPLATE,
        [a, right_blocks(b), Out(want.shape, np.float16), scale],
        {
            **params_of(m, n, k, n // 2),
            "eps_bits": struct.unpack("<i", struct.pack("<f", eps))[0],
            "pair": pair,
        },
        (n // 2 // columns, ceil_div(m, rows), 1),
        {
            **macros_of(rows, columns, slices, steps),
            **{"NORM": 1, "PAIRED": 1, "T_NORM": "float16_t"},
            "EPILOGUE4(v, b, m, n)": "(v * 0.5 + pv_second)",
        },
    )
    close(got, want, np.float16)

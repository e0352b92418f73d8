"""matmul_dot.comp against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.harness import GLSL, Out, ceil_div, close, run, subgroup_size
from tests.glsl.matmul.harness import dense_matmul

pytestmark = pytest.mark.device

TEMPLATE = "matmul/matmul_dot.comp"


def operands(m, n, k, dtype):
    """A and the columns of B, each with NaN behind its rows, and their product."""
    rng = np.random.default_rng(m * 7919 + n * 31 + k)
    pitch = k + 8
    a, b = (np.full((2, rows, pitch), np.nan, dtype) for rows in (m, n))
    a[:, :, :k] = rng.standard_normal((2, m, k))
    b[:, :, :k] = rng.standard_normal((2, n, k))
    want = a[:, :, :k].astype(np.float64) @ b[:, :, :k].astype(np.float64).swapaxes(1, 2)
    params = dense_matmul(m, n, k, True)
    params |= {"lda": pitch, "ldb": pitch, "batch_a": m * pitch, "batch_b": n * pitch}
    return a, b, want, params


def macros_of(rows, lanes, steps, dtype):
    wide = int(dtype is np.float16)
    return {
        **{f"T_{name}": GLSL[dtype] for name in ("A", "B", "OUT")},
        **{f"VEC8_{name}": wide for name in "AB"},
        **{f"VEC4_{name}": 1 - wide for name in "AB"},
        "ROWS": rows,
        "LANES": lanes * subgroup_size(),
        "STEPS": steps,
        "SG": subgroup_size(),
    }


@pytest.mark.parametrize(
    ("rows", "lanes", "steps", "size"),
    [
        (1, 1, 1, (1, 3, 8)),
        (1, 4, 2, (1, 20, 1040)),
        (2, 2, 1, (3, 33, 264)),
        (8, 8, 2, (7, 6, 2000)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("specialize", [False, True])
def test_agrees(rows, lanes, steps, size, dtype, specialize):
    m, n, k = size
    a, b, want, params = operands(m, n, k, dtype)
    bias = np.linspace(-2, 2, n, dtype=np.float32)
    macros = {**macros_of(rows, lanes, steps, dtype), "VEC4_OUT": int(n % 4 == 0), "BIAS": 1}
    (got,) = run(
        TEMPLATE,
        [a, b, bias, Out(want.shape, dtype)],
        params,
        (ceil_div(n, 4), ceil_div(m, rows), 2),
        macros,
        specialize=specialize,
    )
    close(got, want + bias, dtype)


def test_infinities_stay_what_they_are():
    """Invocations behind the end of K add nothing."""
    a, b, want, params = operands(1, 4, 24, np.float16)
    a[:, :, 23], b[:, :, 23] = np.inf, 1
    macros = {**macros_of(1, 4, 2, np.float16), "VEC4_OUT": 1}
    (got,) = run(
        TEMPLATE,
        [a, b, Out(want.shape, np.float16)],
        params,
        (1, 1, 2),
        macros,
    )
    assert (got == np.inf).all()

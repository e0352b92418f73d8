"""matmul_fragments.comp: its arithmetic step by step on any device, and on matrix cores where a device
has them."""

from __future__ import annotations

import numpy as np
import pytest

from purevk.graph.context import traits_of
from tests.glsl.harness import Out, ceil_div, device, run
from tests.glsl.matmul.harness import left_blocks, right_blocks, rows_of

pytestmark = pytest.mark.device


def floats_of(bits: np.ndarray) -> np.ndarray:
    """The numbers of halves, or of bfloat16 by its bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32) if bits.dtype == np.uint16 else bits


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("coopmat", [False, True], ids=["steps", "coopmat"])
@pytest.mark.parametrize("m, n, k, subgroups, fragments, steps, blocks, slices, pair", [
    (16, 16, 16, (1, 1), (1, 1), (1, 1), 0, 1, 0),
    (37, 48, 64, (1, 2), (2, 1), (2, 4), 0, 1, 0),
    (37, 48, 64, (2, 1), (1, 2), (4, 4), 1, 1, 0),
    (37, 48, 96, (1, 1), (2, 3), (1, 2), 0, 4, 0),
    (37, 48, 80, (1, 1), (1, 2), (2, 4), 1, 1, 0),
    (20, 48, 176, (1, 1), (2, 1), (2, 4), 0, 2, 0),
    (20, 96, 64, (1, 1), (1, 4), (1, 1), 0, 1, 48),
    (37, 96, 64, (1, 2), (2, 2), (1, 2), 1, 2, 16),
    pytest.param(100, 96, 128, (2, 2), (3, 3), (1, 4), 1, 1, 0, marks=pytest.mark.slow),
    pytest.param(90, 112, 96, (2, 2), (3, 4), (2, 2), 0, 1, 0, marks=pytest.mark.slow),
    pytest.param(90, 192, 160, (2, 2), (3, 4), (1, 2), 0, 1, 96, marks=pytest.mark.slow),
    pytest.param(50, 128, 192, (1, 2), (1, 2), (4, 4), 0, 4, 32, marks=pytest.mark.slow),
    pytest.param(50, 128, 272, (1, 2), (1, 2), (2, 4), 1, 4, 32, marks=pytest.mark.slow),
])  # fmt: skip
def test_agrees(m, n, k, subgroups, fragments, steps, blocks, slices, pair, coopmat, bfloat16):
    """The product with a bias, and a residual behind it; `pair` joins pairs of columns."""
    rng = np.random.default_rng(n)
    columns = n // 2 if pair else n
    if bfloat16 and coopmat:
        if not traits_of(device()).bfloat16_fragments:
            pytest.skip("the device or the compiler has no fragments of bfloat16")
    a, b = (rng.standard_normal(sizes).astype(np.float32) for sizes in ((m, k), (k, n)))
    dtype = np.uint16 if bfloat16 else np.float16
    a, b = (
        (each.view(np.uint32) >> 16).astype(dtype) if bfloat16 else each.astype(dtype)
        for each in (a, b)
    )
    bias, residual = (rng.standard_normal(sizes).astype(np.float32) for sizes in (n, (m, columns)))
    macros = {
        **dict.fromkeys(("T_A", "T_B", "T_OUT"), "uint16_t" if bfloat16 else "float16_t"),
        "BFLOAT16": int(bfloat16),
        **dict.fromkeys(("VEC8_A", "VEC8_B", "VEC4_OUT", "BIAS"), 1),
        "SUBGROUPS_M": subgroups[0],
        "SUBGROUPS_N": subgroups[1],
        "FRAGMENTS_M": fragments[0],
        "FRAGMENTS_N": fragments[1],
        "DEPTH": steps[0],
        "TURN": steps[1],
        "REST": k // 16 % steps[1],
        "BLOCKS_OUT": blocks,
        "SLICES": slices,
        "PAIRED": int(pair > 0),
        "COOPMAT": int(coopmat),
        "EXTRA_BUFFERS": "READONLY_BUFFER(EXTRA_BINDING, extra0, vec4)",
        "EPILOGUE4(v, b, m, n)": "(max(v, 0.0) + buf_extra0[((m) * N + (n)) >> 2])"
        if not pair
        else "(max(v, 0.0) * pv_second + buf_extra0[((m) * (N / 2) + (n)) >> 2])",
    }
    params = {
        "M": m,
        "N": n,
        "K": k,
        "ldo": columns,
        **({"pair": pair} if pair else {}),
        **dict.fromkeys(("offset_a", "offset_b", "offset_o", "offset_bias"), 0),
    }
    rows_each, columns_each = (16 * subgroups[d] * fragments[d] for d in range(2))
    grid = (ceil_div(n, columns_each), ceil_div(m, rows_each), 1)
    rows = ceil_div(m, 16) * 16 if blocks else m
    buffers = [left_blocks(a), right_blocks(b), bias, Out((rows, columns), dtype), residual]
    (got,) = run("matmul/matmul_fragments.comp", buffers, params, grid, macros, coopmat=coopmat)
    if blocks:
        got = rows_of(got, m, columns)
    a, b, got = (floats_of(each).astype(np.float64) for each in (a, b, got))
    wanted, most = a @ b + bias, np.abs(a) @ np.abs(b)
    if pair:
        first, second = np.moveaxis(wanted.reshape(m, -1, 2, pair), 2, 0).reshape(2, m, columns)
        bound = np.moveaxis(most.reshape(m, -1, 2, pair), 2, 0).reshape(2, m, columns)
        most = np.abs(first) * bound[1] + np.abs(second) * bound[0]
        wanted = np.maximum(first, 0) * second + residual
    else:
        wanted = np.maximum(wanted, 0) + residual
    rounding = 4e-3 if bfloat16 else 1e-3
    assert (np.abs(got - wanted) <= 1e-6 * most + rounding * np.abs(wanted) + 1e-6).all()

"""qdot_coopmat.comp: its arithmetic step by step on any device, and on matrix cores where a device
has them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.harness import Out, bits, ceil_div, run
from tests.glsl.quantized.harness import packed

pytestmark = pytest.mark.device

TEMPLATE = "quantized/qdot_coopmat.comp"


@pytest.mark.parametrize("coopmat", [False, True], ids=["steps", "coopmat"])
@pytest.mark.parametrize("rows, m, n, k, group, segments, subs, norm, pair, high_first", [
    (1, 1, 16, 128, 32, 1, 1, 0, 0, 0),
    (1, 1, 37, 300, 32, 1, 2, 0, 0, 0),
    (1, 1, 40, 512, 32, 2, 2, 1, 0, 1),
    (2, 2, 19, 256, 64, 1, 1, 0, 0, 0),
    pytest.param(1, 1, 96, 544, 32, 1, 4, 1, 24, 0, marks=pytest.mark.slow),
    pytest.param(1, 1, 24, 1100, 160, 3, 1, 0, 0, 1, marks=pytest.mark.slow),
    pytest.param(2, 3, 80, 288, 0, 2, 2, 1, 8, 0, marks=pytest.mark.slow),
    pytest.param(4, 7, 30, 256, 32, 1, 2, 1, 0, 0, marks=pytest.mark.slow),
    pytest.param(8, 5, 48, 384, 32, 2, 1, 0, 24, 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_agrees(rows, m, n, k, group, segments, subs, norm, pair, high_first, coopmat):
    rng = np.random.default_rng(n)
    values, groups = rng.integers(-8, 8, (n, k)), ceil_div(k, group) if group else 1
    scales = rng.uniform(0.1, 1, (n, groups)).astype(np.float32)
    weight = values * np.repeat(scales, group or k, 1)[:, :k].astype(np.float64)
    bias = rng.standard_normal(n).astype(np.float32)
    a = rng.standard_normal((m, k)) * np.exp(2 * rng.standard_normal((m, k)))
    a = a.astype(np.float16)
    factors = rng.uniform(0.5, 2, k).astype(np.float32)
    numbers = a.astype(np.float64)
    if norm:
        numbers /= np.sqrt((numbers**2).mean(1, keepdims=True) + 1e-5)
        numbers = (numbers * factors).astype(np.float16).astype(np.float64)
    held = packed(values, 4, high_first)
    macros = {
        "BITS": 4,
        "HIGH_FIRST": high_first,
        "ROWS": rows,
        "T_A": "float16_t",
        "VEC4_A": int(k % 4 == 0),
        "VEC4_OUT": int(n % 4 == 0),
        "GROUPED": int(group > 0),
        "BIAS": 1,
        "SCALES4": int(group == 32 and groups % 4 == 0),
        "SEGMENTS": segments,
        "SUBS": subs,
        "NORM": norm,
        "PAIRED": int(pair > 0),
        "COOPMAT": int(coopmat),
    }
    params = {
        "M": m,
        "N": n,
        "K": k,
        "lda": k,
        "ldw": held.nbytes // n // 4,
        "ldo": n // 2 if pair else n,
        "groups": groups,
        "group": group or k,
        **dict.fromkeys(("x_scale", "x_zero", "out_inverse", "out_zero", "out_low"), 0),
        **dict.fromkeys(("offset_a", "offset_w", "offset_o"), 0),
    }
    wanted = numbers @ weight.T + bias
    most = np.abs(numbers) @ np.abs(weight).T
    buffers, columns = [a, held, scales, bias], n
    if pair:
        columns = n // 2
        macros["EPILOGUE4(v, b, m, n)"] = "((v) + 2.0 * pv_second)"
        params["pair"] = pair
        first = np.arange(n).reshape(-1, 2, pair)[:, 0].ravel()
        wanted = wanted[:, first] + 2 * wanted[:, first + pair]
        most = most[:, first] + 2 * most[:, first + pair]
    buffers.append(Out((m, columns), np.float32))
    if norm:
        buffers.append(factors)
        params |= {"eps_bits": bits(1e-5), "offset_norm": 0}
    grid = (ceil_div(columns, 16), ceil_div(m, rows), 1)
    (got,) = run(TEMPLATE, buffers, params, grid, macros, coopmat=coopmat)
    # A product of halves is exact. A norm may round to the neighbour.
    assert (np.abs(got - wanted) <= (3e-4 if norm else 1e-6) * most + 1e-5).all()

"""row_blocks.comp and column_blocks.comp: matrices in the order of fragments."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.harness import Out, ceil_div, run
from tests.glsl.matmul.harness import left_blocks, right_blocks

pytestmark = pytest.mark.device


def matrix(rows: int, columns: int) -> np.ndarray:
    """16 bits that differ from element to element."""
    return np.random.default_rng(rows).permutation(rows * columns).astype(np.uint16).reshape(
        rows, columns
    )  # fmt: skip


@pytest.mark.parametrize("rows, terms, ld, offset", [
    (16, 16, 16, 0), (37, 48, 48, 0), (100, 160, 164, 12), (1, 32, 40, 4),
])  # fmt: skip
def test_rows(rows, terms, ld, offset):
    whole = matrix(rows, ld)
    out = Out((ceil_div(rows, 16) * 16 * terms + 8,), np.uint16)
    params = {"M": rows, "K": terms, "ld": ld, "offset_in": offset, "offset_out": 8}
    given = np.concatenate([np.zeros(offset, np.uint16), whole.reshape(-1)])
    grid = (ceil_div(ceil_div(rows, 16) * terms * 2, 64), 1, 1)
    (found,) = run("matmul/row_blocks.comp", [given, out], params=params, grid=grid)
    last = np.repeat(whole[-1:], ceil_div(rows, 16) * 16 - rows, 0)
    wanted = left_blocks(np.concatenate([whole, last])[:, :terms])
    np.testing.assert_array_equal(found[8:], wanted)


@pytest.mark.parametrize("dense_terms", [0, 1])
@pytest.mark.parametrize("terms, columns, pad, offset", [
    (16, 16, 0, 0), (48, 32, 0, 0), (32, 112, 4, 4), (160, 48, 8, 12),
])  # fmt: skip
def test_columns(terms, columns, pad, offset, dense_terms):
    whole = matrix(columns, terms + pad) if dense_terms else matrix(terms, columns + pad)
    out = Out((terms * columns + 8,), np.uint16)
    params = {"K": terms, "N": columns, "ld": whole.shape[1], "offset_in": offset, "offset_out": 8}
    given = np.concatenate([np.zeros(offset, np.uint16), whole.reshape(-1)])
    (found,) = run(
        "matmul/column_blocks.comp",
        [given, out],
        macros={"DENSE_TERMS": dense_terms},
        params=params,
        grid=(ceil_div(terms * columns // 16, 64), 1, 1),
    )
    wanted = whole[:, :terms].T if dense_terms else whole[:, :columns]
    np.testing.assert_array_equal(found[8:], right_blocks(wanted))

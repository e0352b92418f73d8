"""qdequantize.comp: weights in rows, and in the order of fragments."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.harness import Out, ceil_div, run
from tests.glsl.matmul.harness import right_blocks

pytestmark = pytest.mark.device


@pytest.mark.parametrize("high_first", [0, 1])
@pytest.mark.parametrize(
    ("bits", "n", "k", "group"), [(4, 48, 96, 32), (8, 32, 80, 80), (4, 16, 16, 8)]
)
@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("minimum", [0, 1])
def test_agrees(
    bits: int, n: int, k: int, group: int, high_first: int, blocks: int, minimum: int
) -> None:
    rng = np.random.default_rng(n + bits)
    low = -(1 << (bits - 1))
    values = rng.integers(low, -low, (n, k))
    scales = rng.uniform(0.5, 2, (n, k // group)).astype(np.float32)
    if bits == 8:
        stored = values.astype(np.int8).view(np.uint8)
    else:
        pairs = (values + 8).astype(np.uint8).reshape(n, k // 2, 2)
        stored = pairs[..., 1 - high_first] << 4 | pairs[..., high_first]
    padded = np.zeros((n, ceil_div(stored.shape[1], 4) * 4 + 4), np.uint8)
    padded[:, : stored.shape[1]] = stored
    wanted = (values - minimum * low) * np.repeat(scales, group, 1)
    minimums = [rng.uniform(-9, 0, scales.shape).astype(np.float32)] * minimum
    wanted = sum((np.repeat(each, group, 1) for each in minimums), wanted).astype(np.float16)
    (made,) = run(
        "quantized/qdequantize.comp",
        [padded.view(np.uint32), scales, *minimums, Out((n, k), np.float16)],
        {"N": n, "K": k, "ldw": padded.shape[1] // 4, "groups": k // group, "group": group},
        ceil_div(n * k // (16 if blocks else 8), 64),
        {"BITS": bits, "HIGH_FIRST": high_first, "BLOCKS": blocks, "MINIMUM": minimum},
    )
    wanted = right_blocks(wanted.T) if blocks else wanted.reshape(-1)
    np.testing.assert_allclose(
        made.reshape(-1).astype(float), wanted.astype(float), rtol=1e-3, atol=1e-3 * minimum
    )

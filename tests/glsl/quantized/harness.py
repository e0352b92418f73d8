"""Quantized weights as the templates read them."""

from __future__ import annotations

import numpy as np

from tests.glsl.harness import ceil_div


def packed(values: np.ndarray, width: int, high_first: int) -> np.ndarray:
    """[N, K] quantized values as rows of a multiple of four words."""
    n, k = values.shape
    rows = np.zeros((n, ceil_div(k * width, 128) * 128 // width), np.int64)
    rows[:, :k] = values
    if width == 8:
        return rows.astype(np.int8)
    nibbles = (rows + 8).astype(np.uint8)
    even, odd = nibbles[:, ::2], nibbles[:, 1::2]
    return (even << 4 | odd) if high_first else (odd << 4 | even)

"""The Llama of `bench.decode` as tensors of a GGUF file."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bench.decode import TINY, QuantizedLinear, build  # noqa: E402
from bench.peers.llama_cpp import _matrix, _pairs, _tensors  # noqa: E402


def dequantized(blocks: np.ndarray) -> np.ndarray:
    """Q4_0: blocks of a half-precision scale and 16 bytes. The low halves of the bytes are the first
    16 elements."""
    rows = blocks.reshape(len(blocks), -1, 18)
    scales = np.ascontiguousarray(rows[..., :2]).view(np.float16).astype(np.float32)
    values = np.concatenate((rows[..., 2:] & 15, rows[..., 2:] >> 4), -1).astype(np.float32) - 8
    return (values * scales).reshape(len(blocks), -1)


def test_weights_of_4_bits_are_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = QuantizedLinear(96, 10)
    linear.weight.random_(0, 256, generator=generator)
    linear.scales.uniform_(0.01, 0.1, generator=generator)
    linear.half()
    blocks, quantized = _matrix(linear, 0)
    assert quantized and blocks.dtype == np.uint8 and blocks.shape == (10, 3 * 18)
    columns = linear(torch.eye(96))  # the matrix, transposed
    torch.testing.assert_close(torch.from_numpy(dequantized(blocks)), columns.T, rtol=0, atol=0)


def test_rotated_rows_become_neighbours() -> None:
    rows = np.arange(12)[:, None]  # two heads of 6 rows
    assert _pairs(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert _pairs(rows, 0) is rows


@pytest.mark.parametrize("variant", ["fp16", "q4"])
def test_all_weights_are_there(variant: str) -> None:
    found = {name: data for name, data, _ in _tensors(build(TINY, variant), TINY)}
    assert len(found) == 3 + 9 * TINY.layers
    assert found["token_embd.weight"].shape == (TINY.vocab, TINY.width)
    wide = TINY.inner if variant == "fp16" else TINY.inner // 32 * 18
    assert found["blk.1.ffn_down.weight"].shape == (TINY.width, wide)

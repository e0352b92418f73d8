"""Blocks of GGUF, against the dequantizers of the package `gguf`."""

from __future__ import annotations

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

from purevk.pte.blocks import FORMS, has_half_scales, scales, weight  # noqa: E402
from tests.llm.harness import random_blocks  # noqa: E402


def dequantized(blocks: np.ndarray, kind: str) -> np.ndarray:
    """What kernels compute of a weight, in float32 [blocks, elements]."""
    form, packed, parts = FORMS[kind], weight(kind, blocks), scales(kind, blocks)
    if form.bits == 4:
        values = np.stack((packed & 15, packed >> 4), -1).reshape(len(blocks), -1).astype(np.int32)
        values -= 8
    else:
        values = packed.astype(np.int32)
    values += 2 ** (form.bits - 1) if form.has_minimums else 0
    by_element = [np.repeat(each.astype(np.float32), form.group, 1) for each in parts.values()]
    return values * by_element[0] + (by_element[1] if form.has_minimums else 0)


@pytest.mark.parametrize("kind", FORMS)
def test_packed_blocks_are_those_of_the_file(kind: str) -> None:
    blocks = random_blocks(kind, 12)
    want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    have = dequantized(blocks, kind)
    assert have.shape == want.shape
    error = np.abs(have - want).max() / np.abs(want).max()
    x = np.random.default_rng(1).normal(size=(50, want.size // 3)).astype(np.float32)
    products = [x @ each.reshape(3, -1).T for each in (have, want)]
    assert np.linalg.norm(products[0] - products[1]) <= 1e-3 * np.linalg.norm(products[1])
    stored = kind.startswith(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"))
    assert error <= (1e-6 if stored else 1e-3), error
    exact = scales(kind, blocks, exact=True)["scales"].dtype
    assert has_half_scales(kind) == (exact == np.float16)


def test_scales_that_float16_has_not_are_float32() -> None:
    blocks = random_blocks("MXFP4", 2)
    assert scales("MXFP4", blocks)["scales"].dtype == np.float16
    blocks[:, 0] = 90
    assert scales("MXFP4", blocks)["scales"].dtype == np.float32

"""Tiles on matrix cores: they compile if the compiler can, no fragment is indexed at run time, and
they are right on a device that has such cores."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.glsl.harness import Out, ceil_div, close, compile_template, run
from tests.glsl.matmul.harness import dense_matmul

pytestmark = pytest.mark.device

NAMES = ("TILE_M", "TILE_N", "TILE_K", "SUBGROUP_M", "SUBGROUP_N", "SLICES")
TILES = [
    (32, 32, 64, 16, 16, 1),
    (16, 16, 256, 16, 16, 8),
    (64, 64, 64, 16, 32, 1),
    (128, 128, 32, 64, 64, 1),
]
WIDE_TILES = [*TILES, (128, 128, 64, 64, 64, 1)]
WIDE = {"VEC4_A": 0, "VEC4_B": 0, "VEC8_A": 1, "VEC8_B": 1}
HALF = {
    "COOPMAT": 1,
    "T_A": "float16_t",
    "T_B": "float16_t",
    "VEC4_A": 1,
    "VEC4_B": 1,
    "VEC4_OUT": 1,
}
VARIANTS = [{}, {"B_TRANSPOSED": 1}, {"BIAS": 1, "T_OUT": "float16_t"}]
STORE_MATRIX, MULTIPLY = 4458, 4459  # OpCooperativeMatrixStoreKHR, OpCooperativeMatrixMulAddKHR


def count(spirv, wanted):
    words, at, found = struct.unpack(f"<{len(spirv) // 4}I", spirv), 5, 0
    while at < len(words):
        found += words[at] & 0xFFFF == wanted
        at += words[at] >> 16
    return found


@pytest.mark.parametrize("template", ["matmul/matmul_tiled.comp", "conv/conv2d_tiled.comp"])
@pytest.mark.parametrize("tile", WIDE_TILES, ids=str)
@pytest.mark.parametrize("macros", [*VARIANTS, {"SPLIT_K": 1}, WIDE], ids=str)
def test_loops_over_fragments_are_gone(template, tile, macros):
    """A loop that is left would index fragments at run time, which puts them in memory: ten times
    slower."""
    _, _, k, sub_m, sub_n, slices = tile
    macros = {**HALF, **dict(zip(NAMES, tile)), **macros}
    spirv = compile_template(template, macros, coopmat=True)
    fragments = (sub_m // 16) * (sub_n // 16)
    assert count(spirv, STORE_MATRIX) == fragments
    assert count(spirv, MULTIPLY) == fragments * (k // slices // 16)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("macros", VARIANTS, ids=str)
@pytest.mark.parametrize("size", [(128, 128, 64), (40, 72, 24), (97, 131, 137)])
def test_agrees(tile, macros, size):
    m, n, k = size
    rng = np.random.default_rng(m)
    a, b = (
        rng.standard_normal((2, m, k)).astype(np.float16),
        rng.standard_normal((2, k, n)).astype(np.float16),
    )
    bias = rng.standard_normal(n).astype(np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64) + bias * macros.get("BIAS", 0)
    turned = macros.get("B_TRANSPOSED", 0)
    vectors = {
        "VEC4_A": int(k % 4 == 0),
        "VEC4_B": int((k if turned else n) % 4 == 0),
        "VEC4_OUT": int(n % 4 == 0),
    }
    dtype = np.float16 if "T_OUT" in macros else np.float32
    held_b = np.ascontiguousarray(b.swapaxes(1, 2)) if turned else b
    inputs = [a, held_b, bias] if macros.get("BIAS") else [a, held_b]
    (got,) = run(
        "matmul/matmul_tiled.comp",
        [*inputs, Out(want.shape, dtype)],
        dense_matmul(m, n, k, bool(turned)),
        (ceil_div(n, tile[1]), ceil_div(m, tile[0]), 2),
        {**HALF, **dict(zip(NAMES, tile)), **macros, **vectors},
        coopmat=True,
    )
    close(got, want, dtype)


@pytest.mark.parametrize("tile", WIDE_TILES, ids=str)
@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("size", [(128, 128, 64), (40, 72, 24), (97, 136, 264)])
def test_16_bytes_at_a_time_with_a_residual(tile, turned, size):
    """What the epilogue reads is read before the results are there."""
    m, n, k = size
    rng = np.random.default_rng(m + turned)
    a = rng.standard_normal((2, m, k)).astype(np.float16)
    b = rng.standard_normal((2, k, n)).astype(np.float16)
    residual = rng.standard_normal((2, m, n)).astype(np.float16)
    bias = rng.standard_normal(n).astype(np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64) + bias + residual
    epilogue = {
        "EXTRAS": "Extras",
        "EXTRAS_WORDS": 2,
        "EXTRA_BUFFERS": "READONLY_BUFFER(EXTRA_BINDING, residual, f16vec4) struct Extras { f16vec4 x; };",
        "READ_EXTRAS(b, m, n)": "Extras(buf_residual[((b * M + m) * N + n) >> 2])",
        "USE_EXTRAS(v, e)": "(v + vec4(e.x))",
        "EPILOGUE4(v, b, m, n)": "(v + vec4(buf_residual[((b * M + m) * N + n) >> 2]))",
    }
    held_b = np.ascontiguousarray(b.swapaxes(1, 2)) if turned else b
    (got,) = run(
        "matmul/matmul_tiled.comp",
        [a, held_b, bias, Out(want.shape, np.float16), residual],
        dense_matmul(m, n, k, bool(turned)),
        (ceil_div(n, tile[1]), ceil_div(m, tile[0]), 2),
        {
            **HALF,
            **dict(zip(NAMES, tile)),
            **WIDE,
            "B_TRANSPOSED": turned,
            "BIAS": 1,
            "T_OUT": "float16_t",
            **epilogue,
        },
        coopmat=True,
    )
    close(got, want, np.float16)

"""The matmul templates against numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.glsl.harness import GLSL, Out, Texel, ceil_div, close, compile_template, run
from tests.glsl.matmul.harness import dense_matmul, register_grid, register_tile, tile_macros

pytestmark = pytest.mark.device

SIZES = [(1, 1, 1), (13, 29, 17), (37, 36, 20), (64, 64, 64), (67, 131, 23)]
REGISTERS = [{}, {"LANES_M": 1, "TM": 3, "TN4": 3}, {"TM": 5, "TN4": 2, "WY": 1}, {"SG": 1}]
SINE = 13  # in GLSL.std.450
TILES = [(64, 64, 16, 4, 4), (32, 32, 32, 4, 4), (32, 64, 16, 4, 8), (128, 64, 8, 8, 8)]
LARGEST = (128, 256, 16, 8, 16)
SLICED = [(32, 32, 64, 4, 4, 2), (16, 32, 64, 4, 4, 4), (32, 16, 64, 4, 4, 8)]


def operands(m, n, k, batch, dtype, transposed):
    rng = np.random.default_rng(m * 7919 + n * 31 + k)
    a = rng.standard_normal((batch, m, k)).astype(dtype)
    b = rng.standard_normal((batch, k, n)).astype(dtype)
    bias = rng.standard_normal(n).astype(np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64)
    return a, (np.ascontiguousarray(b.swapaxes(1, 2)) if transposed else b), bias, want


def padded(rows: np.ndarray, pitch: int, offset: int) -> np.ndarray:
    """The 2-D array with rows `pitch` elements apart, from element `offset` on; NaN between."""
    out = np.full(offset + rows.shape[0] * pitch, np.nan, rows.dtype)
    out[offset:].reshape(rows.shape[0], pitch)[:, : rows.shape[1]] = rows
    return out


def common(m, n, k, dtype, transposed, bias=True):
    """Macros and parameters of dense operands."""
    macros = {
        "T_A": GLSL[dtype],
        "T_B": GLSL[dtype],
        "T_OUT": GLSL[dtype],
        "B_TRANSPOSED": int(transposed),
        "VEC4_A": int(k % 4 == 0),
        "VEC4_B": int((k if transposed else n) % 4 == 0),
        "VEC4_OUT": int(n % 4 == 0),
        "BIAS": int(bias),
    }
    return macros, dense_matmul(m, n, k, transposed)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tile", REGISTERS, ids=str)
def test_registers(size, transposed, tile):
    m, n, k = size
    a, b, bias, want = operands(m, n, k, 2, np.float32, transposed)
    macros, params = common(m, n, k, np.float32, transposed)
    macros.update(register_tile(tile))
    buffers = [a, b, bias, Out(want.shape, np.float32)]
    (got,) = run("matmul/matmul.comp", buffers, params, register_grid(macros, m, n, 2), macros)
    close(got, want + bias, np.float32)


@pytest.mark.parametrize(
    ("template", "tile"),
    [
        ("matmul/matmul.comp", {"TM": 16, "TN4": 2}),
        ("matmul/matmul.comp", {"TM": 8, "TN4": 2, "LANES_M": 1}),
        ("matmul/matmul.comp", {"TM": 3, "TN4": 6, "LANES_M": 1}),
        ("conv/conv2d_winograd.comp", {"TM": 16, "TN4": 1}),
    ],
    ids=str,
)
def test_an_epilogue_stands_few_times(template, tile):
    """For each vector of a tile it stood once: a kernel with a long one took seconds to compile."""
    macros = {f"VEC4_{name}": 1 for name in ("A", "B", "OUT")}
    spirv = compile_template(template, {**macros, **tile, "EPILOGUE4(v, b, m, n)": "sin(v)"})
    words, at, count = np.frombuffer(spirv, np.uint32), 5, 0
    while at < len(words):
        count += words[at] & 0xFFFF == 12 and words[at + 4] == SINE  # OpExtInst
        at += words[at] >> 16
    assert 0 < count <= 8


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("tile", "size"),
    [*itertools.product(TILES + SLICED, SIZES), (LARGEST, (300, 131, 23))],
    ids=str,
)
def test_shared_tiles(size, transposed, tile):
    m, n, k = size
    a, b, bias, want = operands(m, n, k, 2, np.float32, transposed)
    macros, params = common(m, n, k, np.float32, transposed)
    macros.update(tile_macros(tile))
    grid = (ceil_div(n, tile[1]), ceil_div(m, tile[0]), 2)
    buffers = [a, b, bias, Out(want.shape, np.float32)]
    (got,) = run("matmul/matmul_tiled.comp", buffers, params, grid, macros)
    close(got, want + bias, np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "share",
    [
        {"ROWS": 1},
        {"ROWS": 3},
        {"ROWS": 6, "CHUNK": 2, "SLICES": 32},
        {"ROWS": 16, "SLICES": 8, "DEPTH": 4},
    ],
    ids=str,
)
def test_few_rows(size, transposed, share):
    m, n, k = size
    a, b, bias, want = operands(m, n, k, 2, np.float32, transposed)
    macros, params = common(m, n, k, np.float32, transposed)
    grid = (ceil_div(n, 4 if transposed else 32), ceil_div(m, share["ROWS"]), 2)
    buffers = [a, b, bias, Out(want.shape, np.float32)]
    (got,) = run("matmul/matmul_vec.comp", buffers, params, grid, {**macros, **share})
    close(got, want + bias, np.float32)


@pytest.mark.parametrize(
    "template", ["matmul/matmul.comp", "matmul/matmul_tiled.comp", "matmul/matmul_vec.comp"]
)
@pytest.mark.parametrize("size", [(13, 29, 17), (24, 40, 32)])
def test_half(template, size):
    m, n, k = size
    a, b, bias, want = operands(m, n, k, 1, np.float16, False)
    macros, params = common(m, n, k, np.float16, False)
    grids = {
        "matmul/matmul_tiled.comp": (ceil_div(n, 64), ceil_div(m, 64), 1),
        "matmul/matmul_vec.comp": (ceil_div(n, 32), m, 1),
    }
    if template == "matmul/matmul.comp":
        macros.update(register_tile({}))
        grids[template] = register_grid(macros, m, n, 1)
    buffers = [a, b, bias, Out(want.shape, np.float16)]
    (got,) = run(template, buffers, params, grids[template], macros)
    close(got, want + bias, np.float16)


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("size", [(13, 29, 67), (36, 44, 100)])
def test_split_along_k(size, splits):
    m, n, k = size
    a, b, bias, want = operands(m, n, k, 2, np.float32, False)
    macros, params = common(m, n, k, np.float32, False, bias=False)
    part = ceil_div(ceil_div(k, splits), 16) * 16
    params |= {"splits": splits, "split_size": part}
    macros["SPLIT_K"] = 1
    grid = (ceil_div(n, 64), ceil_div(m, 64), 2 * splits)
    buffers = [a, b, Out((2, splits, m, n), np.float32)]
    (parts,) = run("matmul/matmul_tiled.comp", buffers, params, grid, macros)
    close(parts.sum(1), want, np.float32)
    vectors = {"VEC4_A": int(n % 4 == 0), "VEC4_OUT": int(n % 4 == 0), "BIAS": 1}
    sums = {
        "M": m,
        "N": n,
        "splits": splits,
        "ldo": n,
        "batch_o": m * n,
        "inner_batches": 1000,
    }
    grid = (ceil_div(m * ceil_div(n, 4), 64), 1, 2)
    buffers = [parts, bias, Out(want.shape, np.float32)]
    (got,) = run("matmul/matmul_reduce.comp", buffers, sums, grid, vectors)
    close(got, want + bias, np.float32)


@pytest.mark.parametrize("template", ["matmul/matmul.comp", "matmul/matmul_tiled.comp"])
@pytest.mark.parametrize("vectors", [False, True])
def test_strides_offsets_and_broadcast(template, vectors):
    """A [2, 3, m, k] with padded rows, one B for each of the 3, whatever the outer batch."""
    m, n, k = (11, 20, 24) if vectors else (11, 19, 23)
    rng = np.random.default_rng(5)
    a, b = (
        rng.standard_normal((2, 3, m, k)).astype(np.float32),
        rng.standard_normal((3, k, n)).astype(np.float32),
    )
    lda, ldb = k + 4, n + 8
    held_a, held_b = padded(a.reshape(-1, k), lda, 8), padded(b.reshape(-1, n), ldb, 12)
    macros = {"VEC4_A": int(vectors), "VEC4_B": int(vectors), "VEC4_OUT": int(vectors)}
    params = {
        "M": m,
        "N": n,
        "K": k,
        "lda": lda,
        "ldb": ldb,
        "ldo": n,
        "batch_a": m * lda,
        "batch_b": k * ldb,
        "batch_o": m * n,
        "inner_batches": 3,
        "outer_a": 3 * m * lda,
        "outer_b": 0,
        "outer_o": 3 * m * n,
        "offset_a": 8,
        "offset_b": 12,
        "offset_o": 16,
    }
    grid = (1, 1, 6)
    if template == "matmul/matmul.comp":
        macros.update(register_tile({}))
        grid = register_grid(macros, m, n, 6)
    buffers = [held_a, held_b, Out((2, 3, m, n), np.float32, 16)]
    (got,) = run(template, buffers, params, grid, macros)
    close(got, a.astype(np.float64) @ b.astype(np.float64), np.float32)


@pytest.mark.parametrize(
    "template", ["matmul/matmul.comp", "matmul/matmul_tiled.comp", "matmul/matmul_vec.comp"]
)
@pytest.mark.parametrize("n", [28, 31])
def test_epilogue(template, n):
    """What is fused sees the bias already added, and the indices of the element."""
    m, k, batch = 9, 12, 2
    a, b, bias, want = operands(m, n, k, batch, np.float32, False)
    rest = np.random.default_rng(1).standard_normal((batch, m, n)).astype(np.float32)
    macros, params = common(m, n, k, np.float32, False)
    macros["EXTRA_BUFFERS"] = "READONLY_BUFFER(EXTRA_BINDING, e0, float)"
    macros["EPILOGUE(v, b, m, n)"] = (
        f"(max(v, 0.0) + buf_e0[((b) * {m} + (m)) * {n} + (n)] * float(n))"
    )
    grids = {
        "matmul/matmul_tiled.comp": (1, 1, batch),
        "matmul/matmul_vec.comp": (ceil_div(n, 32), m, batch),
    }
    if template == "matmul/matmul.comp":
        macros.update(register_tile({"LANES_M": 1, "TM": 2}))
        grids[template] = register_grid(macros, m, n, batch)
    buffers = [a, b, bias, Out(want.shape, np.float32), rest]
    (got,) = run(template, buffers, params, grids[template], macros)
    close(got, np.maximum(want + bias, 0) + rest * np.arange(n), np.float32)


def test_rows_beyond_k_do_not_leak():
    """Infinities beside an operand stay out of the sums."""
    m, n, k = 5, 6, 7
    a, b, _, want = operands(m, n, k, 1, np.float32, False)
    held_a = np.full((m, k + 1), np.inf, np.float32)
    held_a[:, :k] = a
    held_b = np.full((k + 4, n), np.inf, np.float32)
    held_b[:k] = b
    macros, params = common(m, n, k, np.float32, False, bias=False)
    params["lda"] = k + 1
    macros.update(register_tile({}))
    buffers = [held_a, held_b, Out(want.shape, np.float32)]
    (got,) = run("matmul/matmul.comp", buffers, params, register_grid(macros, m, n, 1), macros)
    close(got, want, np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("template", ["matmul/matmul.comp", "matmul/matmul_vec.comp"])
@pytest.mark.parametrize("size", [(13, 29, 17), (20, 36, 24)])
@pytest.mark.parametrize("transposed", [False, True])
def test_texel_buffers(template, size, transposed, dtype):
    m, n, k = size
    a, b, bias, want = operands(m, n, k, 1, dtype, transposed)
    macros, params = common(m, n, k, dtype, transposed)
    macros.update(TEXEL_A=1, TEXEL_B=1, TEXEL_BIAS=1)
    grid = (ceil_div(n, 4 if transposed else 32), m, 1)
    if template == "matmul/matmul.comp":
        macros.update(register_tile({"TM": 6}))
        grid = register_grid(macros, m, n, 1)
    width = "16f" if dtype is np.float16 else "32f"
    wide = {name: "rgba" if macros[name] else "r" for name in ("VEC4_A", "VEC4_B", "VEC4_OUT")}
    buffers = [
        Texel(a, wide["VEC4_A"] + width),
        Texel(b, wide["VEC4_B"] + width),
        Texel(bias, wide["VEC4_OUT"] + "32f"),
        Out(want.shape, dtype),
    ]
    (got,) = run(template, buffers, params, grid, macros)
    close(got, want + bias, dtype)

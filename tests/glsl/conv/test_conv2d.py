"""The convolution templates against torch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.conv.harness import problem
from tests.glsl.harness import GLSL, SENTINEL, Out, Texel, ceil_div, close, run
from tests.glsl.matmul.harness import register_grid, register_tile, tile_macros

pytestmark = pytest.mark.device


# batch, channels, height, width, channels out, (kh, kw), (stride), (padding), (dilation), groups
CASES = [
    (1, 3, 11, 13, 7, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (2, 5, 9, 7, 11, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    (1, 8, 10, 9, 12, (3, 3), (1, 1), (2, 2), (2, 2), 1),
    (2, 6, 7, 7, 9, (1, 1), (1, 1), (0, 0), (1, 1), 3),
    (1, 8, 7, 9, 16, (5, 3), (3, 2), (2, 1), (1, 1), 2),
    (1, 4, 23, 5, 8, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    (2, 12, 1, 31, 20, (1, 5), (1, 2), (0, 4), (1, 3), 1),
]
DEPTHWISE = [
    (2, 8, 7, 9, (3, 3), (1, 1), (1, 1), (1, 1)),
    (1, 7, 9, 11, (3, 3), (2, 2), (1, 1), (1, 1)),
    (2, 12, 12, 11, (5, 5), (1, 2), (4, 4), (2, 2)),
    (1, 4, 1, 17, (1, 3), (1, 1), (0, 1), (1, 1)),
]


def window(kernel, stride, padding, dilation):
    """The window, by the names of the parameters."""
    return {
        **dict(zip(("KH", "KW"), kernel)),
        **dict(zip(("stride_y", "stride_x"), stride)),
        **dict(zip(("pad_y", "pad_x"), padding)),
        **dict(zip(("dilation_y", "dilation_x"), dilation)),
    }


def common(case, shape, dtype=np.float32):
    batch, channels, height, width, out_channels, kernel, stride, padding, dilation, groups = case
    inner, outer = channels // groups, out_channels // groups
    params = {
        "batches": batch,
        "H": height,
        "W": width,
        "IC": inner,
        "OH": shape[1],
        "OW": shape[2],
        "OC": outer,
        "pixel_a": channels,
        "pixel_o": out_channels,
        "ldb": out_channels,
        **window(kernel, stride, padding, dilation),
    }
    macros = {"T_A": GLSL[dtype], "T_B": GLSL[dtype], "T_OUT": GLSL[dtype], "BIAS": 1}
    macros.update(
        VEC4_A=int(inner % 4 == 0), VEC4_B=int(outer % 4 == 0), VEC4_OUT=int(outer % 4 == 0)
    )
    return macros, params


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tile", [{}, {"LANES_M": 1, "TM": 2, "TN4": 2}, {"SG": 1}], ids=str)
@pytest.mark.parametrize("special", [False, True])
def test_registers(case, tile, special):
    x, w, bias, want = problem(*case)
    macros, params = common(case, want.shape)
    macros.update(register_tile(tile))
    specialize = window(*case[5:9]) if special else ()
    grid = register_grid(macros, int(np.prod(want.shape[:3])), params["OC"], case[-1])
    buffers = [x, w, bias, Out(want.shape, np.float32)]
    (got,) = run("conv/conv2d.comp", buffers, params, grid, macros, specialize=specialize)
    close(got, want, np.float32)


@pytest.mark.parametrize("tile", [{}, {"LANES_M": 1, "TM": 2, "TN4": 2}, {"SG": 1}], ids=str)
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("wide", [False, True])
def test_steps_of_few_terms(tile, channels, wide):
    """Pixels of few channels, one behind the other or 4 elements each, of which the rest is NaN."""
    case = (2, channels, 9, 7, 20, (3, 5), (1, 2), (1, 2), (1, 1), 1)
    x, w, bias, want = problem(*case)
    macros, params = common(case, want.shape)
    macros.update(register_tile(tile), TERMS=channels, VEC4_A=int(wide))
    if wide:
        x = np.pad(x, ((0, 0), (0, 0), (0, 0), (0, 4 - channels)), constant_values=np.nan)
        params["pixel_a"] = 4
    grid = register_grid(macros, int(np.prod(want.shape[:3])), params["OC"], 1)
    buffers = [x, w, bias, Out(want.shape, np.float32)]
    special = ("IC", *window(*case[5:9]))
    (got,) = run("conv/conv2d.comp", buffers, params, grid, macros, specialize=special)
    close(got, want, np.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tile", [(64, 64, 16, 4, 4), (32, 32, 64, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_shared_tiles(case, tile, turned):
    x, w, bias, want = problem(*case)
    macros, params = common(case, want.shape)
    macros.update(tile_macros(tile))
    if turned:
        w = np.ascontiguousarray(w.transpose(3, 0, 1, 2))
        params["ldb"] = int(np.prod(w.shape[1:]))
        macros.update(B_TRANSPOSED=1, VEC4_B=macros["VEC4_A"])
    grid = (
        ceil_div(params["OC"], tile[1]),
        ceil_div(int(np.prod(want.shape[:3])), tile[0]),
        case[-1],
    )
    buffers = [x, w, bias, Out(want.shape, np.float32)]
    (got,) = run("conv/conv2d_tiled.comp", buffers, params, grid, macros)
    close(got, want, np.float32)


@pytest.mark.parametrize("case", [case for case in CASES if case[-1] == 1], ids=str)
def test_split_along_k(case):
    x, w, bias, want = problem(*case)
    macros, params = common(case, want.shape)
    rows, columns, splits = int(np.prod(want.shape[:3])), want.shape[3], 3
    depth = params["KH"] * params["KW"] * ceil_div(params["IC"], 4) * 4
    part = ceil_div(ceil_div(depth, splits), 16) * 16
    params |= {"splits": splits, "split_size": part}
    macros.update(BIAS=0, SPLIT_K=1)
    grid = (ceil_div(columns, 64), ceil_div(rows, 64), splits)
    buffers = [x, w, Out((splits, rows, columns), np.float32)]
    (parts,) = run("conv/conv2d_tiled.comp", buffers, params, grid, macros)
    vectors = {"VEC4_A": int(columns % 4 == 0), "VEC4_OUT": int(columns % 4 == 0), "BIAS": 1}
    sums = {"M": rows, "N": columns, "splits": splits, "ldo": columns, "inner_batches": 1}
    grid = (ceil_div(rows * ceil_div(columns, 4), 64), 1, 1)
    buffers = [parts, bias, Out(want.shape, np.float32)]
    (got,) = run("matmul/matmul_reduce.comp", buffers, sums, grid, vectors)
    close(got, want, np.float32)


@pytest.mark.parametrize("template", ["conv/conv2d.comp", "conv/conv2d_tiled.comp"])
def test_half(template):
    case = CASES[2]
    x, w, bias, want = problem(*case, dtype=np.float16)
    macros, params = common(case, want.shape, np.float16)
    grid = (1, ceil_div(int(np.prod(want.shape[:3])), 64), 1)
    if template == "conv/conv2d.comp":
        macros.update(register_tile({}))
        grid = register_grid(macros, int(np.prod(want.shape[:3])), params["OC"], 1)
    buffers = [x, w, bias, Out(want.shape, np.float16)]
    (got,) = run(template, buffers, params, grid, macros)
    close(got, want, np.float16)


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("tile", [(64, 64, 64, 16, 32, 1), (32, 32, 128, 16, 16, 4)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_16_bytes_at_a_time(turned, tile, groups):
    """On matrix cores."""
    case = (2, 48, 9, 11, 80, (3, 3), (2, 1), (1, 1), (1, 2), groups)
    x, w, bias, want = problem(*case, dtype=np.float16)
    macros, params = common(case, want.shape, np.float16)
    names = ("TILE_M", "TILE_N", "TILE_K", "SUBGROUP_M", "SUBGROUP_N", "SLICES")
    macros.update(COOPMAT=1, VEC4_A=0, VEC4_B=0, VEC8_A=1, VEC8_B=1, **dict(zip(names, tile)))
    if turned:
        w = np.ascontiguousarray(w.transpose(3, 0, 1, 2))
        params["ldb"] = int(np.prod(w.shape[1:]))
        macros["B_TRANSPOSED"] = 1
    rows = int(np.prod(want.shape[:3]))
    grid = (ceil_div(params["OC"], tile[1]), ceil_div(rows, tile[0]), groups)
    buffers = [x, w, bias, Out(want.shape, np.float16)]
    (got,) = run("conv/conv2d_tiled.comp", buffers, params, grid, macros, coopmat=True)
    close(got, want, np.float16)


@pytest.mark.parametrize("case", DEPTHWISE, ids=str)
@pytest.mark.parametrize("pixels", [1, 4])
@pytest.mark.parametrize("special", [False, True])
def test_depthwise(case, pixels, special):
    batch, channels, height, width, kernel, stride, padding, dilation = case
    x, w, bias, want = problem(
        batch, channels, height, width, channels, kernel, stride, padding, dilation, channels
    )
    fixed = window(kernel, stride, padding, dilation)
    params = {
        "batches": batch,
        "H": height,
        "W": width,
        "C": channels,
        "OH": want.shape[1],
        "OW": want.shape[2],
        "pixel_a": channels,
        "pixel_o": channels,
        "ldb": channels,
        **fixed,
    }
    vectors = int(channels % 4 == 0)
    macros = {"VEC4_A": vectors, "VEC4_B": vectors, "VEC4_OUT": vectors, "BIAS": 1, "PX": pixels}
    macros["WINDOW"] = int(special and dilation[1] == 1)
    macros["EPILOGUE(v, b, m, n)"] = "clamp(v, 0.0, 6.0)"
    work = ceil_div(channels, 4) * ceil_div(want.shape[2], pixels)
    grid = (ceil_div(work, 64), want.shape[1], batch)
    buffers = [x, w, bias, Out(want.shape, np.float32)]
    specialize = fixed if special else ()
    (got,) = run("conv/conv2d_dw.comp", buffers, params, grid, macros, specialize=specialize)
    close(got, want.clip(0, 6), np.float32)


def test_channels_of_a_wider_tensor():
    """Reads 8 of 12 channels and writes 8 of 20, each from the 4th on: slices and concatenations
    need no copy."""
    case = (1, 8, 6, 5, 8, (3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, w, bias, want = problem(*case)
    wide = np.full((*x.shape[:3], 12), np.nan, np.float32)
    wide[..., 4:] = x
    macros, params = common(case, want.shape)
    macros.update(register_tile({}))
    params |= {"pixel_a": 12, "pixel_o": 20, "offset_a": 4, "offset_o": 4}
    buffers = [wide, w, bias, Out((*want.shape[:3], 20), np.float32)]
    (got,) = run("conv/conv2d.comp", buffers, params, register_grid(macros, 30, 8, 1), macros)
    close(got[..., 4:12], want, np.float32)
    untouched = np.concatenate([got[..., :4], got[..., 12:]], -1)
    assert (untouched.view(np.uint8) == SENTINEL).all()


@pytest.mark.parametrize("case", CASES[:3], ids=str)
@pytest.mark.parametrize("lanes_m", [0, 1])
def test_texel_buffers(case, lanes_m):
    x, w, bias, want = problem(*case)
    macros, params = common(case, want.shape)
    macros.update(register_tile({"LANES_M": lanes_m, "TM": 3, "TN4": 2}), TEXEL_A=1, TEXEL_B=1)
    wide = {0: "r32f", 1: "rgba32f"}
    inputs = [Texel(x, wide[macros["VEC4_A"]]), Texel(w, wide[macros["VEC4_B"]]), bias]
    buffers = [*inputs, Out(want.shape, np.float32)]
    grid = register_grid(macros, int(np.prod(want.shape[:3])), params["OC"], case[-1])
    (got,) = run("conv/conv2d.comp", buffers, params, grid, macros)
    close(got, want, np.float32)

"""The templates of Winograd's algorithm, each against what it stands for, and together against torch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.conv.harness import problem
from tests.glsl.harness import Out, Texel, ceil_div, close, run
from tests.glsl.matmul.harness import register_grid, register_tile

pytestmark = pytest.mark.device


G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
B = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
# batch, channels, height, width, channels out, padding
CASES = [
    (1, 4, 6, 6, 4, (1, 1)),
    (2, 8, 7, 5, 36, (1, 1)),
    (1, 12, 3, 11, 64, (0, 2)),
    (3, 4, 1, 1, 8, (1, 1)),
    (1, 20, 5, 4, 100, (2, 0)),
]


def operand(array: np.ndarray, texel: bool) -> np.ndarray | Texel:
    return Texel(array, "rgba32f") if texel else array


def transformed_weight(w: np.ndarray) -> np.ndarray:
    """G g G^T of a weight [3, 3, in, out], in panels of 32 columns."""
    columns = w.shape[3]
    u = np.einsum("ay,bx,yxio->abio", G, G, w).reshape(16, w.shape[2], columns)
    u = np.pad(u, ((0, 0), (0, 0), (0, -columns % 32)))
    return u.reshape(16, w.shape[2], -1, 32).transpose(0, 2, 1, 3).astype(np.float32)


def transformed_input(x: np.ndarray, out: tuple[int, ...], padding: tuple[int, int]) -> np.ndarray:
    """B^T d B of the blocks of an image [B, H, W, C], for a result of the sizes `out`."""
    rows, columns = ceil_div(out[1], 2), ceil_div(out[2], 2)
    height, width = 2 * rows + 2, 2 * columns + 2
    padded = np.zeros((x.shape[0], height, width, x.shape[3]))
    high, wide = min(x.shape[1], height - padding[0]), min(x.shape[2], width - padding[1])
    padded[:, padding[0] : padding[0] + high, padding[1] : padding[1] + wide] = x[:, :high, :wide]
    blocks = np.stack(
        [
            padded[:, 2 * y : 2 * y + 4, 2 * x : 2 * x + 4]
            for y in range(rows)
            for x in range(columns)
        ],
        1,
    )
    v = np.einsum("ay,bx,nkyxc->abnkc", B, B, blocks)
    return v.reshape(16, -1, x.shape[3]).astype(np.float32)


def sizes_of(x: np.ndarray, out: tuple[int, ...]) -> dict[str, int]:
    rows, columns = ceil_div(out[1], 2), ceil_div(out[2], 2)
    return {"BLOCKS": x.shape[0] * rows * columns, "BLOCKS_Y": rows, "BLOCKS_X": columns}


def case_of(case):
    batch, channels, height, width, columns, padding = case
    return problem(
        batch, channels, height, width, columns, (3, 3), (1, 1), padding, (1, 1), 1, np.float32
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("texel", [False, True])
def test_weight(case, texel):
    _, w, _, _ = case_of(case)
    want = transformed_weight(w)
    params = {"IC": w.shape[2], "OC": w.shape[3]}
    buffers = [operand(w, texel), Out(want.shape, np.float32)]
    groups = ceil_div(want.size, 4 * 16 * 64)
    (got,) = run(
        "conv/conv2d_winograd_weight.comp", buffers, params, groups, {"TEXEL_B": int(texel)}
    )
    close(got, want, np.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("texel", [False, True])
def test_input(case, texel):
    x, _, _, out = case_of(case)
    want = transformed_input(x, out.shape, case[-1])
    _, height, width, channels = x.shape
    params = {
        **sizes_of(x, out.shape),
        "H": height,
        "W": width,
        "C": channels,
        "pixel_a": channels,
        "pad_y": case[-1][0],
        "pad_x": case[-1][1],
    }
    buffers = [operand(x, texel), Out(want.shape, np.float32)]
    groups = ceil_div(want.size, 4 * 16 * 64)
    (got,) = run(
        "conv/conv2d_winograd_input.comp", buffers, params, groups, {"TEXEL_A": int(texel)}
    )
    close(got, want, np.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "tile",
    [{"TM": 16, "WY": 1}, {"TM": 4, "TN4": 2}, {"LANES_M": 1, "TM": 2, "TN4": 2}, {"SG": 1}],
    ids=str,
)
def test_products(case, tile):
    x, w, bias, want = case_of(case)
    image, weight = transformed_input(x, want.shape, case[-1]), transformed_weight(w)
    sizes = sizes_of(x, want.shape)
    params = {
        **sizes,
        "IC": x.shape[3],
        "OH": want.shape[1],
        "OW": want.shape[2],
        "OC": want.shape[3],
    }
    macros = {"BIAS": 1, **register_tile(tile)}
    grid = register_grid(macros, sizes["BLOCKS"], want.shape[3], 1)
    buffers = [image, weight, bias, Out(want.shape, np.float32)]
    (got,) = run("conv/conv2d_winograd.comp", buffers, params, grid, macros)
    close(got, want, np.float32)

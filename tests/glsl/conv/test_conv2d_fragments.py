"""conv2d_fragments.comp: its arithmetic step by step on any device, and on matrix cores where a device
has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from purevk.graph.context import traits_of
from purevk.lower.matrix_core_kernels import FragmentConvolution
from tests.glsl.harness import Out, ceil_div, device, run

pytestmark = pytest.mark.device


def right_blocks(weight: np.ndarray) -> np.ndarray:
    """A weight [out, in, rows, columns] in the order of fragments, element by element."""
    out, channels, height, width = weight.shape
    blocks = np.zeros((out // 16, height * width * channels // 32, 512), weight.dtype)
    for column in range(out):
        for tap in range(height * width):
            for channel in range(channels):
                g, h = column % 16 // 4 * 2 + column % 2, column // 2 % 2
                unit = channel // 32 * height * width + tap
                at = h * 256 + g * 32 + channel % 32
                blocks[column // 16, unit, at] = weight[column, channel, tap // width, tap % width]
    return blocks.reshape(-1)


def floats_of(bits: np.ndarray) -> np.ndarray:
    """The numbers of halves, or of bfloat16 by its bits."""
    wide = (bits.astype(np.uint32) << 16).view(np.float32) if bits.dtype == np.uint16 else bits
    return wide.astype(np.float64)


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("coopmat", [False, True], ids=["steps", "coopmat"])
@pytest.mark.parametrize("extras", [None, 0, 1], ids=["epilogue", "late", "early"])
@pytest.mark.parametrize("size, channels, kernel, stride, padding, dilation, tile", [
    ((2, 5, 7), (32, 32), (1, 1), (1, 1), (0, 0), (1, 1), (1, 1, 1, 1, 1)),
    ((1, 9, 5), (64, 48), (3, 3), (1, 1), (1, 1), (1, 1), (1, 2, 2, 1, 1)),
    ((2, 6, 5), (32, 16), (3, 2), (2, 1), (1, 0), (1, 2), (1, 1, 1, 1, 4)),
    ((1, 8, 8), (64, 32), (1, 1), (2, 2), (0, 0), (1, 1), (2, 1, 1, 2, 2)),
    ((1, 7, 7), (32, 16), (5, 5), (1, 1), (3, 2), (1, 1), (1, 1, 2, 1, 8)),
    ((1, 6, 3), (128, 64), (1, 1), (1, 1), (0, 0), (1, 1), (1, 1, 2, 4, 1)),
])  # fmt: skip
def test_agrees(size, channels, kernel, stride, padding, dilation, tile, coopmat, bfloat16, extras):
    if bfloat16 and coopmat and not traits_of(device()).bfloat16_fragments:
        pytest.skip("the device or the compiler has no fragments of bfloat16")
    generator = torch.Generator().manual_seed(sum(size))
    dtype = torch.bfloat16 if bfloat16 else torch.float16
    batch, height, width = size
    x = torch.randn(batch, channels[0], height, width, generator=generator).to(dtype)
    weight = torch.randn(channels[1], channels[0], *kernel, generator=generator).to(dtype)
    bias = torch.randn(channels[1], generator=generator)
    wanted = F.conv2d(x.double(), weight.double(), bias.double(), stride, padding, dilation)
    most = F.conv2d(x.double().abs(), weight.double().abs(), None, stride, padding, dilation)
    residual = torch.randn(wanted.shape, generator=generator)
    wanted = (wanted.relu() + residual).permute(0, 2, 3, 1).numpy()

    def array(tensor: torch.Tensor) -> np.ndarray:
        tensor = tensor.contiguous()
        return tensor.view(torch.uint16).numpy() if bfloat16 else tensor.numpy()

    subs_m, subs_n, fragments_m, fragments_n, slices = tile
    one = kernel == stride == (1, 1)
    macros = {
        **dict.fromkeys(("T_A", "T_B", "T_OUT"), "uint16_t" if bfloat16 else "float16_t"),
        **dict.fromkeys(("VEC8_A", "VEC8_B", "VEC4_OUT", "BIAS"), 1),
        "BFLOAT16": int(bfloat16),
        "COOPMAT": int(coopmat),
        "WINDOW": int(not one),
        "SUBGROUPS_M": subs_m,
        "SUBGROUPS_N": subs_n,
        "FRAGMENTS_M": fragments_m,
        "FRAGMENTS_N": fragments_n,
        "SLICES": slices,
        "TURN": FragmentConvolution(*tile).turn(kernel[0] * kernel[1] * channels[0]),
        "EXTRA_BUFFERS": "READONLY_BUFFER(EXTRA_BINDING, extra0, vec4)",
        "EPILOGUE4(v, b, m, n)": "(max(v, 0.0) + buf_extra0[((m) * pixel_o + (n)) >> 2])",
    }
    if extras is not None:
        del macros["EPILOGUE4(v, b, m, n)"]
        macros |= {
            "EXTRAS": "vec4",
            "EXTRAS_WORDS": 4,
            "READ_EXTRAS(b, m, n)": "(buf_extra0[((m) * pixel_o + (n)) >> 2])",
            "USE_EXTRAS(v, e)": "(max(v, 0.0) + e)",
            "EXTRAS_EARLY": extras,
        }
    _, out_height, out_width, columns = wanted.shape
    params = {
        **{"batches": batch, "H": height, "W": width, "IC": channels[0]},
        **{"OH": out_height, "OW": out_width, "OC": columns},
        **{"row_a": width * channels[0], "pixel_a": channels[0], "pixel_o": columns},
        **{"KH": kernel[0], "KW": kernel[1]},
        **{"stride_y": stride[0], "stride_x": stride[1], "pad_y": padding[0], "pad_x": padding[1]},
        **{"dilation_y": dilation[0], "dilation_x": dilation[1]},
        **dict.fromkeys(("offset_a", "offset_b", "offset_o", "offset_bias"), 0),
    }
    rows = batch * out_height * out_width
    grid = (
        ceil_div(columns, 16 * subs_n * fragments_n),
        ceil_div(rows, 16 * subs_m * fragments_m),
        1,
    )
    buffers = [
        array(x.permute(0, 2, 3, 1)),
        right_blocks(array(weight)),
        bias.numpy(),
        Out(wanted.shape, np.uint16 if bfloat16 else np.float16),
        residual.permute(0, 2, 3, 1).contiguous().numpy(),
    ]
    (got,) = run("conv/conv2d_fragments.comp", buffers, params, grid, macros, coopmat=coopmat)
    rounding = 4e-3 if bfloat16 else 1e-3
    allowed = 1e-6 * most.permute(0, 2, 3, 1).numpy() + rounding * np.abs(wanted) + 1e-6
    assert (np.abs(floats_of(got) - wanted) <= allowed).all()

"""Convolutions and their results, for the tests of templates."""

from __future__ import annotations

import numpy as np
import torch


def problem(
    batch,
    channels,
    height,
    width,
    out_channels,
    kernel,
    stride,
    padding,
    dilation,
    groups,
    dtype=np.float32,
):
    """Input, weight and bias as the templates take them, and the result, NHWC."""
    generator = torch.Generator().manual_seed(channels * 1000 + height)
    x = torch.randn(batch, channels, height, width, generator=generator).to(torch.float16).double()
    w = (
        torch.randn(out_channels, channels // groups, *kernel, generator=generator)
        .to(torch.float16)
        .double()
    )
    bias = torch.randn(out_channels, generator=generator)
    want = torch.nn.functional.conv2d(x, w, bias.double(), stride, padding, dilation, groups)
    return (
        x.permute(0, 2, 3, 1).contiguous().numpy().astype(dtype),
        w.permute(2, 3, 1, 0).contiguous().numpy().astype(dtype),
        bias.numpy(),
        want.permute(0, 2, 3, 1).contiguous().numpy(),
    )

"""bfloat16 in convolutions, against eager torch: with the kernels of a software device, and with those
of a GPU. No value is converted beside the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import purevk
from purevk.dtypes import DType
from purevk.graph.context import Context

pytestmark = pytest.mark.device
# A rounding of the largest results, which eager torch makes after each operator.
CLOSE = {"rtol": 1.6e-2, "atol": 1.6e-2}


def check(module: nn.Module, x: torch.Tensor, context: Context) -> None:
    """Compares with eager torch, and looks whether a kernel takes float32 for bfloat16."""
    module, x = module.to(torch.bfloat16).eval(), x.to(torch.bfloat16)
    with torch.no_grad(), purevk.compile(module, (x,), context=context) as program:
        made, wanted = program.forward(x), module(x)
        assert made.dtype is torch.bfloat16
        torch.testing.assert_close(made, wanted, **CLOSE)
        plan = program.methods["forward"].executable.plan
        types = {
            binding.storage.type.dtype
            for dispatch in plan.dispatches
            for binding in dispatch.bindings
            if "SPLIT_K" not in dict(dispatch.kernel.macros)
            and dispatch.kernel.template != "matmul/matmul_reduce.comp"
        }
        assert types == {DType.bfloat16}


CASES = {
    "colours": (nn.Conv2d(3, 8, 3, 2, 1), (2, 3, 15, 17)),
    "four_channels": (nn.Conv2d(4, 12, 3, padding=1), (1, 4, 9, 11)),
    "window": (nn.Conv2d(16, 24, 3, padding=1), (1, 16, 10, 12)),
    "odd_channels": (nn.Conv2d(7, 5, (3, 2), dilation=2), (1, 7, 9, 11)),
    "one_by_one": (nn.Conv2d(16, 32, 1), (2, 16, 5, 7)),
    "one_by_one_strided": (nn.Conv2d(16, 32, 1, 2, bias=False), (1, 16, 8, 8)),
    "depthwise": (nn.Conv2d(12, 12, 3, padding=1, groups=12), (1, 12, 9, 10)),
    "groups": (nn.Conv2d(8, 16, 3, groups=4), (1, 8, 8, 9)),
    "long_depth": (nn.Conv2d(96, 8, 3), (1, 96, 4, 4)),
    "patches": (nn.Conv2d(3, 16, 4, 4), (1, 3, 16, 16)),
    "line": (nn.Conv1d(6, 10, 3, padding=1), (2, 6, 21)),
    "transposed": (nn.ConvTranspose2d(8, 6, 2, 2), (1, 8, 5, 6)),
    "transposed_3x3": (nn.ConvTranspose2d(8, 6, 3, 2, 1), (1, 8, 5, 6)),
    "volume": (nn.Conv3d(4, 6, 3, padding=1), (1, 4, 5, 6, 7)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_convolution(name: str, either_context: Context) -> None:
    torch.manual_seed(len(name))
    module, sizes = CASES[name]
    check(module, torch.randn(sizes), either_context)


def test_residual_and_activation(either_context: Context) -> None:
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.two(torch.relu(self.one(x))))

    check(Block(), torch.randn(1, 16, 9, 9), either_context)

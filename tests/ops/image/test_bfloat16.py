"""Pooling of bfloat16 reads and writes its bits: the same as eager torch, and no value is converted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import purevk
from purevk.dtypes import DType
from purevk.graph.context import Context

pytestmark = pytest.mark.device
POOLS = {
    "max": nn.MaxPool2d(3, 2, 1),
    "dilated": nn.MaxPool2d(2, dilation=2),
    "average": nn.AvgPool2d(3, 2, 1),
    "line": nn.MaxPool1d(3, 2),
    "adaptive": nn.AdaptiveMaxPool2d((3, 2)),
}


@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize("name", POOLS)
def test_pool(name: str, channels: int, either_context: Context) -> None:
    torch.manual_seed(channels)
    sizes = (2, channels, 13) if name == "line" else (2, channels, 9, 12)
    x = torch.randn(sizes).bfloat16()
    x.view(-1)[7] = float("nan")
    for given in (x, x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.mT):
        with purevk.compile(POOLS[name], (given,), context=either_context) as program:
            # Sums of windows are rounded once, as torch does.
            torch.testing.assert_close(
                program.forward(given), POOLS[name](given), rtol=0, atol=0, equal_nan=True
            )
            plan = program.methods["forward"].executable.plan
            dtypes = {
                binding.storage.type.dtype for each in plan.dispatches for binding in each.bindings
            }
            assert dtypes <= {DType.bfloat16, DType.int32, DType.int64}  # and positions of maxima

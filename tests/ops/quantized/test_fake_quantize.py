"""Fake quantization against torch."""

from __future__ import annotations

import random

import pytest
import torch

import purevk
from tests.ops.harness import Case, aten, check

pytestmark = pytest.mark.device

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# No infinities: torch converts them to int64 where there are channels, which C++ leaves undefined.
SPECIAL = [float("nan"), 6e4, -6e4, 0.0, -0.0, 0.25, -0.25]


def _random(
    seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, tuple[int, int]]:
    """Numbers, scales and zero points of an axis, and bounds."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [chance.choice((1, 3, 5, 8, 17)) for _ in range(chance.randint(1, 4))]
    axis = chance.randrange(len(sizes))
    low, high = chance.choice(((-128, 127), (0, 255), (-8, 7), (-127, 127), (0, 65535)))
    scales = torch.rand(sizes[axis], generator=generator) * chance.choice((0.01, 1.0)) + 1e-3
    zeros = torch.randint(low, high + 1, (sizes[axis],), generator=generator, dtype=torch.int32)
    x = (torch.randn(sizes, generator=generator) * (high - low) * 0.02).to(dtype)
    if x.numel() > len(SPECIAL):
        x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)
    return x, scales, zeros, axis, (low, high)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_random_numbers(seed: int, dtype: torch.dtype) -> None:
    cases = []
    for each in range(3):
        x, scales, zeros, axis, bounds = _random(3 * seed + each, dtype)
        scale, zero = scales[0].item(), int(zeros[0])
        calls: list[tuple[object, tuple[object, ...]]] = [
            (aten.fake_quantize_per_tensor_affine.default, (x, scale, zero)),
            (aten.fake_quantize_per_tensor_affine.tensor_qparams, (x, scales[:1], zeros[:1])),
            (aten.fake_quantize_per_tensor_affine_cachemask.default, (x, scale, zero)),
            (aten.fake_quantize_per_channel_affine.default, (x, scales, zeros, axis)),
            (aten.fake_quantize_per_channel_affine.default, (x, scales, zeros + 0.5, axis)),
            (aten.fake_quantize_per_channel_affine_cachemask.default, (x, scales, zeros, axis)),
        ]
        calls += [
            (
                aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
                (x, scales[:1], zeros[:1], torch.tensor([enabled])),
            )
            for enabled in (0, 1)
        ]
        cases += [Case(fn, (*args, *bounds), rtol=0, atol=0) for fn, args in calls]
    check(cases)


class _Observed(torch.nn.Module):
    """A layer as `torch.ao.quantization` prepares it for training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 6)
        self.register_buffer("scales", torch.rand(6) * 0.02 + 0.01)
        self.register_buffer("zeros", torch.zeros(6, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.05, 3, -128, 127)
        weight = torch.fake_quantize_per_channel_affine(
            self.linear.weight, self.scales, self.zeros, 0, -128, 127
        )
        y = torch.nn.functional.linear(x, weight, self.linear.bias)
        return torch.fake_quantize_per_tensor_affine(
            y, self.scales[0], self.zeros[0], quant_min=0, quant_max=255
        )


@pytest.mark.parametrize("way", ["export", "dynamo"])
def test_layer(way: str) -> None:
    torch.manual_seed(0)
    module, x = _Observed().eval(), torch.randn(5, 8)
    with torch.no_grad():
        if way == "export":
            with purevk.compile(module, (x,)) as program:
                assert program.report()["cpu_nodes"] == 0
                have = program(x)
        else:
            options = {"fallback": False}
            have = torch.compile(module, backend="purevk", fullgraph=True, options=options)(x)
        torch.testing.assert_close(have, module(x), rtol=1e-5, atol=1e-6)

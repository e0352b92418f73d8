"""Windows side by side, of few channels, as the first layer of a vision transformer has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from purevk.graph.context import default_context
from purevk.passes.pipeline import optimize
from tests.ops.harness import Case, build, check

pytestmark = pytest.mark.device
aten = torch.ops.aten


def case(shape: tuple[int, ...], weight: tuple[int, ...], stride: Any, **options: Any) -> Case:
    generator = torch.Generator().manual_seed(0)
    dtype = options.get("dtype", torch.float32)
    x = torch.randn(shape, generator=generator).to(dtype)
    w = (torch.randn(weight, generator=generator) / weight[1] / weight[2]).to(dtype)
    bias = torch.randn(weight[0], generator=generator).to(dtype) if options.get("bias") else None
    pair = lambda name, default: options.get(name, [default] * 2)  # noqa: E731
    args = (x, w, bias, list(stride), pair("padding", 0), pair("dilation", 1), False, [0, 0])
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3}[dtype]
    return Case(
        aten.convolution.default,
        (*args, options.get("groups", 1)),
        constants=(1, 2),
        rtol=tolerance,
        atol=tolerance,
    )


def windows(made: Case) -> list[tuple[int, ...]]:
    """Height, width, and input channels of the windows that run."""
    graph = optimize(build([made]), default_context().traits)
    return [
        tuple(node.tensor("weight").type.dims[:3])
        for node in graph.nodes
        if node.op == "purevk.conv2d"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "weight"),
    [
        ((2, 3, 32, 48), (24, 3, 16, 16)),
        ((1, 1, 12, 8), (5, 1, 4, 2)),
        ((3, 4, 6, 6), (7, 4, 3, 3)),
        ((1, 3, 14, 14), (9, 3, 7, 7)),
        ((1, 3, 16, 16), (8, 3, 16, 16)),
    ],
    ids=str,
)
def test_patches(shape: tuple[int, ...], weight: tuple[int, ...], dtype: torch.dtype) -> None:
    made = case(shape, weight, weight[2:], dtype=dtype, bias=True)
    check(made)
    assert windows(made) == [(1, 1, weight[1] * weight[2] * weight[3])]


@pytest.mark.parametrize(
    ("shape", "weight", "options"),
    [
        ((1, 3, 17, 16), (8, 3, 4, 4), {}),  # a row is left over
        ((1, 3, 16, 16), (8, 3, 4, 4), {"padding": [4, 0]}),
        ((1, 3, 16, 16), (8, 3, 4, 4), {"dilation": [1, 2]}),
        ((1, 3, 16, 16), (8, 3, 4, 4), {"stride": (4, 2)}),
        ((1, 8, 16, 16), (8, 8, 4, 4), {}),  # the channels are read side by side
        ((1, 4, 16, 16), (8, 2, 4, 4), {"groups": 2}),
    ],
    ids=str,
)
def test_other_windows(
    shape: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any]
) -> None:
    options = dict(options)
    made = case(shape, weight, options.pop("stride", weight[2:]), **options)
    check(made)
    assert all(found[:2] != (1, 1) for found in windows(made))

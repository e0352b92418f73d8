"""Norms and shared heads as models of transformers write them, against eager torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.passes.decoding.harness import check

pytestmark = pytest.mark.device


def _llama(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return w * scaled.to(x.dtype)


def _short(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(1e-3 + (x * x).mean(-1, keepdim=True)) * x * w


def _other_dim(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-2, keepdim=True) + 1e-5) * w


def _cube(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 1e-5) * w


def _two_tensors(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(((x + 1) * x).mean(-1, keepdim=True).abs() + 1e-5) * w


def _read_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    factor = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    return x * factor * w + factor


def _gemma(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    scaled = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)
    return (scaled * (1 + w.float())).type_as(x)


def _olmo(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)


def _quotient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))


def _bare(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _root_over_x(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) / x)


def _other_power(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-3) ** 0.5)


def _eps_outside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * (x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + 0.5))


def _rounded_between(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What is rounded on purpose stays so: the norm ends before it."""
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return w * scaled.to(torch.bfloat16).float()


def _scaled_read_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The norm ends before its weight."""
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return w * scaled + scaled.abs()


def _whole(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What is cut to integers stays so."""
    return (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)).to(torch.int32) * w


@pytest.mark.parametrize(
    ("function", "dtype", "is_norm"),
    [
        *(
            (each, dtype, True)
            for each in (_gemma, _olmo, _bare)
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ),
        (_quotient, torch.float32, True),
        (_quotient, torch.bfloat16, True),
        (_short, torch.bfloat16, True),
        (_scaled_read_twice, torch.float32, True),
        (_root_over_x, torch.float32, False),
        (_other_power, torch.float32, False),
        (_eps_outside, torch.float32, False),
        (_rounded_between, torch.float32, True),
        (_llama, torch.float16, True),
        (_llama, torch.float32, True),
        (_short, torch.float32, True),
        # in eager torch, squares of halves overflow
        (_short, torch.float16, False),
        (_other_dim, torch.float32, False),
        (_cube, torch.float32, False),
        (_two_tensors, torch.float32, False),
        (_read_twice, torch.float32, False),
        (_whole, torch.float32, True),
    ],
)
def test_norms(function: Callable[..., torch.Tensor], dtype: torch.dtype, is_norm: bool) -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(13, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x, self.weight)

    torch.manual_seed(0)
    ops = check(Norm(), [(torch.randn(2, 13, 13, dtype=dtype),)])
    assert ("purevk.norm" in ops) == is_norm


def _repeated(x: torch.Tensor, count: int) -> torch.Tensor:
    batch, heads, rows, width = x.shape
    x = x[:, :, None].expand(batch, heads, count, rows, width)
    return x.reshape(batch, heads * count, rows, width)


def _tiled(x: torch.Tensor, count: int) -> torch.Tensor:
    """Heads in another order: all of them, again and again."""
    batch, heads, rows, width = x.shape
    x = x[:, None].expand(batch, count, heads, rows, width)
    return x.reshape(batch, heads * count, rows, width)


@pytest.mark.parametrize(
    ("of_keys", "of_values", "copies"),
    [(_repeated, _repeated, 0), (_tiled, _tiled, 2), (_repeated, _tiled, 2)],
)
def test_shared_heads(
    of_keys: Callable[..., torch.Tensor], of_values: Callable[..., torch.Tensor], copies: int
) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = of_keys(k, 3), of_values(v, 3)
            return functional.scaled_dot_product_attention(q, k, v)

    torch.manual_seed(1)
    q, k, v = torch.randn(1, 6, 2, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    assert check(Attention(), [(q, k, v)]).count("purevk.copy") == copies


def test_heads_of_a_cache_as_it_was() -> None:
    """The copies are of the cache before it is written."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.randn(1, 2, 9, 16))

        def forward(self, q: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            before = _repeated(self.cache, 3)
            self.cache.index_copy_(2, at, rows)
            return functional.scaled_dot_product_attention(q, before, before) + self.cache.sum()

    torch.manual_seed(2)
    calls = [
        (torch.randn(1, 6, 2, 16), torch.randn(1, 2, 1, 16), torch.tensor([at])) for at in (0, 8)
    ]
    check(Attention(), calls)

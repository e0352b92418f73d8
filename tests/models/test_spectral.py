"""Models that use complex numbers and Fourier transforms: nothing of them runs on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import purevk

pytestmark = [pytest.mark.device, pytest.mark.slow]  # each model compiles a dozen kernels


class RotaryAttention(nn.Module):
    """Attention as in Llama's reference code: complex numbers turn the queries and keys."""

    def __init__(self, width: int = 32, heads: int = 4, rows: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv = (nn.Linear(width, width, bias=False) for _ in range(3))
        half = width // heads // 2
        angles = torch.outer(torch.arange(rows), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def turned(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs[None, :, None]).flatten(3).type_as(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            linear(x).view(*x.shape[:2], self.heads, -1) for linear in (self.wq, self.wk, self.wv)
        )
        freqs = self.freqs_cis[: x.shape[1]]
        q, k = self.turned(q, freqs), self.turned(k, freqs)
        made = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return made.transpose(1, 2).flatten(2)


class FourierLayer(nn.Module):
    """A layer of a Fourier neural operator: a linear map of the lowest frequencies in two dims."""

    def __init__(self, channels: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.modes = modes
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(channels, channels, modes, modes, dtype=torch.complex64) / 4)
            for _ in range(2)
        )
        self.linear = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum, m = torch.fft.rfft2(x), self.modes
        made = torch.zeros_like(spectrum)
        made[:, :, :m, :m] = torch.einsum(
            "bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.weights[0]
        )
        made[:, :, -m:, :m] = torch.einsum(
            "bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.weights[1]
        )
        return nn.functional.gelu(torch.fft.irfft2(made, s=x.shape[-2:]) + self.linear(x))


class DiagonalStates(nn.Module):
    """A layer of a diagonal state space model (S4D): a long convolution by Fourier transforms."""

    def __init__(self, channels: int = 3, states: int = 4) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(channels) * 2 - 4)
        self.weights = nn.Parameter(torch.randn(channels, states, dtype=torch.complex64))
        self.log_real = nn.Parameter(torch.log(0.5 * torch.ones(channels, states)))
        self.imaginary = nn.Parameter(math.pi * torch.arange(states).repeat(channels, 1))
        self.direct = nn.Parameter(torch.randn(channels))

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        length = u.shape[-1]
        step = torch.exp(self.log_step)
        a = -torch.exp(self.log_real) + 1j * self.imaginary
        scaled = a * step[:, None]
        powers = torch.exp(scaled[..., None] * torch.arange(length))
        weights = self.weights * (torch.exp(scaled) - 1.0) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", weights, powers).real
        product = torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        made = torch.fft.irfft(product, n=2 * length)[..., :length]
        return nn.functional.gelu(made + u * self.direct[:, None])


class SpectralMixing(nn.Module):
    """The token mixing of FNet, and a learned filter of images (GFNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(8, 5, 6, 2) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
        grid = torch.fft.rfft2(x.view(-1, 8, 8, 6), dim=(1, 2), norm="ortho")
        grid = grid * torch.view_as_complex(self.filter)
        return torch.fft.irfft2(grid, s=(8, 8), dim=(1, 2), norm="ortho").view(x.shape)


@pytest.mark.parametrize(
    ("build", "sizes"),
    [
        (RotaryAttention, (2, 9, 32)),
        (FourierLayer, (2, 4, 12, 10)),
        (DiagonalStates, (2, 3, 20)),
        (SpectralMixing, (2, 64, 6)),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_runs_on_the_device(build: type[nn.Module], sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = build().eval(), torch.randn(sizes)
    with purevk.compile(module, (x,)) as program, torch.no_grad():
        assert program.report()["cpu_nodes"] == 0, program.report()
        torch.testing.assert_close(program.forward(x), module(x), rtol=2e-5, atol=2e-5)

"""Generators written with torch alone: diffusion, autoencoders, flows, GANs, separation of sounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.models.gallery.model import Model, built, seeded
from tests.models.zoo import Built


def sinusoids(steps: torch.Tensor, width: int) -> torch.Tensor:
    """The embedding of time steps, float [B, width]."""
    rates = torch.exp(-math.log(10000.0) * torch.arange(width // 2) / (width // 2))
    angles = steps[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


class Residual(nn.Module):
    """Group norm, SiLU and convolution twice, with an embedding between."""

    def __init__(self, inner: int, outer: int, embedding: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(4, inner), nn.GroupNorm(4, outer)
        self.enter = nn.Conv2d(inner, outer, 3, padding=1)
        self.leave = nn.Conv2d(outer, outer, 3, padding=1)
        self.embed = nn.Linear(embedding, 2 * outer)
        self.around = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        made = self.enter(F.silu(self.first(x)))
        scale, shift = self.embed(F.silu(embedding))[:, :, None, None].chunk(2, 1)
        return self.around(x) + self.leave(F.silu(self.second(made) * (1 + scale) + shift))


class Crossing(nn.Module):
    """A transformer block of a latent image: attention to itself, to a text, and a gated MLP."""

    def __init__(self, width: int, text: int, heads: int = 4) -> None:
        super().__init__()
        self.enter, self.norms = (
            nn.GroupNorm(4, width),
            nn.ModuleList(nn.LayerNorm(width) for _ in range(3)),
        )
        self.own = nn.MultiheadAttention(width, heads, batch_first=True)
        self.text = nn.MultiheadAttention(width, heads, kdim=text, vdim=text, batch_first=True)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        rows = self.enter(x).flatten(2).transpose(1, 2)
        first = self.norms[0](rows)
        rows = rows + self.own(first, first, first, need_weights=False)[0]
        rows = rows + self.text(self.norms[1](rows), text, text, need_weights=False)[0]
        value, gate = self.up(self.norms[2](rows)).chunk(2, -1)
        rows = rows + self.down(value * F.gelu(gate))
        return x + rows.transpose(1, 2).reshape(x.shape)


class ConditionalUNet(nn.Module):
    """Stable Diffusion's UNet: a latent, a step and a text to the noise. Two levels."""

    def __init__(self, width: int = 16, text: int = 24) -> None:
        super().__init__()
        w, e = width, 4 * width
        self.width = w
        self.time = nn.Sequential(nn.Linear(w, e), nn.SiLU(), nn.Linear(e, e))
        self.enter = nn.Conv2d(4, w, 3, padding=1)
        self.down1, self.cross1 = Residual(w, w, e), Crossing(w, text)
        self.shrink = nn.Conv2d(w, w, 3, stride=2, padding=1)
        self.down2, self.cross2 = Residual(w, 2 * w, e), Crossing(2 * w, text)
        self.middle = Residual(2 * w, 2 * w, e)
        self.up2, self.cross3 = Residual(4 * w, 2 * w, e), Crossing(2 * w, text)
        self.grow = nn.Conv2d(2 * w, 2 * w, 3, padding=1)
        self.up1, self.cross4 = Residual(3 * w, w, e), Crossing(w, text)
        self.norm, self.leave = nn.GroupNorm(4, w), nn.Conv2d(w, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, step: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        time = self.time(sinusoids(step, self.width))
        top = self.cross1(self.down1(self.enter(x), time), text)
        low = self.cross2(self.down2(self.shrink(top), time), text)
        x = self.middle(low, time)
        x = self.cross3(self.up2(torch.cat([x, low], 1), time), text)
        x = self.grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = self.cross4(self.up1(torch.cat([x, top], 1), time), text)
        return self.leave(F.silu(self.norm(x)))


class DiffusionTransformer(nn.Module):
    """DiT: patches of a latent, norms modulated by the step and a class."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.patch = nn.Conv2d(4, width, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.time, self.kind = nn.Linear(width, width), nn.Embedding(11, width)
        self.modulate = nn.ModuleList(nn.Linear(width, 6 * width) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU("tanh"), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.last, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, 2 * 2 * 8)

    def forward(self, x: torch.Tensor, step: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        rows = self.patch(x).flatten(2).transpose(1, 2) + self.position
        about = F.silu(self.time(sinusoids(step, self.width)) + self.kind(kind))

        def normed(rows: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (
                F.layer_norm(rows, (self.width,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
            )

        for modulate, qkv, out, mlp in zip(self.modulate, self.qkv, self.out, self.mlp):
            shift1, scale1, gate1, shift2, scale2, gate2 = modulate(about).chunk(6, -1)
            made = qkv(normed(rows, shift1, scale1)).unflatten(-1, (3, self.heads, -1))
            q, k, v = made.permute(2, 0, 3, 1, 4)
            made = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            rows = rows + gate1[:, None] * out(made)
            rows = rows + gate2[:, None] * mlp(normed(rows, shift2, scale2))
        rows = self.leave(normed(rows, *self.last(about).chunk(2, -1)))
        return torch.einsum(
            "bhwpqc->bchpwq", rows.unflatten(-1, (2, 2, 8)).unflatten(1, (4, 4))
        ).reshape(-1, 8, 8, 8)


class JointTransformer(nn.Module):
    """A block of Stable Diffusion 3: text and image attend jointly, with norms of queries and keys
    and rotary positions of two dims."""

    def __init__(self, width: int = 48, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.image, self.text = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.norms = nn.ModuleList(nn.RMSNorm(width // heads) for _ in range(4))
        self.out_image, self.out_text = nn.Linear(width, width), nn.Linear(width, width)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        count, width = x.shape[-2], x.shape[-1]
        at = torch.arange(count)
        rates = 1.0 / 100.0 ** (torch.arange(0, width // 2, 2) / (width // 2))
        angles = torch.cat([(at // 4)[:, None] * rates, (at % 4)[:, None] * rates], -1)
        turns = torch.view_as_complex(torch.stack([angles.cos(), angles.sin()], -1))
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        qi, ki, vi = self.image(image).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        qt, kt, vt = self.text(text).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        qi, ki = self.turned(self.norms[0](qi)), self.turned(self.norms[1](ki))
        q = torch.cat([self.norms[2](qt), qi], 2)
        k, v = torch.cat([self.norms[3](kt), ki], 2), torch.cat([vt, vi], 2)
        made = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (
            image + self.out_image(made[:, text.shape[1] :]),
            text + self.out_text(made[:, : text.shape[1]]),
        )


class Autoencoder(nn.Module):
    """A VAE of latent diffusion: an image to mean and deviation, and a latent, with given noise, to
    an image."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        self.encoder = nn.Sequential(
            nn.Conv2d(3, w, 3, padding=1), nn.GroupNorm(4, w), nn.SiLU(),
            nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(w, 2 * w, 3, 2), nn.GroupNorm(4, 2 * w), nn.SiLU(),
            nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(2 * w, 2 * w, 3, 2), nn.SiLU(), nn.Conv2d(2 * w, 8, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 2 * w, 3, padding=1), nn.GroupNorm(4, 2 * w), nn.SiLU(), nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * w, w, 3, padding=1), nn.GroupNorm(4, w), nn.SiLU(), nn.Upsample(scale_factor=2,
        mode="bilinear"),
            nn.Conv2d(w, 3, 3, padding=1),
        )  # fmt: skip

    def forward(self, image: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, log = self.encoder(image).chunk(2, 1)
        deviation = torch.exp(0.5 * log.clamp(-30, 20))
        divergence = 0.5 * (mean**2 + deviation**2 - 1 - log).sum((1, 2, 3))
        return self.decoder(mean + deviation * noise), mean, deviation, divergence


class QuantizedAutoencoder(nn.Module):
    """VQ-VAE: the nearest entries of a codebook."""

    def __init__(self, entries: int = 32, width: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, width, 4, 2, 1)
        )
        self.book = nn.Embedding(entries, width)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)
        )

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.encoder(image).permute(0, 2, 3, 1)
        codes = torch.cdist(features.flatten(1, 2), self.book.weight[None]).argmin(-1)
        found = self.book(codes).view(features.shape)
        straight = features + (found - features).detach()
        return self.decoder(straight.permute(0, 3, 1, 2)), codes, (found - features).square().mean()


class Coupling(nn.Module):
    """RealNVP: affine couplings; a sample there and back, and its log density."""

    def __init__(self, width: int = 6, layers: int = 4) -> None:
        super().__init__()
        half = width // 2
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(half, 24), nn.Tanh(), nn.Linear(24, 2 * half))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z, density = x, torch.zeros(x.shape[0])
        for net in self.nets:
            a, b = z.chunk(2, -1)
            scale, shift = net(a).chunk(2, -1)
            b = b * scale.tanh().exp() + shift
            density = density + scale.tanh().sum(-1)
            z = torch.cat([b, a], -1)
        back = z
        for net in reversed(self.nets):
            b, a = back.chunk(2, -1)
            scale, shift = net(a).chunk(2, -1)
            back = torch.cat([a, (b - shift) * (-scale.tanh()).exp()], -1)
        density = density + torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1)
        return z, back, density


class StyleGenerator(nn.Module):
    """StyleGAN 2: modulated and demodulated weights, blurred upsampling, skips to the image."""

    def __init__(self, z: int = 24, width: int = 12) -> None:
        super().__init__()
        self.map = nn.Sequential(
            nn.Linear(z, z), nn.LeakyReLU(0.2), nn.Linear(z, z), nn.LeakyReLU(0.2)
        )
        self.first = nn.Parameter(torch.randn(1, width, 4, 4))
        self.weights = nn.ParameterList(torch.randn(width, width, 3, 3) * 0.1 for _ in range(2))
        self.styles = nn.ModuleList(nn.Linear(z, width) for _ in range(2))
        self.images = nn.ModuleList(nn.Conv2d(width, 3, 1) for _ in range(2))
        row = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.register_buffer(
            "blur", (row[:, None] * row / 64 * 4)[None, None].repeat(width, 1, 1, 1)
        )

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        w = self.map(z * (z.square().mean(-1, keepdim=True) + 1e-8).rsqrt())
        batch = z.shape[0]
        x, image = self.first.expand(batch, -1, -1, -1), None
        for weight, style, to_image in zip(self.weights, self.styles, self.images):
            mixed = weight[None] * (style(w) + 1)[:, None, :, None, None]
            mixed = mixed * (mixed.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
            x = F.interpolate(x, scale_factor=2.0)
            x = F.conv2d(F.pad(x, (2, 1, 2, 1)), self.blur, groups=x.shape[1]) / 4
            made = F.conv2d(
                x.reshape(1, -1, *x.shape[2:]), mixed.flatten(0, 1), padding=1, groups=batch
            )
            x = F.leaky_relu(made.view(batch, -1, *x.shape[2:]), 0.2) * math.sqrt(2)
            own = to_image(x)
            image = (
                own
                if image is None
                else own + F.interpolate(image, scale_factor=2.0, mode="bilinear")
            )
        return image


class Restorer(nn.Module):
    """ESRGAN: residual dense blocks, an image of twice the size."""

    def __init__(self, width: int = 12, grow: int = 6) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 3, 3, 1, 1)
        self.dense = nn.ModuleList(
            nn.ModuleList(
                nn.Conv2d(width + i * grow, grow if i < 3 else width, 3, 1, 1) for i in range(4)
            )
            for _ in range(2)
        )
        self.up = nn.Conv2d(width, width, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.enter(x)
        for block in self.dense:
            known = [x]
            for conv in block[:-1]:
                known.append(F.leaky_relu(conv(torch.cat(known, 1)), 0.2))
            x = x + 0.2 * block[-1](torch.cat(known, 1))
        x = self.up(F.interpolate(first + x, scale_factor=2.0, mode="nearest"))
        return self.leave(F.leaky_relu(x, 0.2))


class Separator(nn.Module):
    """Conv-TasNet: learned frames, dilated separable convolutions, masks of two speakers."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, width, 16, 8, bias=False)
        self.norm = nn.GroupNorm(1, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, 24, 1), nn.PReLU(), nn.GroupNorm(1, 24),
                nn.Conv1d(24, 24, 3, padding=2**i, dilation=2**i, groups=24), nn.PReLU(), nn.GroupNorm(1, 24),
                nn.Conv1d(24, width, 1),
            ) for i in range(layers)
        )  # fmt: skip
        self.mask = nn.Conv1d(width, 2 * width, 1)
        self.decoder = nn.ConvTranspose1d(width, 1, 16, 8, bias=False)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        frames = F.relu(self.encoder(wave))
        x = self.norm(frames)
        for block in self.blocks:
            x = x + block(x)
        masks = self.mask(x).sigmoid().unflatten(1, (2, -1))
        masked = (masks * frames[:, None]).flatten(0, 1)
        return self.decoder(masked).view(wave.shape[0], 2, -1)


class Spectral(nn.Module):
    """FNO: a convolution in the space of Fourier modes."""

    def __init__(self, width: int = 8, modes: int = 5) -> None:
        super().__init__()
        self.modes = modes
        self.enter, self.point, self.leave = (
            nn.Linear(2, width),
            nn.Conv1d(width, width, 1),
            nn.Linear(width, 1),
        )
        self.weight = nn.Parameter(torch.randn(width, width, modes, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.enter(x).transpose(1, 2)
        modes = torch.fft.rfft(rows)[..., : self.modes]
        mixed = torch.einsum("bim,iom->bom", modes, torch.view_as_complex(self.weight))
        back = torch.fft.irfft(mixed, n=rows.shape[-1])
        return self.leave(F.gelu(back + self.point(rows)).transpose(1, 2))


def _made(
    module: Callable[[], nn.Module], *shapes: tuple[int, ...] | list[int]
) -> Callable[[], Built]:
    """Inputs of noise for each shape; a list of numbers is an input of integers."""

    def build() -> Built:
        generator = seeded()
        inputs = [
            torch.tensor(shape)
            if isinstance(shape, list)
            else torch.randn(*shape, generator=generator)
            for shape in shapes
        ]
        return built(module(), *inputs, calibrate=False)

    return build


def _plain(name: str, about: str, build: Callable[[], Built]) -> Model:
    return Model(name, "torch.nn", about, build)


MODELS = (
    _plain("conditional_unet", "latent diffusion, cross-attention to a text, 16 x 16",
           _made(ConditionalUNet, (1, 4, 16, 16), [37], (1, 7, 24))),
    _plain("dit", "diffusion transformer, 8 x 8 latents", _made(DiffusionTransformer, (1, 4, 8, 8), [37], [3])),
    _plain("mmdit", "joint attention, complex rotations", _made(JointTransformer, (1, 16, 48), (1, 5, 48))),
    _plain("autoencoder_kl", "VAE, 32 pixels", _made(Autoencoder, (1, 3, 32, 32), (1, 4, 8, 8))),
    _plain("vq_vae", "codebook, 32 pixels", _made(QuantizedAutoencoder, (1, 3, 32, 32))),
    _plain("real_nvp", "flow, there and back", _made(Coupling, (5, 6))),
    _plain("stylegan2", "modulated convolutions, 16 pixels", _made(StyleGenerator, (2, 24))),
    _plain("esrgan", "super-resolution, 16 pixels", _made(Restorer, (1, 3, 16, 16))),
    _plain("conv_tasnet", "two speakers, 400 samples", _made(Separator, (1, 1, 400))),
    _plain("fourier_operator", "Fourier modes, 32 points", _made(Spectral, (1, 32, 2))),
)  # fmt: skip

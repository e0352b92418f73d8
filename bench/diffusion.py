"""Models that make images, of diffusers, with random weights, for `bench.gpu --diffusion`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.networks import Sample, Work

Inputs = Callable[[int], dict[str, torch.Tensor]]


class _Named(nn.Module):
    """The first output of a model whose inputs are given by name."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], method: str) -> None:
        super().__init__()
        self.model, self.names, self.method = model, names, method

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = dict(zip(self.names, inputs))
        return getattr(self.model, self.method)(**given, return_dict=False)[0]


def _work(
    name: str,
    about: str,
    build: Callable[[Any], nn.Module],
    inputs: Inputs,
    method: str = "forward",
    images: bool = True,
) -> Work:
    def sample(batch: int) -> Sample:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import diffusers

        given = inputs(batch)
        model = build(diffusers).eval()
        return _Named(model, tuple(given), method).eval(), tuple(given.values())

    return Work(name, about, sample, True, images)


def _step(batch: int) -> torch.Tensor:
    return torch.full((batch,), 500)


def _conditioned(width: int, side: int) -> Inputs:
    """Latents, a step, and a text of 77 tokens."""

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        return {
            "sample": torch.randn(batch, 4, side, side),
            "timestep": _step(batch),
            "encoder_hidden_states": torch.randn(batch, 77, width),
        }

    return inputs


def _latents(side: int) -> Inputs:
    return lambda batch: {"z": torch.randn(batch, 4, side, side)}


def _unet(library: Any, *channels: int, text: int, **options: Any) -> nn.Module:
    """Of Stable Diffusion 1.5 with the channels 320, 640, 1280, 1280 and a text of 768."""
    return library.UNet2DConditionModel(
        block_out_channels=channels, cross_attention_dim=text, **options
    )


def _autoencoder(library: Any, *channels: int) -> nn.Module:
    count = len(channels)
    return library.AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * count,
        up_block_types=("UpDecoderBlock2D",) * count,
        layers_per_block=2,
    )


def _pixart(library: Any) -> nn.Module:
    return library.PixArtTransformer2DModel(
        sample_size=64,
        num_layers=28,
        num_attention_heads=16,
        attention_head_dim=72,
        cross_attention_dim=1152,
        caption_channels=4096,
        in_channels=4,
        out_channels=8,
        use_additional_conditions=False,
    )


def _captioned(batch: int) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.randn(batch, 4, 64, 64),
        "encoder_hidden_states": torch.randn(batch, 120, 4096),
        "timestep": _step(batch),
    }


def _flux(library: Any) -> nn.Module:
    """Of the width of FLUX.1, and 6 of its 57 layers."""
    return library.FluxTransformer2DModel(num_layers=2, num_single_layers=4, guidance_embeds=False)


def _patches(batch: int) -> dict[str, torch.Tensor]:
    """An image of 1024 x 1024, and a text of 512 tokens."""
    side = torch.arange(64.0)
    places = torch.stack([torch.zeros(64, 64), *torch.meshgrid(side, side, indexing="ij")], dim=-1)
    return {
        "hidden_states": torch.randn(batch, 4096, 64),
        "encoder_hidden_states": torch.randn(batch, 512, 4096),
        "pooled_projections": torch.randn(batch, 768),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": places.reshape(-1, 3),
        "txt_ids": torch.zeros(512, 3),
    }


def _tiny() -> list[Work]:
    def build(library: Any) -> nn.Module:
        return _unet(
            library,
            8,
            16,
            text=12,
            attention_head_dim=2,
            norm_num_groups=4,
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )

    return [_work("unet", "UNet", build, _conditioned(12, 8))]


def diffusion(tiny: bool = False) -> dict[str, Work]:
    """All of them by name; `tiny`: a small one, for a software device."""
    found = _tiny() if tiny else [
        _work("sd15_unet", "UNet of Stable Diffusion 1.5, 512 x 512",
              lambda library: _unet(library, 320, 640, 1280, 1280, text=768), _conditioned(768, 64)),
        _work("sd_vae_decoder", "VAE decoder of Stable Diffusion, 512 x 512",
              lambda library: _autoencoder(library, 128, 256, 512, 512), _latents(64), "decode"),
        _work("pixart", "PixArt-alpha, 512 x 512", _pixart, _captioned, images=False),
        _work("flux_6_layers", "6 layers of FLUX.1, 1024 x 1024", _flux, _patches, images=False),
    ]  # fmt: skip
    return {work.name: work for work in found}

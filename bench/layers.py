"""Single layers and operators that models are made of, for `bench.gpu --layers`: convolutions of all
kinds, recurrent layers, norms, attention with masks, skinny and batched matmuls, resampling, indexing.
The networks of `bench.networks` have few of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from bench.networks import Of, Sample, Work

Make = Callable[[], Sample]


def _layer(name: str, make: Make, images: bool = False, variants: tuple[str, ...] = ()) -> Work:
    def build(batch: int) -> Sample:
        module, inputs = make()
        return module.eval(), inputs

    return Work(name, name.replace("_", " "), build, False, images, variants or ("fp16", "fp32"))


def _module(name: str, make: Callable[[], nn.Module], *shape: int) -> Work:
    return _layer(name, lambda: (make(), (torch.randn(shape),)), images=len(shape) == 4)


def _function(name: str, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> Work:
    def make() -> Sample:
        return Of(function), tuple(torch.randn(shape) for shape in shapes)

    return _layer(name, make, images=len(shapes[0]) == 4)


def _indexed(
    name: str,
    function: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    most: int,
    *indices: tuple[int, ...],
) -> Work:
    """A function of a tensor and of indices below `most`."""

    def make() -> Sample:
        given = [torch.randint(most, each) for each in indices]
        return Of(function), (torch.randn(shape), *given)

    return _layer(name, make)


class _First(nn.Module):
    """The outputs of a recurrent layer, without its states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class _ChannelsFirst(nn.Module):
    """LayerNorm over the channels of images, as in ConvNeXt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Gated(nn.Module):
    """A feed-forward layer with a gate, as in Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class _Windows(nn.Module):
    """Attention within windows of 7 x 7 with a bias for each head and position, as in Swin."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, heads, 49, 49))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)


class _Selected(nn.Module):
    """Attention that a mask of booleans allows, the same for all heads."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(tokens, tokens) < 0.5)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _sampled(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return functional.grid_sample(x, grid.tanh(), align_corners=False)


def _resized(mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def resize(x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x, scale_factor=2.0, mode=mode)

    return resize


def _scattered(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).scatter_add(1, index, x)


def _index_added(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).index_add(0, index, x)


def _convolutions() -> list[Work]:
    conv, transposed = nn.Conv2d, nn.ConvTranspose2d
    return [
        _module("conv_3x3_320_64x64", lambda: conv(320, 320, 3, padding=1), 2, 320, 64, 64),
        _module("conv_3x3_1280_16x16", lambda: conv(1280, 1280, 3, padding=1), 2, 1280, 16, 16),
        _module("conv_3x3_512_64x64", lambda: conv(512, 512, 3, padding=1), 1, 512, 64, 64),
        _module("conv_3x3_128_to_3_512x512", lambda: conv(128, 3, 3, padding=1), 1, 128, 512, 512),
        _module("conv_3x3_4_to_320_64x64", lambda: conv(4, 320, 3, padding=1), 2, 4, 64, 64),
        _module("conv_3x3_stride_2", lambda: conv(320, 320, 3, 2, 1), 2, 320, 64, 64),
        _module("conv_1x1_960_to_320", lambda: conv(960, 320, 1), 2, 960, 64, 64),
        _module("conv_odd_channels", lambda: conv(100, 150, 3, padding=1), 8, 100, 56, 56),
        _module("conv_dilated_12", lambda: conv(256, 256, 3, 1, 12, 12), 4, 256, 33, 33),
        _module("conv_grouped_32", lambda: conv(256, 256, 3, 1, 1, groups=32), 8, 256, 56, 56),
        _module("conv_1x7", lambda: conv(192, 192, (1, 7), padding=(0, 3)), 8, 192, 17, 17),
        _module("depthwise_3x3", lambda: conv(384, 384, 3, 1, 1, groups=384), 32, 384, 28, 28),
        _module("depthwise_7x7", lambda: conv(384, 384, 7, 1, 3, groups=384), 32, 384, 28, 28),
        _module("transposed_4x4_stride_2", lambda: transposed(256, 128, 4, 2, 1), 8, 256, 32, 32),
        _module("transposed_2x2_stride_2", lambda: transposed(512, 256, 2, 2), 4, 512, 64, 64),
        _module("conv1d_3", lambda: nn.Conv1d(512, 512, 3, padding=1), 8, 512, 1500),
        _module("conv1d_10_stride_5", lambda: nn.Conv1d(1, 512, 10, 5), 4, 1, 80000),
        _module("conv1d_depthwise_31", lambda: nn.Conv1d(512, 512, 31, 1, 15, 1, 512), 8, 512, 750),
        _module("transposed1d_16_stride_8", lambda: nn.ConvTranspose1d(256, 128, 16, 8, 4), 4, 256, 1000),
        _module("conv3d_3", lambda: nn.Conv3d(64, 64, 3, padding=1), 2, 64, 16, 28, 28),
    ]  # fmt: skip


def _norms() -> list[Work]:
    return [
        _module("group_norm_silu", lambda: nn.Sequential(nn.GroupNorm(32, 320), nn.SiLU()), 2, 320, 64, 64),
        _module("instance_norm", lambda: nn.InstanceNorm2d(64, affine=True), 8, 64, 128, 128),
        _module("batch_norm", lambda: nn.BatchNorm2d(256), 32, 256, 56, 56),
        _module("layer_norm_of_channels", lambda: _ChannelsFirst(384), 32, 384, 28, 28),
        _module("layer_norm", lambda: nn.LayerNorm(1024), 16384, 1024),
        _function("softmax_32000", lambda x: x.softmax(-1), (512, 32000)),
        _function("log_softmax_of_channels", lambda x: x.log_softmax(1), (4, 21, 512, 512)),
    ]  # fmt: skip


def _recurrent() -> list[Work]:
    return [
        _module("lstm", lambda: _First(nn.LSTM(256, 512, batch_first=True)), 16, 128, 256),
        _module("lstm_both_ways", lambda: _First(nn.LSTM(256, 256, 2, bidirectional=True)), 64, 8, 256),
        _module("gru", lambda: _First(nn.GRU(256, 512, batch_first=True)), 1, 128, 256),
    ]  # fmt: skip


def _attentions() -> list[Work]:
    wide, narrow = (2, 8, 4096, 40), (2, 8, 77, 40)
    windows, heads = (2048, 3, 49, 32), (8, 12, 1024, 64)

    def biased() -> Sample:
        return _Windows(3), tuple(torch.randn(windows) for _ in range(3))

    def selected() -> Sample:
        return _Selected(1024), tuple(torch.randn(heads) for _ in range(3))

    return [
        _function("attention_40_wide", _attention, wide, wide, wide),
        _function("attention_of_77_keys", _attention, wide, narrow, narrow),
        _layer("attention_of_windows", biased),
        _layer("attention_with_mask", selected),
        _function("attention_grouped", _grouped, (1, 32, 1024, 128), *[(1, 8, 1024, 128)] * 2),
        _function("attention_one_query", _grouped, (16, 32, 1, 128), *[(16, 8, 2048, 128)] * 2),
        _function("attention_256_wide", _attention, *[(4, 8, 1024, 256)] * 3),
    ]


def _matmuls() -> list[Work]:
    return [
        _function("batched_matmul_512", torch.bmm, (64, 512, 64), (64, 64, 512)),
        _function("batched_matmul_197", torch.bmm, (384, 197, 197), (384, 197, 64)),
        _function("einsum_of_heads", lambda a, b: torch.einsum("bihd,bjhd->bhij", a, b),
                  (8, 512, 12, 64), (8, 512, 12, 64)),
        _function("matmul_odd", torch.matmul, (1000, 1001), (1001, 1003)),
        _function("matmul_tall", torch.matmul, (100000, 64), (64, 64)),
        _function("matmul_long_k", torch.matmul, (128, 50000), (50000, 128)),
        *(
            _module(f"linear_{rows}_rows", lambda: nn.Linear(4096, 4096), rows, 4096)
            for rows in (1, 4, 16, 32, 64, 256)
        ),
        _module("linear_odd", lambda: nn.Linear(771, 513), 2048, 771),
        _module("linear_to_32000", lambda: nn.Linear(2048, 32000, bias=False), 512, 2048),
        _module("gated_feed_forward", lambda: _Gated(2048, 5632), 64, 2048),
    ]  # fmt: skip


def _others() -> list[Work]:
    images = (2, 320, 64, 64)
    return [
        _function("resize_nearest", _resized("nearest"), images),
        _function("resize_bilinear", _resized("bilinear"), images),
        _function("resize_bicubic", _resized("bicubic"), images),
        _function("grid_sample", _sampled, (4, 256, 64, 64), (4, 64, 64, 2)),
        _function("pixel_shuffle", lambda x: functional.pixel_shuffle(x, 2), (4, 256, 64, 64)),
        _function("average_pool", lambda x: functional.avg_pool2d(x, 3, 2, 1), (32, 64, 112, 112)),
        _function("adaptive_pool", lambda x: functional.adaptive_avg_pool2d(x, 7), (32, 512, 14, 14)),
        _function("mean_of_images", lambda x: x.mean((2, 3)), (32, 2048, 7, 7)),
        _function("cumsum", lambda x: x.cumsum(1), (4096, 4096)),
        _function("topk_50", lambda x: x.topk(50)[0], (32, 32000)),
        _function("sort_rows", lambda x: x.sort(-1)[0], (512, 4096)),
        _function("sort_one_row", lambda x: x.sort(-1)[0], (1 << 20,)),
        _function("sum_of_all", lambda x: x.sum(), (1 << 24,)),
        _function("max_of_columns", lambda x: x.amax(0), (8192, 2048)),
        _function("distances", torch.cdist, (2048, 64), (2048, 64)),
        _function("transpose", lambda x: x.transpose(1, 2).contiguous(), (16, 2048, 1024)),
        _function("cat_of_channels", lambda a, b: torch.cat((a, b), 1), images, images),
        _function("roll", lambda x: x.roll((3, 3), (1, 2)), (32, 56, 56, 96)),
        _function("add_rows", lambda a, b: a + b, (4096, 4096), (4096, 1)),
        _indexed("embedding", lambda x, i: functional.embedding(i, x), (32000, 1024), 32000, (32, 512)),
        _indexed("gather", lambda x, i: x.gather(1, i), (4096, 4096), 4096, (4096, 1024)),
        _indexed("index_select", lambda x, i: x.index_select(0, i), (65536, 256), 65536, (65536,)),
        _indexed("index_add", _index_added, (65536, 64), 1024, (65536,)),
        _indexed("scatter_add", _scattered, (4096, 1024), 1024, (4096, 1024)),
    ]  # fmt: skip


def layers(tiny: bool = False) -> dict[str, Work]:
    """All of them by name; `tiny`: a few small ones, for a software device."""
    if tiny:
        found = [
            _module("conv", lambda: nn.Conv2d(8, 8, 3, padding=1), 1, 8, 6, 6),
            _module("lstm", lambda: _First(nn.LSTM(4, 8)), 3, 2, 4),
            _indexed("gather", lambda x, i: x.gather(1, i), (4, 8), 8, (4, 3)),
        ]
    else:
        found = [
            *_convolutions(),
            *_norms(),
            *_recurrent(),
            *_attentions(),
            *_matmuls(),
            *_others(),
        ]
    return {work.name: work for work in found}

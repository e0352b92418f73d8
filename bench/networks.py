"""What `bench.gpu` times: networks in plain torch operators with seeded random weights, matmuls and
attention."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Sample = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


# -- images --------------------------------------------------------------------------------------
def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1, and a residual."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.first = _convolution(inputs, inner, 1)
        self.second = _convolution(inner, inner, 3, stride)
        self.third = _convolution(inner, outputs, 1)
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x).relu()).relu()
        return (self.third(y) + self.skip(x)).relu()


class ResNet(nn.Module):
    """ResNet-50 with depths (3, 4, 6, 3) and width 64: [B, 3, H, W] to [B, classes]."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = _convolution(3, width, 7, 2)
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                inner = width << stage
                blocks.append(Bottleneck(channels, inner, 2 if stage and not number else 1))
                channels = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.stem(x).relu(), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


def normalized(network: nn.Module, side: int) -> nn.Module:
    """The network with the statistics of noise in its batch norms, so that values stay near 1."""
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.momentum = None
    network.train()
    with torch.no_grad():
        network(torch.randn(4, 3, side, side))
    return network.eval()


# -- transformers --------------------------------------------------------------------------------
class Layer(nn.Module):
    """A transformer layer, norms before the parts or after them: [B, T, D] to the same."""

    def __init__(self, width: int, heads: int, before: bool) -> None:
        super().__init__()
        self.heads, self.before = heads, before
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for each in self.qkv(x).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            x = x + self.attend(self.norm1(x))
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.feed(x))


class ViT(nn.Module):
    """ViT-B/16 with 12 layers of 768 columns and 12 heads: [B, 3, side, side] to [B, classes]."""

    def __init__(self, layers: int, width: int, heads: int, side: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (side // 16) ** 2 + 1, width) * 0.02)
        self.layers = nn.Sequential(*(Layer(width, heads, True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.layers(x)[:, 0]))


class Bert(nn.Module):
    """BERT in plain operators: tokens int64 [B, T] to the last hidden states [B, T, D]."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocab, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Layer(width, heads, False) for _ in range(layers)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.layers(self.norm(self.words(tokens) + self.positions(positions)))


class _LastHidden(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).last_hidden_state


def bert(layers: int, width: int, heads: int, vocab: int) -> nn.Module:
    """BERT of transformers if that is installed, else `Bert`."""
    if importlib.util.find_spec("transformers") is None:
        return Bert(layers, width, heads, vocab)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )
    return _LastHidden(BertModel(config, add_pooling_layer=False))


# -- what is timed -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Work:
    """One line of the table.

    Attributes:
        name: on the command line.
        about: in the table.
        build: the module and its inputs in float32, for a batch.
        batched: it is timed for several batches.
        images: channels last may be faster.
        variants: of dtypes.
    """

    name: str
    about: str
    build: Callable[[int], Sample]
    batched: bool = False
    images: bool = False
    variants: tuple[str, ...] = ("fp16", "bf16", "fp32")


def _matmul(size: int) -> Work:
    def build(batch: int) -> Sample:
        return Of(torch.matmul), tuple(torch.randn(size, size) / size**0.5 for _ in range(2))

    return Work(f"matmul_{size}", f"matmul {size} cubed", build)


def _attention(heads: int, tokens: int, depth: int, causal: bool) -> Work:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def build(batch: int) -> Sample:
        return Of(attend), tuple(torch.randn(1, heads, tokens, depth) for _ in range(3))

    name = f"attention_{tokens}" + ("_causal" if causal else "")
    about = f"attention, {heads} heads, {tokens} tokens, {depth} wide{', causal' * causal}"
    return Work(name, about, build, variants=("fp16", "bf16"))


def _image_network(
    name: str, about: str, make: Callable[[], nn.Module], side: int, noise: int = 0
) -> Work:
    """`noise`: side of the images that give batch norms their statistics."""

    def build(batch: int) -> Sample:
        network = normalized(make(), noise) if noise else make().eval()
        return network, (torch.randn(batch, 3, side, side),)

    return Work(name, about, build, batched=True, images=True)


def _bert(layers: int, width: int, heads: int, vocab: int, length: int) -> Work:
    def build(batch: int) -> Sample:
        network = bert(layers, width, heads, vocab).eval()
        return network, (torch.randint(vocab, (batch, length)),)

    return Work("bert_base", f"BERT, {layers} layers, {length} tokens", build, batched=True)


def works(tiny: bool = False) -> dict[str, Work]:
    """All of them by name; `tiny`: of the same structure, for a software device."""
    if tiny:
        found = (
            _matmul(128),
            _attention(2, 96, 32, False),
            _attention(2, 96, 32, True),
            _image_network("resnet50", "ResNet", lambda: ResNet((1, 2), 8, 10), 32, 32),
            _image_network("vit_b_16", "ViT", lambda: ViT(2, 32, 2, 32, 10), 32),
            _bert(2, 32, 2, 100, 12),
        )
    else:
        found = (
            _matmul(4096),
            _matmul(8192),
            _attention(32, 4096, 128, False),
            _attention(32, 4096, 128, True),
            _attention(16, 1024, 64, False),
            _image_network(
                "resnet50", "ResNet-50", lambda: ResNet((3, 4, 6, 3), 64, 1000), 224, 128
            ),
            _image_network("vit_b_16", "ViT-B/16", lambda: ViT(12, 768, 12, 224, 1000), 224),
            _bert(12, 768, 12, 30522, 128),
        )
    return {work.name: work for work in found}

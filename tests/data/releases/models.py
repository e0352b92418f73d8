"""Small models that between them use what executorch's Vulkan backend lowers. `make.py` exports
them with each release.

A model is a function that gives a `Model`. Weights and inputs come from a seed, so that a release
gives the same file again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Samples = tuple[tuple[torch.Tensor, ...], ...]


@dataclass(frozen=True)
class Model:
    """What to export.

    Attributes:
        module: float32, in evaluation mode.
        samples: inputs of the calls whose results are recorded, in order. The first is the example
            for the export.
        dynamic: dynamic shapes for `torch.export`; None if all are static.
        options: compile options of VulkanPartitioner.
        quantize: (module, example inputs) to the module that is exported and whose eager results
            are recorded.
        fresh: makes the module again where calls change its buffers.
        methods: more methods of the program: name to (module, samples).
        external: the portable operators' constants go to a data file.
    """

    module: nn.Module
    samples: Samples
    dynamic: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    quantize: Callable[[nn.Module, tuple], nn.Module] | None = None
    fresh: Callable[[], nn.Module] | None = None
    methods: dict[str, tuple[nn.Module, Samples]] = field(default_factory=dict)
    external: bool = False


MODELS: dict[str, Callable[[], Model]] = {}


def _model(build: Callable[[], Model]) -> Callable[[], Model]:
    MODELS[build.__name__] = build
    return build


class Function(nn.Module):
    """A module without weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def normal(*shapes: tuple[int, ...], samples: int = 2) -> Samples:
    return tuple(tuple(torch.randn(shape) for shape in shapes) for _ in range(samples))


# -- products and convolutions -------------------------------------------------------------------
def _mlp_module() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 9, bias=False), nn.GELU(), nn.Linear(9, 5)
    )


@_model
def mlp() -> Model:
    return Model(_mlp_module(), normal((3, 7)))


@_model
def mlp_half() -> Model:
    return Model(_mlp_module(), normal((3, 7)), options={"force_fp16": True})


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        flat = torch.addmm(self.bias, x[0], self.weight) + torch.mm(x[1], self.weight)
        return torch.bmm(x, y), torch.matmul(x, self.weight), flat


@_model
def products() -> Model:
    return Model(Products(), normal((2, 4, 6), (2, 6, 3)))


class ConvNet(nn.Module):
    """Convolutions with batch norm, depthwise and pointwise ones, pooling, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = (
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
        )
        self.depthwise, self.norm2 = (
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
            nn.BatchNorm2d(8),
        )
        self.pointwise = nn.Conv2d(8, 12, 1)
        self.head = nn.Linear(12, 5)
        for norm in (self.norm1, self.norm2):
            norm.running_mean.normal_(0, 0.2)
            norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = F.max_pool2d(x, 3, 2, 1)
        x = F.relu6(self.norm2(self.depthwise(x)))
        x = F.hardswish(self.pointwise(x))
        x = F.avg_pool2d(x, 2, 1)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


@_model
def convnet() -> Model:
    return Model(ConvNet(), normal((1, 3, 14, 10)))


@_model
def convnet_half() -> Model:
    return Model(ConvNet(), normal((1, 3, 14, 10)), options={"force_fp16": True})


class Residual(nn.Module):
    """Sums after convolutions, clamps before and after arithmetic: what release 1.0 made single
    operators of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        a = F.relu(self.first(x) + y)
        b = F.relu(x) * y
        c = F.relu6(x - y)
        d = self.second(x) * y
        e = F.hardtanh(x, -0.5, 0.5) / (y * y + 1.0)
        return a, b, c, d, e


@_model
def residual() -> Model:
    return Model(Residual(), normal((1, 4, 4, 3), (1, 4, 4, 3)))


class Upscale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1)
        self.line = nn.Conv1d(4, 6, 3, padding=1)

    def forward(self, x: torch.Tensor, line: torch.Tensor) -> Any:
        up = F.relu(self.up(x))
        return (
            F.interpolate(up, scale_factor=2.0, mode="nearest"),
            F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False),
            F.pixel_shuffle(up, 2),
            F.relu(self.line(line)),
        )


@_model
def upscale() -> Model:
    return Model(Upscale(), normal((1, 4, 3, 2), (1, 4, 7)))


# -- transformers --------------------------------------------------------------------------------
class Attention(nn.Module):
    """A transformer layer, norm first: float32 [B, T, 8] to the same."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.eager = eager
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, dim = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, rows, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        )
        if self.eager:
            attended = torch.softmax(q @ k.transpose(-2, -1) * 4**-0.5, dim=-1) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, rows, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@_model
def attention_eager() -> Model:
    return Model(Attention(True), normal((1, 7, 8)))


@_model
def attention_sdpa() -> Model:
    return Model(Attention(False), normal((1, 7, 8)))


def _dynamic_attention(eager: bool) -> Model:
    samples = tuple((torch.randn(1, rows, 8),) for rows in (7, 1, 3, 16, 7))
    dynamic = {"x": {1: torch.export.Dim("rows", min=1, max=16)}}
    return Model(Attention(eager), samples, dynamic, {"require_dynamic_shapes": True})


@_model
def attention_dynamic() -> Model:
    return _dynamic_attention(True)


@_model
def attention_sdpa_dynamic() -> Model:
    return _dynamic_attention(False)


@_model
def mlp_dynamic() -> Model:
    samples = tuple((torch.randn(rows, 7),) for rows in (3, 1, 8))
    dynamic = ({0: torch.export.Dim("batch", min=1, max=8)},)
    return Model(_mlp_module(), samples, {"input": dynamic[0]}, {"require_dynamic_shapes": True})


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12)
        self.layer, self.group = nn.LayerNorm(12), nn.GroupNorm(3, 6)
        self.scale = nn.Parameter(1.0 + 0.1 * torch.randn(12))

    def forward(self, tokens: torch.Tensor, image: torch.Tensor) -> Any:
        x = self.table(tokens)
        root = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.scale
        return self.layer(x), self.group(image), root


@_model
def norms() -> Model:
    samples = tuple((torch.randint(0, 20, (1, 6)), torch.randn(1, 6, 5, 4)) for _ in range(2))
    return Model(Norms(), samples)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        steps, (hidden, cell) = self.lstm(x)
        return steps, hidden, cell


@_model
def lstm() -> Model:
    return Model(Recurrent(), normal((1, 4, 6)))


# -- state ---------------------------------------------------------------------------------------
class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(8, dtype=torch.float32).reshape(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2.0


@_model
def counter() -> Model:
    return Model(Counter(), normal((2, 4), samples=3), fresh=Counter)


class Cache(nn.Module):
    """Attention over a KV cache, by the operators of executorch's language models; optionally a
    rotary embedding."""

    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.rotary = rotary
        self.qkv, self.out = nn.Linear(16, 32, bias=False), nn.Linear(16, 16, bias=False)
        self.register_buffer("k_cache", torch.zeros(1, 16, 1, 8))
        self.register_buffer("v_cache", torch.zeros(1, 16, 1, 8))
        angles = torch.outer(torch.arange(16.0), 10000.0 ** -(torch.arange(0, 8, 2) / 8))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        rows = x.shape[1]
        q, k, v = self.qkv(x).split([16, 8, 8], dim=-1)
        q, k, v = q.view(1, rows, 2, 8), k.view(1, rows, 1, 8), v.view(1, rows, 1, 8)
        if self.rotary:
            positions = input_pos + torch.arange(rows)
            q, k = _rotate(q, k, self.cos[positions], self.sin[positions])
        start = input_pos[0].item()
        torch._check(start >= 0)
        torch._check(start + rows <= 16)
        torch.ops.llama.update_cache(k, self.k_cache, start)
        torch.ops.llama.update_cache(v, self.v_cache, start)
        attended = torch.ops.llama.custom_sdpa(
            q, self.k_cache, self.v_cache, start, None, 0.0, True
        )
        return x + self.out(attended.view(1, rows, 16))


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns neighbouring pairs; the operations are in the order in which the partitioner looks for
    them."""
    q_real, q_other = q.float().reshape((*q.shape[:-1], -1, 2)).unbind(-1)
    k_real, k_other = k.float().reshape((*k.shape[:-1], -1, 2)).unbind(-1)
    shape = [size if axis in (1, q_real.ndim - 1) else 1 for axis, size in enumerate(q_real.shape)]
    cos, sin = cos.view(shape), sin.view(shape)
    q_first, q_second = q_real * cos - q_other * sin, q_real * sin + q_other * cos
    k_first, k_second = k_real * cos - k_other * sin, k_real * sin + k_other * cos
    turned_q = torch.stack([q_first, q_second], dim=-1).flatten(3)
    turned_k = torch.stack([k_first, k_second], dim=-1).flatten(3)
    return turned_q.type_as(q), turned_k.type_as(k)


def _steps(*lengths: int) -> Samples:
    made, position = [], 0
    for length in lengths:
        made.append((torch.randn(1, length, 16), torch.tensor([position])))
        position += length
    return tuple(made)


def _cache(rotary: bool = True) -> nn.Module:
    torch.manual_seed(5)
    return Cache(rotary)


@_model
def kv_cache() -> Model:
    return Model(_cache(), _steps(1, 1, 1, 1), fresh=_cache)


@_model
def kv_cache_bare() -> Model:
    return Model(_cache(False), _steps(1, 1, 1), fresh=lambda: _cache(False))


@_model
def kv_cache_dynamic() -> Model:
    dynamic = {"x": {1: torch.export.Dim("rows", min=1, max=8)}, "input_pos": None}
    return Model(
        _cache(), _steps(5, 1, 1, 7, 1), dynamic, {"require_dynamic_shapes": True}, fresh=_cache
    )


# -- the rest of the operators -------------------------------------------------------------------
def _pointwise(x: torch.Tensor, y: torch.Tensor) -> Any:
    positive = torch.abs(x) + 0.1
    unary = torch.cat(
        [
            torch.exp(x),
            torch.sin(x),
            torch.cos(x),
            torch.tanh(x),
            torch.sigmoid(x),
            torch.sqrt(positive),
            torch.rsqrt(positive),
            torch.neg(x),
            torch.clamp(x, -0.5, 0.7),
            F.silu(x),
            F.leaky_relu(x, 0.1),
            F.hardsigmoid(x),
            F.hardtanh(x),
        ],
        0,
    )
    binary = torch.cat(
        [
            x + y,
            torch.sub(x, y, alpha=2),
            x * y,
            x / (torch.abs(y) + 1),
            torch.minimum(x, y),
            torch.pow(positive, y),
            x + 1.5,
            torch.floor_divide(x * 4, torch.abs(y) + 1),
        ],
        0,
    )
    return unary, binary, torch.where(x > y, x, y), x.ge(y)


@_model
def pointwise() -> Model:
    return Model(Function(_pointwise), normal((1, 3, 5), (1, 1, 5)))


def _reductions(x: torch.Tensor) -> Any:
    return (
        x.sum(-1),
        x.mean(1, keepdim=True),
        x.amax(-1, keepdim=True),
        x.amin(1, keepdim=True),
        x.mean((1, 2), keepdim=True),
        torch.softmax(x, 1),
        torch.log_softmax(x, -1),
        torch.argmax(x, -1),
        torch.var(x, -1),
    )


@_model
def reductions() -> Model:
    return Model(Function(_reductions), normal((2, 5, 7)))


def _moves(x: torch.Tensor) -> Any:
    first, second = x.split([2, 4], 1)
    return (
        x.permute(0, 2, 3, 1),
        x.transpose(1, 2)[:, 1:],
        x.reshape(1, 4, 9).squeeze(0),
        x.unsqueeze(0).flatten(1, 2),
        F.pad(x, (1, 2, 0, 3)),
        torch.cat([second, first, x], 1),
        torch.stack([first, second[:, 2:]], 1),
        x.flip([2]),
        x.repeat(1, 1, 2, 1),
        x[:, :1].expand(1, 3, 3, 2),
        x[:, :, 1::2, :1] * 2,
        x.select(2, 1) + 1,
        torch.full_like(x, 3.0) + x,
        x.chunk(3, 1)[1] - 1,
    )


@_model
def moves() -> Model:
    return Model(Function(_moves), normal((1, 6, 3, 2), samples=1))


def _gathers(x: torch.Tensor, index: torch.Tensor, wide: torch.Tensor) -> Any:
    return (
        torch.index_select(x, 0, index),
        x[index] + 1,
        torch.gather(x, 1, wide),
        index + 3,
        x.to(torch.float32) * wide,
        (index > 1).float(),
    )


@_model
def gathers() -> Model:
    samples = tuple(
        (torch.randn(6, 5), torch.randint(0, 6, (4,)), torch.randint(0, 5, (6, 5)))
        for _ in range(2)
    )
    return Model(Function(_gathers), samples)


def _several(x: torch.Tensor) -> Any:
    """A value that is output twice over, an integer output, a node for the CPU between two
    delegates."""
    values, indices = torch.topk(x * 2.0 + 1.0, 2)
    return torch.sigmoid(values), indices, x + 1.0


@_model
def several() -> Model:
    return Model(Function(_several), normal((3, 7)))


# -- files ---------------------------------------------------------------------------------------
@_model
def external() -> Model:
    return Model(
        _mlp_module(),
        normal((3, 7)),
        options={"external_constants_max_data_bytes": 1 << 20},
        external=True,
    )


@_model
def methods() -> Model:
    module = _mlp_module()
    return Model(
        module,
        normal((3, 7)),
        methods={"step": (module, normal((1, 7))), "other": (Counter(), normal((2, 4)))},
    )

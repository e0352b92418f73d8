"""Models written with torch.nn alone: recurrent nets, generators, decoders of detections, graphs,
scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.models.gallery.model import Model, built, first_of, seeded
from tests.models.zoo import Built


class UNet(nn.Module):
    """An image to a map of its size: three levels, transposed convolutions upwards, skips by
    concatenation."""

    def __init__(self, width: int = 8, classes: int = 2) -> None:
        super().__init__()

        def double(inner: int, outer: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for first in (inner, outer):
                layers += [
                    nn.Conv2d(first, outer, 3, padding=1, bias=False),
                    nn.BatchNorm2d(outer),
                    nn.ReLU(True),
                ]
            return nn.Sequential(*layers)

        w = width
        self.down = nn.ModuleList([double(3, w), double(w, 2 * w), double(2 * w, 4 * w)])
        self.bottom = double(4 * w, 8 * w)
        self.up = nn.ModuleList(
            [
                nn.ConvTranspose2d(8 * w, 4 * w, 2, 2),
                nn.ConvTranspose2d(4 * w, 2 * w, 2, 2),
                nn.ConvTranspose2d(2 * w, w, 2, 2),
            ]
        )
        self.join = nn.ModuleList([double(8 * w, 4 * w), double(4 * w, 2 * w), double(2 * w, w)])
        self.head = nn.Conv2d(w, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips)):
            x = join(torch.cat([skip, up(x)], 1))
        return self.head(x)


class DiffusionUNet(nn.Module):
    """A noisy image and a time step to the noise: group norms, SiLU, a time embedding, attention at
    the bottom."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        w = width
        self.width = w
        self.time = nn.Sequential(nn.Linear(w, 4 * w), nn.SiLU(), nn.Linear(4 * w, w))
        self.first = nn.Conv2d(3, w, 3, padding=1)
        self.norms = nn.ModuleList(
            [nn.GroupNorm(4, w), nn.GroupNorm(4, 2 * w), nn.GroupNorm(4, 3 * w)]
        )
        self.enter = nn.Conv2d(w, w, 3, padding=1)
        self.down = nn.Conv2d(w, 2 * w, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(2 * w, 4, batch_first=True)
        self.last = nn.Conv2d(3 * w, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(self.width // 2) * (-4.0 / (self.width // 2)))
        angles = step[:, None].float() * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.first(x)
        top = x + self.enter(F.silu(self.norms[0](x))) + time[:, :, None, None]
        low = self.norms[1](self.down(top))
        rows = low.flatten(2).transpose(1, 2)
        rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        low = rows.transpose(1, 2).reshape(low.shape)
        joined = torch.cat([F.interpolate(low, scale_factor=2.0, mode="nearest"), top], 1)
        return self.last(F.silu(self.norms[2](joined)))


class Generator(nn.Module):
    """DCGAN's generator: a vector [1, z] to an image of 32 pixels."""

    def __init__(self, z: int = 32, width: int = 16) -> None:
        super().__init__()
        w = width
        self.net = nn.Sequential(
            nn.ConvTranspose2d(z, 4 * w, 4, 1, 0, bias=False),
            nn.BatchNorm2d(4 * w),
            nn.ReLU(True),
            nn.ConvTranspose2d(4 * w, 2 * w, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * w),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * w, w, 4, 2, 1, bias=False),
            nn.BatchNorm2d(w),
            nn.ReLU(True),
            nn.ConvTranspose2d(w, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.net(z[:, :, None, None])


class StyleTransfer(nn.Module):
    """The fast style transfer net: reflection padding, instance norms, residual blocks, upsampling
    by nearest."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        w = width

        def layer(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(
                nn.ReflectionPad2d(kernel // 2),
                nn.Conv2d(inner, outer, kernel, stride),
                nn.InstanceNorm2d(outer, affine=True),
                nn.ReLU(),
            )

        self.down = nn.Sequential(layer(3, w, 9), layer(w, 2 * w, 3, 2), layer(2 * w, 4 * w, 3, 2))
        self.middle = nn.ModuleList(
            [nn.Sequential(layer(4 * w, 4 * w, 3), layer(4 * w, 4 * w, 3)) for _ in range(2)]
        )
        self.up = nn.Sequential(
            nn.Upsample(scale_factor=2),
            layer(4 * w, 2 * w, 3),
            nn.Upsample(scale_factor=2),
            layer(2 * w, w, 3),
            nn.ReflectionPad2d(4),
            nn.Conv2d(w, 3, 9),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(x)
        for block in self.middle:
            x = x + block(x)
        return self.up(x)


def _super_resolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 24, 5, padding=2),
        nn.Tanh(),
        nn.Conv2d(24, 16, 3, padding=1),
        nn.PReLU(16),
        nn.Conv2d(16, 9, 3, padding=1),
        nn.PixelShuffle(3),
        nn.Sigmoid(),
    )


class YoloHead(nn.Module):
    """A small backbone with three anchors a cell; boxes decoded, the best 10 by score, ready for
    suppression."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.classes = classes
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.BatchNorm2d(16),
            nn.SiLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.BatchNorm2d(32),
            nn.SiLU(),
        )
        self.pool = nn.ModuleList([nn.MaxPool2d(k, 1, k // 2) for k in (5, 9, 13)])
        self.head = nn.Conv2d(128, 3 * (5 + classes), 1)
        self.register_buffer("anchors", torch.tensor([[10.0, 13.0], [16.0, 30.0], [33.0, 23.0]]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.body(x)
        x = self.head(torch.cat([x, *(pool(x) for pool in self.pool)], 1))
        batch, _, rows, columns = x.shape
        x = x.view(batch, 3, 5 + self.classes, rows, columns).permute(0, 1, 3, 4, 2).sigmoid()
        y, x0 = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        grid = torch.stack([x0, y], -1).float()
        center = (x[..., 0:2] * 2 - 0.5 + grid) * 8
        size = (x[..., 2:4] * 2) ** 2 * self.anchors[None, :, None, None, :]
        boxes = torch.cat([center - size / 2, center + size / 2], -1).flatten(1, 3)
        scores, labels = (x[..., 4:5] * x[..., 5:]).flatten(1, 3).max(-1)
        best, places = scores.topk(10, dim=1)
        return (
            boxes.gather(1, places[..., None].expand(-1, -1, 4)).clamp(0, 64),
            best,
            labels.gather(1, places),
        )


class RadianceField(nn.Module):
    """NeRF's MLP with volume rendering: rays [R, 6] to colors [R, 3]."""

    def __init__(self, width: int = 64, samples: int = 12) -> None:
        super().__init__()
        self.samples = samples
        self.layers = nn.ModuleList(
            [nn.Linear(39, width), nn.Linear(width, width), nn.Linear(width + 39, width)]
        )
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.color = nn.Sequential(
            nn.Linear(width + 27, width // 2), nn.ReLU(), nn.Linear(width // 2, 3), nn.Sigmoid()
        )

    @staticmethod
    def _encoded(x: torch.Tensor, bands: int) -> torch.Tensor:
        parts = [x]
        for band in range(bands):
            parts += [torch.sin(x * 2.0**band), torch.cos(x * 2.0**band)]
        return torch.cat(parts, -1)

    def forward(self, rays: torch.Tensor) -> torch.Tensor:
        origin, direction = rays[:, :3], F.normalize(rays[:, 3:], dim=-1)
        depth = torch.linspace(0.5, 3.0, self.samples)
        points = origin[:, None] + direction[:, None] * depth[None, :, None]
        given = self._encoded(points, 6)
        x = torch.relu(self.layers[0](given))
        x = torch.relu(self.layers[1](x))
        x = torch.relu(self.layers[2](torch.cat([x, given], -1)))
        density = F.softplus(self.density(x))[..., 0]
        views = self._encoded(direction, 4)[:, None].expand(-1, self.samples, -1)
        color = self.color(torch.cat([self.feature(x), views], -1))
        alpha = 1 - torch.exp(-density * (2.5 / self.samples))
        passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[
            :, :-1
        ]
        return ((alpha * passed)[..., None] * color).sum(1)


class GraphNetwork(nn.Module):
    """Nodes [N, d] and edges [2, E] to classes of nodes: messages by gather, sums and means by
    scatter, attention."""

    def __init__(self, features: int = 12, width: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.message = nn.Sequential(
            nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width)
        )
        self.update = nn.GRUCell(width, width)
        self.score, self.head = nn.Linear(2 * width, 1), nn.Linear(width, classes)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[0], edges[1]
        x = self.enter(nodes)
        for _ in range(2):
            pairs = torch.cat([x[source], x[target]], -1)
            sent = torch.zeros_like(x).index_add(0, target, self.message(pairs))
            count = torch.zeros_like(x[:, 0]).scatter_add(
                0, target, torch.ones_like(target, dtype=x.dtype)
            )
            x = self.update(sent / count.clamp(min=1)[:, None], x)
        pairs = torch.cat([x[source], x[target]], -1)
        score = F.leaky_relu(self.score(pairs)[:, 0], 0.2)
        top = torch.full_like(x[:, 0], -1e9).scatter_reduce(0, target, score, "amax")
        weight = torch.exp(score - top[target])
        total = torch.zeros_like(x[:, 0]).scatter_add(0, target, weight)
        weight = weight / total[target]
        x = torch.zeros_like(x).scatter_add(
            0, target[:, None].expand(-1, x.shape[1]), weight[:, None] * x[source]
        )
        return F.log_softmax(self.head(x), -1)


class TemporalNet(nn.Module):
    """WaveNet's stack: causal dilated 1-D convolutions, gated, with skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            [nn.Conv1d(width, 2 * width, 2, dilation=2**n) for n in range(5)]
        )
        self.outs = nn.ModuleList([nn.Conv1d(width, 2 * width, 1) for _ in range(5)])
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 32, 1)
        )

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        x, total = self.enter(wave), 0.0
        for n, (gate, out) in enumerate(zip(self.gates, self.outs)):
            a, b = gate(F.pad(x, (2**n, 0))).chunk(2, 1)
            left, skip = out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, total = x + left, total + skip
        return self.head(total)


class SelectiveScan(nn.Module):
    """A selective state space layer with its scan as cumulative sums of logarithms: rows [1, T, d]
    to the same."""

    def __init__(self, width: int = 16, state: int = 4) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mix = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.select = nn.Linear(width, 2 * state + 1)
        self.spread = nn.Linear(1, width)
        self.rates = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(width, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x, gate = self.enter(rows).chunk(2, -1)
        x = F.silu(self.mix(x.transpose(1, 2))[..., : rows.shape[1]].transpose(1, 2))
        delta, b, c = self.select(x).split([1, 4, 4], -1)
        delta = F.softplus(self.spread(delta))
        decay = torch.cumsum(delta[..., None] * -torch.exp(self.rates), 1)
        fed = (delta * x)[..., None] * b[:, :, None, :]
        states = torch.exp(decay) * torch.cumsum(fed * torch.exp(-decay), 1)
        return self.leave((states * c[:, :, None, :]).sum(-1) * F.silu(gate))


class Tagger(nn.Module):
    """Ids [1, T] through a bidirectional LSTM with attention pooling and a CRF's scores: a tagger
    of words."""

    def __init__(self, vocabulary: int = 100, width: int = 24, tags: int = 5) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.rows = nn.LSTM(width, width, 2, bidirectional=True, batch_first=True)
        self.tags, self.moves = nn.Linear(2 * width, tags), nn.Parameter(torch.randn(tags, tags))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = self.tags(self.rows(self.words(ids))[0])
        forward = scores[:, 0]
        for step in range(1, ids.shape[1]):
            forward = torch.logsumexp(forward[:, :, None] + self.moves, 1) + scores[:, step]
        return forward


class Recommender(nn.Module):
    """DLRM: dense features and bags of ids; dot products of all pairs; a score."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(50, width, mode="sum") for _ in range(3)])
        self.bottom = nn.Sequential(
            nn.Linear(7, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.top = nn.Sequential(
            nn.Linear(width + 6, width), nn.ReLU(), nn.Linear(width, 1), nn.Sigmoid()
        )
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        parts = torch.stack([x, *(table(ids[:, n]) for n, table in enumerate(self.tables))], 1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        return self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], -1))


def _plain(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Callable[[], Built]:
    def build() -> Built:
        generator = seeded()
        return built(make().eval(), *(torch.randn(*shape, generator=generator) for shape in shapes))

    return build


def _diffusion() -> Built:
    generator = seeded()
    module = DiffusionUNet()
    return built(
        module, torch.randn(1, 3, 16, 16, generator=generator), torch.tensor([37]), calibrate=False
    )


def _graph() -> Built:
    generator = seeded()
    edges = torch.randint(0, 20, (2, 60), generator=generator)
    return built(GraphNetwork(), torch.randn(20, 12, generator=generator), edges)


def _tagger() -> Built:
    generator = seeded()
    return built(Tagger(), torch.randint(1, 100, (1, 9), generator=generator))


def _recommender() -> Built:
    generator = seeded()
    dense, ids = (
        torch.randn(4, 7, generator=generator),
        torch.randint(0, 50, (4, 3, 5), generator=generator),
    )
    return built(Recommender(), dense, ids)


def _rows(net: type[nn.Module], *args: Any, **options: Any) -> Callable[[], Built]:
    return _plain(lambda: first_of(net(*args, batch_first=True, **options), 0, 1), (1, 7, 16))


def _lstm(**options: Any) -> Callable[[], Built]:
    class States(nn.Module):
        """Rows to all results of an LSTM."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LSTM(16, 24, batch_first=True, **options)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            rows, (h, c) = self.net(x)
            return rows, h, c

    return _plain(States, (1, 7, 16))


def _encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _transformer() -> Built:
    generator = seeded()
    net = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)

    class Masked(nn.Module):
        """Source and target rows to the decoder's rows, causal."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            mask = torch.full((target.shape[1], target.shape[1]), float("-inf")).triu(1)
            return self.net(source, target, tgt_mask=mask, tgt_is_causal=True)

    return built(
        Masked(),
        torch.randn(1, 11, 32, generator=generator),
        torch.randn(1, 6, 32, generator=generator),
    )


def _own(name: str, about: str, build: Callable[[], Built]) -> Model:
    return Model(name, "torch.nn", about, build)


MODELS = (
    _own("rnn", "2 layers, 7 steps", _rows(nn.RNN, 16, 24, 2)),
    _own("lstm", "2 layers, 7 steps", _lstm(num_layers=2)),
    _own("lstm_both_ways", "2 layers, bidirectional", _lstm(num_layers=2, bidirectional=True)),
    _own("gru", "2 layers, 7 steps", _rows(nn.GRU, 16, 24, 2)),
    _own("gru_both_ways", "bidirectional", _rows(nn.GRU, 16, 24, bidirectional=True)),
    _own("tagger", "embedding, two-way LSTM, a CRF's scores", _tagger),
    _own("transformer_encoder", "2 layers, 17 rows", _plain(_encoder, (1, 17, 64))),
    _own(
        "transformer_encoder_norm_first",
        "the same, norms first, GELU",
        _plain(lambda: _encoder(norm_first=True, activation="gelu"), (1, 17, 64)),
    ),
    _own("transformer", "encoder and decoder, causal mask", _transformer),
    _own("unet", "3 levels, 32 pixels", _plain(UNet, (1, 3, 32, 32))),
    _own("diffusion_unet", "group norms, time embedding, attention, 16 pixels", _diffusion),
    _own("dcgan_generator", "transposed convolutions, 32 pixels", _plain(Generator, (1, 32))),
    _own(
        "style_transfer",
        "reflection padding, instance norms, 32 pixels",
        _plain(StyleTransfer, (1, 3, 32, 32)),
    ),
    _own(
        "super_resolution",
        "pixel shuffle by 3, 24 pixels",
        _plain(_super_resolution, (1, 1, 24, 24)),
    ),
    _own("yolo_head", "boxes decoded, best 10 of all, 64 pixels", _plain(YoloHead, (1, 3, 64, 64))),
    _own("nerf", "MLP and volume rendering, 33 rays", _plain(RadianceField, (33, 6))),
    _own("graph_network", "messages by scatter, 20 nodes, 60 edges", _graph),
    _own("wavenet", "dilated causal convolutions, 100 samples", _plain(TemporalNet, (1, 1, 100))),
    _own("selective_scan", "state space layer, 19 rows", _plain(SelectiveScan, (1, 19, 16))),
    _own("recommender", "embedding bags and pairwise products", _recommender),
)

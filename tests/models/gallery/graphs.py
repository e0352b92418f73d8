"""Graph networks and point clouds, written with torch alone.

A graph is an edge list, int64 [2, E], as the libraries for graphs have it: messages are gathered
from the first row, and scattered to the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.models.gallery.model import Model, built, seeded
from tests.models.zoo import Built

NODES, EDGES, WIDTH = 20, 60, 16


def summed(messages: torch.Tensor, to: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of the messages that each node gets."""
    return messages.new_zeros(count, *messages.shape[1:]).index_add(0, to, messages)


def softmax_of(scores: torch.Tensor, to: torch.Tensor, count: int) -> torch.Tensor:
    """Softmax over the edges of each node."""
    index = to[:, None].expand_as(scores)
    highest = scores.new_full((count, scores.shape[1]), -torch.inf)
    highest = highest.scatter_reduce(0, index, scores, "amax")
    weights = (scores - highest[to]).exp()
    return weights / summed(weights, to, count)[to].clamp(min=1e-16)


class Convolution(nn.Module):
    """GCN: sums over neighbours and the node itself, by the square roots of both degrees."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear, self.bias = (
            nn.Linear(inner, outer, bias=False),
            nn.Parameter(torch.zeros(outer)),
        )

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        loops = torch.arange(x.shape[0])
        source, to = torch.cat([edges[0], loops]), torch.cat([edges[1], loops])
        degree = summed(torch.ones(source.shape[0]), to, x.shape[0])
        norm = degree.pow(-0.5)
        norm = norm.masked_fill(norm.isinf(), 0)
        messages = self.linear(x)[source] * (norm[source] * norm[to])[:, None]
        return summed(messages, to, x.shape[0]) + self.bias


class Attention(nn.Module):
    """GAT, version 2: softmax over the edges of a node."""

    def __init__(self, inner: int, outer: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.outer = heads, outer
        self.left, self.right = nn.Linear(inner, heads * outer), nn.Linear(inner, heads * outer)
        self.score = nn.Parameter(torch.randn(heads, outer) * 0.3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, to = edges.unbind()
        left = self.left(x).unflatten(1, (self.heads, self.outer))[source]
        right = self.right(x).unflatten(1, (self.heads, self.outer))[to]
        scores = (F.leaky_relu(left + right, 0.2) * self.score).sum(-1)
        weights = softmax_of(scores, to, x.shape[0])
        return summed(left * weights[..., None], to, x.shape[0]).flatten(1)


class Isomorphism(nn.Module):
    """GIN: an MLP of the sum over neighbours."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inner, outer), nn.ReLU(), nn.Linear(outer, outer))
        self.epsilon = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.net((1 + self.epsilon) * x + summed(x[edges[0]], edges[1], x.shape[0]))


class Sampled(nn.Module):
    """GraphSAGE: means and maxima over neighbours."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.own, self.mean, self.most = (nn.Linear(inner, outer) for _ in range(3))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, to = edges.unbind()
        index = to[:, None].expand(-1, x.shape[1])
        zeros = torch.zeros_like(x)
        mean = zeros.scatter_reduce(0, index, x[source], "mean", include_self=False)
        most = zeros.scatter_reduce(0, index, x[source], "amax", include_self=False)
        return F.normalize(self.own(x) + self.mean(mean) + self.most(most), dim=-1)


class Gated(nn.Module):
    """Gated graph network: GRU cells."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.message, self.cell = nn.Linear(inner, outer), nn.GRUCell(outer, inner)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.cell(summed(self.message(x)[edges[0]], edges[1], x.shape[0]), x)
        return x


class Aggregated(nn.Module):
    """PNA: mean, least, most and deviation, scaled by the logarithm of the degree."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(2 * inner, inner), nn.Linear(13 * inner, outer)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, to = edges.unbind()
        messages = self.before(torch.cat([x[source], x[to]], -1))
        index = to[:, None].expand_as(messages)
        degree = torch.bincount(to, minlength=x.shape[0]).float().clamp(min=1)[:, None]

        def reduced(kind: str, values: torch.Tensor) -> torch.Tensor:
            zeros = torch.zeros_like(x)
            return zeros.scatter_reduce(0, index, values, kind, include_self=False)

        mean = reduced("mean", messages)
        deviation = (reduced("mean", messages**2) - mean**2).clamp(min=0).add(1e-5).sqrt()
        found = torch.cat(
            [mean, reduced("amin", messages), reduced("amax", messages), deviation], -1
        )
        scale = (degree + 1).log() / 1.3
        return self.after(torch.cat([x, found, found * scale, found / scale], -1))


class Relational(nn.Module):
    """R-GCN: a matrix per kind of edge, made of a basis."""

    def __init__(self, inner: int, outer: int, kinds: int = 3, bases: int = 2) -> None:
        super().__init__()
        self.basis = nn.Parameter(torch.randn(bases, inner, outer) * 0.2)
        self.mix, self.root = nn.Parameter(torch.randn(kinds, bases)), nn.Linear(inner, outer)
        self.kinds = kinds

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, to = edges.unbind()
        kind = (source + to) % self.kinds
        weights = torch.einsum("kb,bio->kio", self.mix, self.basis)
        messages = torch.bmm(x[source][:, None], weights[kind])[:, 0]
        return self.root(x) + summed(messages, to, x.shape[0])


class Network(nn.Module):
    """Two layers of a kind, then means over the graphs of a batch: nodes [N, width], edges [2, E]
    and the graph of each node, to a row per graph."""

    def __init__(self, layer: Callable[[int, int], nn.Module], out: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = layer(WIDTH, WIDTH), layer(out, WIDTH)
        self.head = nn.Linear(out, 5)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        x = F.elu(self.first(x, edges))
        x = self.second(x, edges)
        sizes = summed(torch.ones(x.shape[0], 1), graph, 3).clamp(min=1)
        return self.head(summed(x, graph, 3) / sizes)


class Schnet(nn.Module):
    """SchNet: kinds of atoms and positions to an energy: radial functions, continuous filters."""

    def __init__(self, width: int = 24, functions: int = 12) -> None:
        super().__init__()
        self.atoms = nn.Embedding(10, width)
        self.centers = nn.Parameter(torch.linspace(0, 4, functions), requires_grad=False)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(functions, width), nn.Softplus(), nn.Linear(width, width))
            for _ in range(2)
        )
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(width, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, kinds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.atoms(kinds)
        distances = torch.cdist(positions, positions)
        radial = torch.exp(-4 * (distances[..., None] - self.centers) ** 2)
        inside = (distances < 4) & ~torch.eye(len(kinds), dtype=torch.bool)
        cut = 0.5 * (torch.cos(distances * torch.pi / 4) + 1) * inside
        for filters, inner in zip(self.filters, self.inner):
            weights = filters(radial) * cut[..., None]
            x = x + (weights * inner(x)[None]).sum(1)
        return self.head(x).sum(0)


class EdgeConv(nn.Module):
    """DGCNN: nearest neighbours in feature space, found again for each layer. Points [1, N, 3]."""

    def __init__(self, near: int = 6) -> None:
        super().__init__()
        self.near = near
        self.first = nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.2))
        self.second = nn.Sequential(nn.Linear(48, 32), nn.LeakyReLU(0.2))
        self.head = nn.Linear(64, 7)

    def layer(self, x: torch.Tensor, net: nn.Module) -> torch.Tensor:
        near = torch.cdist(x, x).topk(self.near, largest=False).indices
        found = x[torch.arange(x.shape[0])[:, None, None], near]
        own = x[:, :, None].expand_as(found)
        return net(torch.cat([own, found - own], -1)).amax(2)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        x = self.layer(points, self.first)
        x = self.layer(x, self.second)
        return self.head(torch.cat([x.amax(1), x.mean(1)], -1))


class PointNet(nn.Module):
    """PointNet: points [1, N, 3], turned by a predicted matrix, to classes."""

    def __init__(self) -> None:
        super().__init__()

        def shared(*widths: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for inner, outer in itertools.pairwise(widths):
                layers += [nn.Conv1d(inner, outer, 1), nn.BatchNorm1d(outer), nn.ReLU()]
            return nn.Sequential(*layers)

        self.turn, self.matrix = shared(3, 16, 32), nn.Linear(32, 9)
        self.points, self.whole = shared(3, 16, 24), shared(24, 32, 48)
        self.head = nn.Linear(48, 7)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        x = points.transpose(1, 2)
        turn = self.matrix(self.turn(x).amax(-1)).view(-1, 3, 3) + torch.eye(3)
        x = self.points(torch.bmm(points, turn).transpose(1, 2))
        return self.head(self.whole(x).amax(-1))


class PointSets(nn.Module):
    """PointNet++: farthest points, groups within a radius, maxima of each group."""

    def __init__(self, samples: int = 8, near: int = 5, radius: float = 1.0) -> None:
        super().__init__()
        self.samples, self.near, self.radius = samples, near, radius
        self.net = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 32))
        self.head = nn.Linear(32, 7)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        points = points[0]
        distance = torch.full((points.shape[0],), torch.inf)
        chosen = [torch.zeros(1, dtype=torch.int64)]
        for _ in range(self.samples - 1):
            last = points[chosen[-1]]
            distance = torch.minimum(distance, (points - last).square().sum(-1))
            chosen.append(distance.argmax(keepdim=True))
        centers = points[torch.cat(chosen)]
        distances = torch.cdist(centers, points)
        near = distances.topk(self.near, largest=False)
        index = torch.where(near.values > self.radius, near.indices[:, :1], near.indices)
        groups = points[index] - centers[:, None]
        return self.head(self.net(groups).amax(1).amax(0, keepdim=True))


class GraphTransformer(nn.Module):
    """Graphormer: attention over all nodes, biased by degrees and distances."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.degree, self.distance = nn.Embedding(16, WIDTH), nn.Embedding(6, heads)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        adjacent = torch.zeros(count, count).index_put((edges[0], edges[1]), torch.ones(()))
        adjacent = torch.maximum(adjacent, adjacent.T)
        x = x + self.degree(adjacent.sum(-1).long().clamp(max=15))
        steps = torch.full((count, count), 5)
        reach = torch.eye(count)
        for step in range(5):
            steps = torch.where((reach > 0) & (steps == 5), torch.tensor(step), steps)
            reach = reach @ (adjacent + torch.eye(count))
        q, k, v = self.qkv(self.norm(x)).view(count, 3, self.heads, -1).permute(1, 2, 0, 3)
        made = F.scaled_dot_product_attention(
            q[None], k[None], v[None], self.distance(steps).permute(2, 0, 1)[None]
        )
        return self.head(x + self.out(made[0].transpose(0, 1).flatten(1)))


def _network(layer: Callable[[int, int], nn.Module], out: int = WIDTH) -> Callable[[], Built]:
    def build() -> Built:
        generator = seeded()
        edges = torch.randint(0, NODES, (2, EDGES), generator=generator)
        graph = torch.randint(0, 3, (NODES,), generator=generator).sort().values
        return built(
            Network(layer, out), torch.randn(NODES, WIDTH, generator=generator), edges, graph
        )

    return build


def _molecule() -> Built:
    generator = seeded()
    kinds = torch.randint(0, 10, (9,), generator=generator)
    return built(Schnet(), kinds, torch.randn(9, 3, generator=generator) * 1.5)


def _cloud(module: Callable[[], nn.Module]) -> Callable[[], Built]:
    def build() -> Built:
        generator = seeded()
        return built(module(), torch.randn(1, 40, 3, generator=generator))

    return build


def _transformer() -> Built:
    generator = seeded()
    edges = torch.randint(0, NODES, (2, 30), generator=generator)
    return built(GraphTransformer(), torch.randn(NODES, WIDTH, generator=generator), edges)


def _pairs(
    name: str, about: str, layer: Callable[[int, int], nn.Module], out: int = WIDTH
) -> Model:
    return Model(name, "torch.nn", f"{about}, 20 nodes, 60 edges", _network(layer, out))


MODELS = (
    _pairs("gcn", "graph convolutions", Convolution),
    _pairs("gat", "graph attention", Attention, 2 * WIDTH),
    _pairs("gin", "graph isomorphism network", Isomorphism),
    _pairs("graph_sage", "means and maxima of neighbours", Sampled),
    _pairs("gated_graph", "GRU cells on a graph", Gated),
    _pairs("pna", "four aggregations", Aggregated),
    _pairs("rgcn", "kinds of edges", Relational),
    Model("graphormer", "torch.nn", "attention with distances, 20 nodes", _transformer),
    Model("schnet", "torch.nn", "continuous filters, 9 atoms", _molecule),
    Model("dgcnn", "torch.nn", "nearest neighbours, 40 points", _cloud(EdgeConv)),
    Model("pointnet", "torch.nn", "turned points, 40 of them", _cloud(PointNet)),
    Model("pointnet2", "torch.nn", "farthest points and groups, 40 points", _cloud(PointSets)),
)

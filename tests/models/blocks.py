"""Modules written for the tests: an encoder, a decoder with a KV cache, models around a rare
operator."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.nn import functional


class EncoderLayer(nn.Module):
    """A transformer layer, norm first, GELU: float32 [B, T, D] to [B, T, D]."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, dim = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(batch, rows, 3, self.heads, dim // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, rows, dim))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """`layers` transformer layers and a last norm: float32 [B, T, dim] to the same."""

    def __init__(self, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def load_llama_operators() -> None:
    """Register `llama::update_cache` and `llama::custom_sdpa` with torch (they come with
    executorch)."""
    level = logging.root.level
    logging.root.setLevel(logging.WARNING)
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401

    logging.root.setLevel(level)


def rotary_table(
    context: int, head_dim: int, theta: float = 10000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rotary embedding, float32 [context, head_dim / 2]."""
    inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), inverse)
    return angles.cos().float(), angles.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of `x` [B, S, H, D] by the angles of `cos`, `sin` [S, D / 2]."""
    real, imaginary = x.reshape((*x.shape[:-1], -1, 2)).unbind(-1)
    shape = [size if axis in (1, real.ndim - 1) else 1 for axis, size in enumerate(real.shape)]
    cos, sin = cos.view(shape), sin.view(shape)
    return torch.stack(
        [real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1
    ).flatten(3)


def rotate_both(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys, with the operations in the order in which the partitioner looks for
    them.

    It makes one `et_vk.apply_rotary_emb` of this; of `rotate` called twice it makes some 30 nodes
    and 2 CPU kernels.
    """
    q_real, q_imaginary = q.float().reshape((*q.shape[:-1], -1, 2)).unbind(-1)
    k_real, k_imaginary = k.float().reshape((*k.shape[:-1], -1, 2)).unbind(-1)
    shape = [size if axis in (1, q_real.ndim - 1) else 1 for axis, size in enumerate(q_real.shape)]
    cos, sin = cos.view(shape), sin.view(shape)
    q_first = q_real * cos - q_imaginary * sin
    q_second = q_real * sin + q_imaginary * cos
    k_first = k_real * cos - k_imaginary * sin
    k_second = k_real * sin + k_imaginary * cos
    rotated_q = torch.stack([q_first, q_second], dim=-1).flatten(3)
    rotated_k = torch.stack([k_first, k_second], dim=-1).flatten(3)
    return rotated_q.type_as(q), rotated_k.type_as(k)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dim, with a scale."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class DecoderBlock(nn.Module):
    """Grouped-query attention over a KV cache, then SwiGLU; [1, S, D] to [1, S, D]."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, context: int, joint_rotation: bool
    ) -> None:
        super().__init__()
        self.joint_rotation = joint_rotation
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.gate = nn.Linear(dim, 3 * dim, bias=False)
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)
        self.register_buffer("k_cache", torch.zeros(1, context, kv_heads, self.head_dim))
        self.register_buffer("v_cache", torch.zeros(1, context, kv_heads, self.head_dim))

    def forward(
        self, x: torch.Tensor, input_pos: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        batch, rows, dim = x.shape
        h = self.norm1(x)
        q = self.wq(h).view(batch, rows, self.heads, self.head_dim)
        k = self.wk(h).view(batch, rows, self.kv_heads, self.head_dim)
        if self.joint_rotation:
            q, k = rotate_both(q, k, cos, sin)
        else:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        v = self.wv(h).view(batch, rows, self.kv_heads, self.head_dim)
        start = input_pos[0].item()
        torch._check(start >= 0)
        torch._check(start + rows <= self.k_cache.size(1))
        torch.ops.llama.update_cache(k, self.k_cache, start)
        torch.ops.llama.update_cache(v, self.v_cache, start)
        attended = torch.ops.llama.custom_sdpa(
            q, self.k_cache, self.v_cache, start, None, 0.0, True
        )
        x = x + self.wo(attended.view(batch, rows, dim))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Tokens int64 [1, S] and the first one's position, int64 [1], to logits [1, S, vocab]. Keeps a
    KV cache."""

    def __init__(
        self,
        layers: int,
        dim: int,
        heads: int,
        kv_heads: int,
        vocab: int,
        context: int,
        joint_rotation: bool,
    ) -> None:
        super().__init__()
        load_llama_operators()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            DecoderBlock(dim, heads, kv_heads, context, joint_rotation) for _ in range(layers)
        )
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        cos, sin = rotary_table(context, dim // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        # Gathered, not sliced from a SymInt: executorch's passes run the delegate's graph again
        # with a fresh symbol that has lost its bounds, and the fake slice cannot decide whether it
        # is negative.
        positions = input_pos + torch.arange(tokens.shape[1])
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, input_pos, cos, sin)
        return self.head(self.norm(x))


class AroundInverse(nn.Module):
    """A linear, the inverse of a well-conditioned matrix, a linear: float32 [1, 40, 32] to [1, 40,
    8]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 24)
        self.last = nn.Linear(40, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        matrix = torch.matmul(h, h.transpose(1, 2)) * 0.05 + torch.eye(40)
        return torch.relu(self.last(torch.linalg.inv_ex(matrix).inverse))


class AroundCumsum(nn.Module):
    """A convolution, a cumulative sum along the rows, a linear: float32 [1, 3, 16, 16] to [1, 8,
    16, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cumsum(torch.relu(self.first(x)), dim=2) * 0.1)

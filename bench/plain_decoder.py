"""The reference decoder in plain torch operators, for devices and machines without executorch's
llama operators."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tests.models import blocks
from tests.models.zoo import CASES, Built


class PlainDecoder(torch.nn.Module):
    """Tokens int64 [1, S] and the first one's position, int64 [1], to logits [1, S, vocab]: the
    weights of a `Decoder`, its cache written by `index_copy_` and read by
    `scaled_dot_product_attention` under a mask. Nothing waits for the device, so a call can be
    captured as a CUDA graph."""

    def __init__(self, decoder: blocks.Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        rows = decoder.blocks[0].k_cache.shape[1]
        self.register_buffer("rows", torch.arange(rows), persistent=False)

    def forward(self, tokens: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        decoder = self.decoder
        positions = input_pos + self.rows[: tokens.shape[1]]
        cos, sin = decoder.cos[positions], decoder.sin[positions]
        mask = self.rows[None, :] <= positions[:, None]
        x = decoder.embedding(tokens)
        for block in decoder.blocks:
            x = self._block(block, x, positions, mask, cos, sin)
        return decoder.head(decoder.norm(x))

    def _block(
        self,
        block: Any,
        x: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        batch, rows, dim = x.shape
        h = block.norm1(x)
        q = blocks.rotate(block.wq(h).view(batch, rows, block.heads, block.head_dim), cos, sin)
        k = blocks.rotate(block.wk(h).view(batch, rows, block.kv_heads, block.head_dim), cos, sin)
        v = block.wv(h).view(batch, rows, block.kv_heads, block.head_dim)
        block.k_cache.index_copy_(1, positions, k)
        block.v_cache.index_copy_(1, positions, v)
        q, keys, values = (each.transpose(1, 2) for each in (q, block.k_cache, block.v_cache))
        attended = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, enable_gqa=True
        )
        x = x + block.wo(attended.transpose(1, 2).reshape(batch, rows, dim))
        h = block.norm2(x)
        return x + block.down(functional.silu(block.gate(h)) * block.up(h))


def build(name: str) -> Built:
    """A case of the zoo, its decoders in plain operators. Needs no executorch."""
    if not name.startswith("decoder"):
        return CASES[name].build()
    load, blocks.load_llama_operators = blocks.load_llama_operators, lambda: None
    try:
        built = CASES[name].build()
    finally:
        blocks.load_llama_operators = load
    plain = PlainDecoder(built.module).eval()
    return Built(
        plain,
        built.inputs,
        built.samples,
        built.dynamic_shapes,
        built.stateful,
        built.constant_methods,
    )

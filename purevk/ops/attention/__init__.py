"""Attention and rotary embeddings."""

from purevk.ops.attention import (  # noqa: F401
    attention,
    cache,
    choice,
    flex,
    gated_delta,
    rotary,
    rotary_cache,
)

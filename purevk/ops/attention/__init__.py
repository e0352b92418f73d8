"""Attention and rotary embeddings."""

from purevk.ops.attention import (  # noqa: F401
    attention,
    cache,
    choice,
    flex,
    rotary,
    rotary_cache,
)

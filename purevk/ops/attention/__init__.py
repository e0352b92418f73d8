"""Attention and rotary embeddings."""

from purevk.ops.attention import attention, cache, choice, flex, rotary, rotary_cache  # noqa: F401

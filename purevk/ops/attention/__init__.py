"""Attention and rotary embeddings."""

from purevk.ops.attention import attention, cache, choice, rotary  # noqa: F401

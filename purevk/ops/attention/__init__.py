"""Attention and rotary embeddings."""

from purevk.ops.attention import attention, cache, choice, flex, rotary  # noqa: F401

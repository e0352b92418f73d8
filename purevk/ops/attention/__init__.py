"""Attention and rotary embeddings."""

from purevk.ops.attention import attention, choice, rotary  # noqa: F401

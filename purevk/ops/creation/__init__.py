"""Tensors made from numbers: filled, ranges."""

from purevk.ops.creation import creation, fill  # noqa: F401

"""Tensors made from numbers: filled, ranges, random."""

from purevk.ops.creation import creation, fill, random  # noqa: F401

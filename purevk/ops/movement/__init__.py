"""Data movement: views, concatenation, padding, flips, shuffles."""

from purevk.ops.movement import bits, cat, patches, rearrange, slices, views  # noqa: F401

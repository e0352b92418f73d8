"""Data movement: views, concatenation, padding, flips, shuffles."""

from purevk.ops.movement import cat, patches, rearrange, views  # noqa: F401

"""Pooling and resizing."""

from purevk.ops.image import pool_nd, pooling, resample, resample_coarsened  # noqa: F401

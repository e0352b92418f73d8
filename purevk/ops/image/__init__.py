"""Pooling and resizing."""

from purevk.ops.image import fractional_pool, pool_nd, pooling, resample, resample_coarsened  # noqa: F401

"""Reductions: sums, statistics, scans, softmax, norms."""

from purevk.ops.reduce import (  # noqa: F401
    group_norm,
    normalization,
    reduction,
    scan,
    segment_reduce,
    softmax,
    statistics,
)

"""Reductions: sums, statistics, scans, softmax, norms."""

from purevk.ops.reduce import group_norm, normalization, reduction, scan, softmax, statistics  # noqa: F401

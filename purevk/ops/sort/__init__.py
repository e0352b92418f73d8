"""Sorting, selection by rank, histograms."""

from purevk.ops.sort import histogram, search, selection, sort  # noqa: F401

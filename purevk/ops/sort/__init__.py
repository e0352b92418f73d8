"""Sorting, selection by rank, histograms."""

from purevk.ops.sort import histogram, selection, sort  # noqa: F401

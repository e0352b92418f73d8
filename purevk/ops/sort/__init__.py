"""Sorting, selection by rank, histograms."""

from purevk.ops.sort import histogram, ranked, search, selection, sort  # noqa: F401

"""Gather, scatter, and indexing by tensors or masks."""

from purevk.ops.index import data_dependent, gather, indexing, masked, scatter, scatter_tiles  # noqa: F401

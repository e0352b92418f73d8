"""Gather, scatter, and indexing by tensors or masks."""

from purevk.ops.index import (  # noqa: F401
    check,
    data_dependent,
    embedding,
    gather,
    indexing,
    masked,
    scatter,
    scatter_tiles,
)

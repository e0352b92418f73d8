"""Passes for decoders: caches, rotary embeddings, matmuls of few rows."""

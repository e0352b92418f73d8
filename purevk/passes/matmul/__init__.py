"""Passes that choose how matmuls read their operands."""

"""Pointwise programs that become one, or part of a kernel or of a concatenation."""

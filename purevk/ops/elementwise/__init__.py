"""Operators on one element at a time."""

from purevk.ops.elementwise import functions, kernels, pointwise, program, special  # noqa: F401

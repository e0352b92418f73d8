"""Pointwise operators, and programs of them."""

from purevk.ops.elementwise import functions, kernels, pointwise, program, special  # noqa: F401

"""Pointwise operators, and programs of them."""

from purevk.ops.elementwise import float8, functions, kernels, pointwise, program, special  # noqa: F401

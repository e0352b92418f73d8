"""Pointwise operators, and programs of them."""

from purevk.ops.elementwise import float8, functions, kernels, operators, program, special  # noqa: F401

"""Matmuls, and recurrent layers made of them."""

from purevk.ops.matmul import choice, few_rows, grouped, matmul, recurrent  # noqa: F401

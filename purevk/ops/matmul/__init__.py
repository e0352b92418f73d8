"""Matmuls, and recurrent layers made of them."""

from purevk.ops.matmul import choice, grouped, matmul, recurrent  # noqa: F401

"""Matmuls, and recurrent layers made of them."""

from purevk.ops.matmul import choice, matmul, recurrent  # noqa: F401

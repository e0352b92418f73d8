"""Matmuls, and recurrent layers made of them."""

from purevk.ops.matmul import (  # noqa: F401
    choice,
    few_rows,
    fragments,
    fused,
    grouped,
    matmul,
    operators,
    recurrent,
)

"""Matmuls, and recurrent layers made of them."""

from purevk.ops.matmul import (  # noqa: F401
    choice,
    few_rows,
    fragments,
    fused,
    gated_delta,
    grouped,
    matmul,
    operators,
    recurrent,
)

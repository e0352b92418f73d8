"""Quantization, and operators on quantized values."""

from purevk.ops.quantized import (  # noqa: F401
    choice,
    convolution,
    embedding,
    few_rows,
    linear,
    matmul,
    parameters,
    pointwise,
    quantize,
)

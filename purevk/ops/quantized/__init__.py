"""Quantization, and operators on quantized values."""

from purevk.ops.quantized import (  # noqa: F401
    choice,
    convolution,
    embedding,
    linear,
    matmul,
    parameters,
    pointwise,
    quantize,
)

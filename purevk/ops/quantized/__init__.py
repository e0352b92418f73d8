"""Quantization, and operators on quantized values."""

from purevk.ops.quantized import (  # noqa: F401
    choice,
    convolution,
    embedding,
    fake_quantize,
    linear,
    matmul,
    parameters,
    pointwise,
    quantize,
)

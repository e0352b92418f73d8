"""Quantization, and operators on quantized values."""

from purevk.ops.quantized import (  # noqa: F401
    choice,
    convolution,
    embedding,
    linear,
    parameters,
    pointwise,
    quantize,
)

"""The operators: one row each, one file a family. Importing this package registers them all."""

from purevk.ops import (  # noqa: F401
    attention, convolution, convolution_nd, creation, earlier, fill, gather, group_norm, indexing, linalg, matmul, normalization, pointwise, pointwise_kernel, pooling, quantize, quantize_parameters, quantized_convolution, quantized_embedding, quantized_linear, quantized_pointwise, random, rearrange, recurrent, reduction, resample, rotary, scan, scatter, softmax, sort, special, statistics, training, views, windows,
)  # fmt: skip

"""The operators: one row each, one file a family. Importing this package registers them all.

What a user calls to add operators (docs/extending.md) is here too: `register_executor` for the CPU,
`register_pointwise` and `register_kernel` for the GPU, `list_registered_ops` to see what there is.
"""

from purevk.dtypes import DType
from purevk.ir import TensorType
from purevk.ops import (  # noqa: F401
    attention,
    control,
    convolution,
    convolution_nd,
    counted,
    creation,
    double,
    earlier,
    factorize,
    fill,
    functions,
    gather,
    group_norm,
    indexing,
    linalg,
    masked,
    matmul,
    normalization,
    pointwise,
    pointwise_kernel,
    pooling,
    quantize,
    quantize_parameters,
    quantized_convolution,
    quantized_embedding,
    quantized_linear,
    quantized_pointwise,
    random,
    rearrange,
    recurrent,
    reduction,
    resample,
    rotary,
    scan,
    scatter,
    segments,
    softmax,
    sort,
    special,
    spectra,
    statistics,
    training,
    views,
    windows,
)
from purevk.ops.executors import register_executor, unregister_executor
from purevk.ops.extension import (
    RegisteredOp,
    list_registered_ops,
    register_kernel,
    register_pointwise,
    unregister,
)
from purevk.ops.registry import ShapeError

__all__ = [
    "DType", "RegisteredOp", "ShapeError", "TensorType", "list_registered_ops", "register_executor", "register_kernel",
    "register_pointwise", "unregister", "unregister_executor",
]  # fmt: skip

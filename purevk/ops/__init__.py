"""The operators: one row each, one package for each family. Importing this package registers them all.

What a user calls to add operators (docs/extending.md) is here too: `register_executor` for the CPU,
`register_pointwise` and `register_kernel` for the GPU, `list_registered_ops` to see what there is.
"""

from purevk.dtypes import DType
from purevk.ir import TensorType
from purevk.ops import (  # noqa: F401
    attention,
    complex,
    control,
    conv,
    creation,
    double,
    elementwise,
    executorch,
    fft,
    image,
    index,
    large_tensors,
    linalg,
    long_rows,
    map,
    matmul,
    movement,
    quantized,
    random,
    reduce,
    sort,
)
from purevk.ops.executors import (
    allow_operator,
    disallow_operator,
    register_executor,
    unregister_executor,
)
from purevk.ops.extension import (
    RegisteredOp,
    list_registered_ops,
    register_kernel,
    register_pointwise,
    unregister,
)
from purevk.ops.registry import ShapeError

__all__ = [
    "DType", "RegisteredOp", "ShapeError", "TensorType", "allow_operator", "disallow_operator", "list_registered_ops",
    "register_executor", "register_kernel", "register_pointwise", "unregister", "unregister_executor",
]  # fmt: skip

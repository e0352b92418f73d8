"""Cholesky factors of small matrices, and the solutions that follow from them."""

from __future__ import annotations

from purevk.ir import TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.linalg.small import (
    INT,
    eye,
    factorization,
    matrix_kernel,
    matrix_transpose,
    with_info,
)
from purevk.ops.linalg.triangular import solve_triangle, triangle_shape


def _cholesky(builder: Builder, a: Value, upper: bool) -> tuple[Value, Value]:
    a = matrix_transpose(builder, a) if upper else a
    info_type = TensorType(INT, a.type.dims[:-2])
    numbers = {"rows": a.type.dims[-1]}
    made, info = matrix_kernel(builder, "cholesky", {"A": a}, numbers, a.type, info_type)
    return matrix_transpose(builder, made) if upper else made, builder.aten.view(
        info, info_type.dims
    )


def _cholesky_shape(
    a: TensorType, upper: bool = False, check_errors: bool = False
) -> tuple[TensorType, TensorType]:
    return with_info(a)


factorization(
    "linalg_cholesky_ex",
    _cholesky_shape,
    lambda builder, node, a, upper, check_errors: _cholesky(builder, a, upper),
)
factorization(
    "cholesky",
    lambda a, upper=False: _cholesky_shape(a)[0],
    lambda builder, node, a, upper: _cholesky(builder, a, upper)[0],
)


def _cholesky_solve(builder: Builder, factor: Value, b: Value, upper: bool) -> Value:
    transposed = matrix_transpose(builder, factor)
    low, high = (transposed, factor) if upper else (factor, transposed)
    return solve_triangle(builder, high, solve_triangle(builder, low, b, False), True)


factorization(
    "cholesky_solve",
    lambda b, factor, upper=False: triangle_shape(factor, b),
    lambda builder, node, b, factor, upper: _cholesky_solve(builder, factor, b, upper),
)
factorization(
    "cholesky_inverse",
    lambda factor, upper=False: factor,
    lambda builder, node, factor, upper: _cholesky_solve(
        builder, factor, eye(builder, factor.type, *factor.type.dims[-2:]), upper
    ),
)

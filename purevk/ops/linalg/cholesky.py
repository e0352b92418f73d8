"""Cholesky factors of small matrices, and the solutions that follow from them."""

from __future__ import annotations

from purevk.ir import TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.linalg.small import (
    INT,
    eye,
    factorization,
    lead,
    matrix_transpose,
    over_matrices,
    with_info,
)
from purevk.ops.linalg.triangular import solve_triangle, triangle_shape
from purevk.ops.map import mapped_over_all


def _cholesky(builder: Builder, a: Value, upper: bool) -> tuple[Value, Value]:
    a = matrix_transpose(builder, a) if upper else a
    at = lead(a.type)
    batch = at.rstrip(", ") or "0"
    body = (
        f"LOOPS(loop(rows, 2 * loop(rows) + loop(rows, loop(rows))))"
        f" int info = 0; for (int j = 0; j < rows; j++) {{ float d = A({at}j, j); for (int k = 0; k"
        f" < j; k++) d -= R({at}j, k) * R({at}j, k);"
        f" if (!(d > 0.0) && info == 0) info = j + 1; d = sqrt(d); R_PUT({at}j, j, d);"
        f" for (int i = 0; i < j; i++) R_PUT({at}i, j, 0.0); for (int i = j + 1; i < rows; i++) {{"
        f" float sum = A({at}i, j);"
        f" for (int k = 0; k < j; k++) sum -= R({at}i, k) * R({at}j, k); R_PUT({at}i, j, sum / d);"
        f" }} }} R1_PUT({batch}, info);"
    )
    info_type = TensorType(INT, a.type.dims[:-2])
    wide = info_type if info_type.rank else info_type.with_dims((1,))
    made, info = mapped_over_all(
        builder,
        body,
        {"A": a},
        over_matrices(a.type),
        a.type,
        wide,
        numbers={"rows": a.type.dims[-1]},
    )
    return matrix_transpose(builder, made) if upper else made, builder.emit(
        "aten.view.default", info, info_type.dims
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

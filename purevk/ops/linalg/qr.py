"""QR factors of small matrices, from Householder's reflections."""

from __future__ import annotations

from purevk.ir import Node, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.linalg.small import (
    eye,
    factorization,
    lead,
    matrix_transpose,
    over_matrices,
    triangle,
)
from purevk.ops.map import mapped_over, mapped_over_all


def _qr_types(a: TensorType) -> tuple[TensorType, TensorType]:
    return a, a.with_dims((*a.dims[:-2], _dims.minimum(a.dims[-2], a.dims[-1])))


def _reflectors(builder: Builder, a: Value) -> tuple[Value, Value]:
    """R with Householder's vectors below its diagonal, and their factors."""
    at = lead(a.type)
    body = (
        "LOOPS(loop(rows, loop(columns)))"
        " LOOPS(loop(columns, 2 * loop(rows) + loop(columns, 2 * loop(rows)))) "
        f"for (int i = 0; i < rows; i++) for (int j = 0; j < columns; j++) R_PUT({at}i, j, A({at}i, j));"
        f" for (int k = 0; k < min(rows, columns); k++) {{ float below = 0.0, head = R({at}k, k), tau = 0.0;"
        f" for (int i = k + 1; i < rows; i++) below += R({at}i, k) * R({at}i, k);"
        f" if (below > 0.0) {{ float b = head > 0.0 ? -sqrt(head * head + below) : sqrt(head *"
        f" head + below); tau = (b - head) / b;"
        f" for (int i = k + 1; i < rows; i++) R_PUT({at}i, k, R({at}i, k) / (head - b)); R_PUT({at}k, k, b);"
        f" for (int j = k + 1; j < columns; j++) {{ float s = R({at}k, j); for (int i = k + 1; i <"
        f" rows; i++) s += R({at}i, k) * R({at}i, j);"
        f" s *= tau; R_PUT({at}k, j, R({at}k, j) - s); for (int i = k + 1; i < rows; i++)"
        f" R_PUT({at}i, j, R({at}i, j) - s * R({at}i, k)); }} }}"
        f" R1_PUT({at}k, tau); }}"
    )
    numbers = {"rows": a.type.dims[-2], "columns": a.type.dims[-1]}
    r, factors = mapped_over_all(
        builder, body, {"A": a}, over_matrices(a.type), *_qr_types(a.type), numbers=numbers
    )
    return r, factors


def _reflect(builder: Builder, vectors: Value, factors: Value, x: Value, transpose: bool) -> Value:
    """The product of the reflections with x, or that of their transpose."""
    at, c = lead(x.type), f"i{x.type.rank - 2}"
    walk = "int k = 0; k < count; k++" if transpose else "int k = count - 1; k >= 0; k--"
    body = (
        f"LOOPS(loop(rows) + loop(count, 2 * loop(rows)))"
        f" for (int i = 0; i < rows; i++) R_PUT({at}i, {c}, X({at}i, {c})); for ({walk}) {{ float s = R({at}k, {c});"
        f" for (int i = k + 1; i < rows; i++) s += V({at}i, k) * R({at}i, {c}); s *= TAU({at}k);"
        f" R_PUT({at}k, {c}, R({at}k, {c}) - s);"
        f" for (int i = k + 1; i < rows; i++) R_PUT({at}i, {c}, R({at}i, {c}) - s * V({at}i, k)); }}"
    )
    numbers = {"rows": x.type.dims[-2], "count": factors.type.dims[-1]}
    over = (*x.type.dims[:-2], x.type.dims[-1])
    return mapped_over(
        builder, body, {"V": vectors, "TAU": factors, "X": x}, over, x.type, numbers=numbers
    )


factorization("geqrf", _qr_types, lambda builder, node, a: _reflectors(builder, a))


def _qr_shape(a: TensorType, mode: str = "reduced") -> tuple[TensorType, TensorType]:
    rows, columns = a.dims[-2:]
    count = rows if mode == "complete" else _dims.minimum(rows, columns)
    q = a.with_dims((0,)) if mode == "r" else a.with_dims((*a.dims[:-2], rows, count))
    return q, a.with_dims((*a.dims[:-2], count, columns))


def _qr(builder: Builder, node: Node, a: Value, mode: str) -> tuple[Value, Value]:
    packed, factors = _reflectors(builder, a)
    q, r = (value.type for value in node.results)
    upper = triangle(
        builder, builder.emit("aten.slice.Tensor", packed, a.type.rank - 2, 0, r.dims[-2], 1), True
    )
    if mode == "r":
        return builder.emit("aten.full.default", (0,), 0.0, a.type.dtype), upper
    return _reflect(builder, packed, factors, eye(builder, a.type, *q.dims[-2:]), False), upper


factorization("linalg_qr", _qr_shape, _qr)
factorization(
    "linalg_householder_product",
    lambda vectors, factors: vectors,
    lambda builder, node, vectors, factors: _reflect(
        builder, vectors, factors, eye(builder, vectors.type, *vectors.type.dims[-2:]), False
    ),
    "aten.orgqr.default",
)


def _multiply_reflected(
    builder: Builder,
    node: Node,
    vectors: Value,
    factors: Value,
    x: Value,
    left: bool,
    transpose: bool,
) -> Value:
    if left:
        return _reflect(builder, vectors, factors, x, transpose)
    return matrix_transpose(
        builder, _reflect(builder, vectors, factors, matrix_transpose(builder, x), not transpose)
    )


factorization(
    "ormqr", lambda vectors, factors, x, left=True, transpose=False: x, _multiply_reflected
)

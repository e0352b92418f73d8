"""QR factors of small matrices, from Householder's reflections."""

from __future__ import annotations

from purevk.ir import Node, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.linalg.small import (
    eye,
    factorization,
    matrix_kernel,
    matrix_transpose,
    triangle,
)


def _qr_types(a: TensorType) -> tuple[TensorType, TensorType]:
    return a, a.with_dims((*a.dims[:-2], _dims.minimum(a.dims[-2], a.dims[-1])))


def _reflectors(builder: Builder, a: Value) -> tuple[Value, Value]:
    """R with Householder's vectors below its diagonal, and their factors."""
    numbers = {"rows": a.type.dims[-2], "columns": a.type.dims[-1]}
    r, factors = matrix_kernel(builder, "reflectors", {"A": a}, numbers, *_qr_types(a.type))
    return r, factors


def _reflect(builder: Builder, vectors: Value, factors: Value, x: Value, transpose: bool) -> Value:
    """The product of the reflections with x, or that of their transpose."""
    numbers = {"rows": x.type.dims[-2], "count": factors.type.dims[-1]}
    inputs = {"V": vectors, "TAU": factors, "X": x}
    return matrix_kernel(builder, "reflect", inputs, numbers, x.type, FORWARD=int(transpose))[0]


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
        builder, builder.aten.slice.Tensor(packed, a.type.rank - 2, start=0, end=r.dims[-2]), True
    )
    if mode == "r":
        return builder.aten.full((0,), fill_value=0.0, dtype=a.type.dtype), upper
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

"""QR factors, from Householder's reflections."""

from __future__ import annotations

from collections.abc import Callable

from purevk.ir import Node, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.linalg.reflections import MOST, reflect, reflections, upper_factor
from purevk.ops.linalg.small import eye, matrix_transpose, refuse_type
from purevk.ops.registry import Made, Types, rewrite
from purevk.tuning import DeviceTraits


def _refuse(node: Node, traits: DeviceTraits) -> str | None:
    for value in node.inputs:
        why = refuse_type(value.type)
        if why:
            return why
    rows, columns = node.inputs[0].type.dims[-2:]
    if _dims.upper(_dims.minimum(rows, columns)) > MOST:
        return f"no kernel for more than {MOST} reflections"
    return None


def _operator(
    name: str, shape: Callable[..., Types], expand: Callable[..., Made], *names: str
) -> None:
    rewrite(f"aten.{name}.default", shape, *names, supports=_refuse)(expand)


def _packed_shape(a: TensorType) -> tuple[TensorType, TensorType]:
    return a, a.with_dims((*a.dims[:-2], _dims.minimum(a.dims[-2], a.dims[-1])))


_operator("geqrf", _packed_shape, lambda builder, node, a: reflections(builder, a))


def _qr_shape(a: TensorType, mode: str = "reduced") -> tuple[TensorType, TensorType]:
    rows, columns = a.dims[-2:]
    count = rows if mode == "complete" else _dims.minimum(rows, columns)
    q = a.with_dims((0,)) if mode == "r" else a.with_dims((*a.dims[:-2], rows, count))
    return q, a.with_dims((*a.dims[:-2], count, columns))


def _qr(builder: Builder, node: Node, a: Value, mode: str) -> tuple[Value, Value]:
    packed, factors = reflections(builder, a)
    q, r = (value.type for value in node.results)
    upper = upper_factor(builder, packed, r.dims[-2])
    if mode == "r":
        return builder.aten.full((0,), fill_value=0.0, dtype=a.type.dtype), upper
    return reflect(builder, packed, factors, eye(builder, a.type, *q.dims[-2:]), False), upper


_operator("linalg_qr", _qr_shape, _qr)
_operator(
    "linalg_householder_product",
    lambda vectors, factors: vectors,
    lambda builder, node, vectors, factors: reflect(
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
        return reflect(builder, vectors, factors, x, transpose)
    return matrix_transpose(
        builder, reflect(builder, vectors, factors, matrix_transpose(builder, x), not transpose)
    )


_operator("ormqr", lambda vectors, factors, x, left=True, transpose=False: x, _multiply_reflected)

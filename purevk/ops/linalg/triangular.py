"""Solutions of triangular systems of small matrices."""

from __future__ import annotations

from purevk.ir import Node, TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.linalg.small import factorization, matrix_kernel, matrix_transpose
from purevk.ops.shapes import broadcast
from purevk.ops.signatures import signature


def solve_triangle(builder: Builder, a: Value, b: Value, upper: bool, unit: bool = False) -> Value:
    """The x with a x = b, where `a` is one triangle of a matrix."""
    batch = broadcast(a.type.dims[:-2], b.type.dims[:-2])
    a, b = (builder.aten.expand(each, (*batch, *each.type.dims[-2:])) for each in (a, b))
    inputs, numbers = {"A": a, "B": b}, {"rows": b.type.dims[-2]}
    options = {"FORWARD": int(not upper), "UNIT": int(unit)}
    return matrix_kernel(builder, "solve", inputs, numbers, b.type, **options)[0]


def _solve_triangular(
    builder: Builder, node: Node, a: Value, b: Value, upper: bool, left: bool, unit: bool
) -> Value:
    if left:
        return solve_triangle(builder, a, b, upper, unit)
    return matrix_transpose(
        builder,
        solve_triangle(
            builder, matrix_transpose(builder, a), matrix_transpose(builder, b), not upper, unit
        ),
    )


def triangle_shape(a: TensorType, b: TensorType) -> TensorType:
    return b.with_dims((*broadcast(a.dims[:-2], b.dims[:-2]), *b.dims[-2:]))


factorization(
    "linalg_solve_triangular",
    lambda a, b, upper, left=True, unitriangular=False: triangle_shape(a, b),
    _solve_triangular,
)


@signature("b, a, upper=True, transpose=False, unitriangular=False")
def _older_triangular_shape(b: TensorType, a: TensorType) -> tuple[TensorType, TensorType]:
    made = triangle_shape(a, b)
    return made, a.with_dims((*made.dims[:-2], *a.dims[-2:]))


def _older_triangular(
    builder: Builder, node: Node, b: Value, a: Value, upper: bool, transpose: bool, unit: bool
) -> tuple[Value, Value]:
    wide = builder.aten.expand(a, node.results[1].type.dims)
    if transpose:
        a, upper = matrix_transpose(builder, a), not upper
    return solve_triangle(builder, a, b, upper, unit), builder.purevk.copy(wide)


factorization("triangular_solve", _older_triangular_shape, _older_triangular)

"""LU factors of small matrices, and what follows from them: solutions, inverses, determinants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.linalg.small import (
    INT,
    eye,
    factorization,
    lead,
    matrix_kernel,
    matrix_transpose,
    require_square,
    triangle,
    with_info,
)
from purevk.ops.linalg.triangular import solve_triangle
from purevk.ops.map import mapped, mapped_all
from purevk.ops.promotion import real_dtype
from purevk.ops.registry import ShapeError
from purevk.ops.shapes import broadcast


def _lu_types(a: TensorType) -> tuple[TensorType, TensorType, TensorType]:
    if a.rank < 2:
        raise ShapeError(f"{a} is no matrix")
    count = _dims.minimum(a.dims[-2], a.dims[-1])
    return a, TensorType(INT, (*a.dims[:-2], count)), TensorType(INT, a.dims[:-2])


def _lu(builder: Builder, a: Value) -> tuple[Value, Value, Value]:
    """Both factors in one matrix, the row (from 1 on) that each row is swapped with, and the first
    column without a pivot, or 0."""
    types = _lu_types(a.type)
    numbers = {"rows": a.type.dims[-2], "columns": a.type.dims[-1]}
    lu, pivots, info = matrix_kernel(builder, "lu", {"A": a}, numbers, *types)
    return lu, pivots, builder.aten.view(info, types[2].dims)


def _order(builder: Builder, pivots: Value, rows: Size) -> Value:
    """For each row after the swaps, the row that it was before."""
    *batch, count = pivots.type.dims
    at, mine = lead(pivots.type, 1), f"i{len(batch)}"
    body = f"LOOPS(loop(count)) r = {mine}; UNDO_SWAPS(count, PIVOT({at}k))"
    return mapped(
        builder, body, {"PIVOT": pivots}, TensorType(INT, (*batch, rows)), numbers={"count": count}
    )


def _swapped(builder: Builder, b: Value, order: Value) -> Value:
    """The rows of a matrix in an order."""
    at, r, c = lead(b.type), f"i{b.type.rank - 2}", f"i{b.type.rank - 1}"
    return mapped(builder, f"r = B({at}ORDER({at}{r}), {c});", {"B": b, "ORDER": order}, b.type)


def _unswapped(builder: Builder, b: Value, order: Value) -> Value:
    """The rows of a matrix back from an order."""
    at, r, c = lead(b.type), f"i{b.type.rank - 2}", f"i{b.type.rank - 1}"
    body = f"LOOPS(loop(rows)) FIND_LAST(k, 0, rows, ORDER({at}k) == {r}, 0) r = B({at}found, {c});"
    return mapped(
        builder, body, {"B": b, "ORDER": order}, b.type, numbers={"rows": b.type.dims[-2]}
    )


def _lu_solve(builder: Builder, lu: Value, pivots: Value, b: Value, adjoint: bool = False) -> Value:
    batch = broadcast(lu.type.dims[:-2], b.type.dims[:-2])
    lu, b = (builder.aten.expand(each, (*batch, *each.type.dims[-2:])) for each in (lu, b))
    pivots = builder.aten.expand(pivots, (*batch, pivots.type.dims[-1]))
    order = _order(builder, pivots, lu.type.dims[-2])
    if adjoint:
        transposed = matrix_transpose(builder, lu)
        y = solve_triangle(builder, transposed, b, False)
        return _unswapped(builder, solve_triangle(builder, transposed, y, True, unit=True), order)
    y = solve_triangle(builder, lu, _swapped(builder, b, order), False, unit=True)
    return solve_triangle(builder, lu, y, True)


factorization(
    "linalg_lu_factor_ex",
    lambda a, pivot=True, check_errors=False: _lu_types(a),
    lambda builder, node, a, pivot, check_errors: _lu(builder, a),
)


def _is_vector(a: TensorType, b: TensorType) -> bool:
    return b.rank == 1 or (a.rank - 1 == b.rank and b.dims == a.dims[:-1])


def _solve_shape(
    a: TensorType, b: TensorType, left: bool = True, check_errors: bool = False
) -> tuple[TensorType, ...]:
    require_square(a)
    if _is_vector(a, b):
        made = b.with_dims((*a.dims[:-2], b.dims[-1]))
    else:
        made = b.with_dims((*broadcast(a.dims[:-2], b.dims[:-2]), *b.dims[-2:]))
    return made, *_lu_types(a)


def _solve(
    builder: Builder, node: Node, a: Value, b: Value, left: bool, check_errors: bool
) -> tuple[Value, ...]:
    lu, pivots, info = _lu(builder, a)
    if _is_vector(a.type, b.type):
        made = _lu_solve(builder, lu, pivots, builder.aten.unsqueeze(b, b.type.rank))
        made = builder.aten.view(made, node.results[0].type.dims)
    elif left:
        made = _lu_solve(builder, lu, pivots, b)
    else:
        made = matrix_transpose(
            builder, _lu_solve(builder, lu, pivots, matrix_transpose(builder, b), adjoint=True)
        )
    return made, lu, pivots, info


factorization("_linalg_solve_ex", _solve_shape, _solve)


def _lu_solve_any(
    builder: Builder, node: Node, lu: Value, pivots: Value, b: Value, left: bool, adjoint: bool
) -> Value:
    if left:
        return _lu_solve(builder, lu, pivots, b, adjoint)
    return matrix_transpose(
        builder, _lu_solve(builder, lu, pivots, matrix_transpose(builder, b), not adjoint)
    )


factorization(
    "linalg_lu_solve",
    lambda lu, pivots, b, left=True, adjoint=False: _solve_shape(lu, b)[0],
    _lu_solve_any,
)


def _inverse(builder: Builder, node: Node, a: Value, check_errors: bool) -> tuple[Value, Value]:
    lu, pivots, info = _lu(builder, a)
    return _lu_solve(builder, lu, pivots, eye(builder, a.type, *a.type.dims[-2:])), info


factorization("linalg_inv_ex", lambda a, check_errors=False: with_info(a), _inverse)


def _determinant(builder: Builder, a: Value, logarithm: bool) -> tuple[Value, ...]:
    lu, pivots, _ = _lu(
        builder, matrix_transpose(builder, a)
    )  # as torch does it, whose factors are results too
    at = lead(a.type)
    step, finish = ("SIGN_AND_SIZE", " r1 = size;") if logarithm else ("sign *= d;", "")
    body = f"LOOPS(loop(rows)) DETERMINANT(rows, LU({at}k, k), PIVOT({at}k), {step}){finish}"
    type = a.type.with_dims(a.type.dims[:-2] or (1,))
    made = mapped_all(
        builder,
        body,
        {"LU": lu, "PIVOT": pivots},
        *([type] * (1 + logarithm)),
        numbers={"rows": a.type.dims[-1]},
    )
    return *(builder.aten.view(each, a.type.dims[:-2]) for each in made), lu, pivots


def _determinant_shape(count: int) -> Callable[[TensorType], tuple[TensorType, ...]]:
    def shape(a: TensorType) -> tuple[TensorType, ...]:
        require_square(a)
        lengths = [TensorType(real_dtype(a.dtype), a.dims[:-2])] * (count - 1)
        return a.with_dims(a.dims[:-2]), *lengths, *_lu_types(a)[:2]

    return shape


factorization(
    "_linalg_det", _determinant_shape(1), lambda builder, node, a: _determinant(builder, a, False)
)
factorization(
    "_linalg_slogdet",
    _determinant_shape(2),
    lambda builder, node, a: _determinant(builder, a, True),
)


def _parts(
    builder: Builder, lu: Value, pivots: Value, results: Sequence[TensorType]
) -> tuple[Value, Value, Value]:
    """The permutation and the two factors."""
    permutation, low, up = results
    rank, rows = lu.type.rank, lu.type.dims[-2]
    lower = builder.aten.slice.Tensor(lu, rank - 1, start=0, end=low.dims[-1])
    upper = builder.aten.slice.Tensor(lu, rank - 2, start=0, end=up.dims[-2])
    identity = eye(builder, permutation, rows, rows)
    return (
        _unswapped(builder, identity, _order(builder, pivots, rows)),
        triangle(builder, lower, False, unit=True),
        triangle(builder, upper, True),
    )


def _parts_shape(lu: TensorType) -> tuple[TensorType, TensorType, TensorType]:
    rows, columns = lu.dims[-2:]
    count = _dims.minimum(rows, columns)
    permutation, low, up = (
        lu.with_dims((*lu.dims[:-2], *sizes))
        for sizes in ((rows, rows), (rows, count), (count, columns))
    )
    return permutation, low, up


def _unpack_shape(
    lu: TensorType, pivots: TensorType, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[TensorType, ...]:
    p, low, up = _parts_shape(lu)
    nothing = lu.with_dims((0,))
    return p if unpack_pivots else nothing, *((low, up) if unpack_data else (nothing, nothing))


def _unpack(
    builder: Builder, node: Node, lu: Value, pivots: Value, unpack_data: bool, unpack_pivots: bool
) -> tuple[Value, ...]:
    made = _parts(builder, lu, pivots, _parts_shape(lu.type))
    nothing = builder.aten.full((0,), fill_value=0.0, dtype=lu.type.dtype)
    return tuple(
        value if wanted else nothing
        for value, wanted in zip(made, (unpack_pivots, unpack_data, unpack_data))
    )


factorization("lu_unpack", _unpack_shape, _unpack)


def _lu_parts_shape(a: TensorType, pivot: bool = True) -> tuple[TensorType, ...]:
    p, low, up = _parts_shape(a)
    return p if pivot else a.with_dims((0,)), low, up


def _lu_parts(builder: Builder, node: Node, a: Value, pivot: bool) -> tuple[Value, ...]:
    lu, pivots, _ = _lu(builder, a)
    return _parts(builder, lu, pivots, _parts_shape(a.type))


factorization("linalg_lu", _lu_parts_shape, _lu_parts)

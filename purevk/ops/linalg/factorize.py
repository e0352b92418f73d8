"""Factors of small matrices, and what follows from them: solutions, inverses, determinants.

One invocation takes a matrix, or a column of the right-hand side. That suits batches of small
matrices (poses, cameras, covariances). Larger matrices stay on the CPU, where a core is faster than
an invocation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.map import mapped, mapped_all, mapped_over, mapped_over_all
from purevk.ops.registry import Made, ShapeError, Types, definition_of, rewrite
from purevk.ops.shapes import broadcast
from purevk.tuning import DeviceTraits

# Rows and columns. With these the loops stay within the device's limit, and an invocation is not much
# slower than a core.
LARGEST = 32
INT = DType.int32


def _refuse(node: Node, traits: DeviceTraits) -> str | None:
    for value in node.inputs:
        if value.type.dtype not in (DType.float32, DType.float64, DType.int32):
            return f"no kernel for {value.type.dtype.name}"
        if any(_dims.upper(size) > LARGEST for size in value.type.dims[-2:]):
            return f"no kernel above {LARGEST} rows"
    parameters = definition_of(node).parameters
    if "check_errors" in parameters and node.bool("check_errors"):
        return "no kernel that raises errors"
    if "pivot" in parameters and not node.bool("pivot"):
        return "no kernel without pivots"
    return None


def _factorization(
    name: str, shape: Callable[..., Types], expand: Callable[..., Made], *names: str
) -> None:
    """Registers an operator on small matrices."""
    rewrite(f"aten.{name}.default", shape, expand, *names, supports=_refuse)


def _lead(type: TensorType, less: int = 2) -> str:
    """The coordinates of a batch, each with a comma."""
    return "".join(f"i{d}, " for d in range(type.rank - less))


def _over(type: TensorType) -> tuple[Size, ...]:
    """The space of a kernel with one invocation per matrix."""
    return type.dims[:-2] or (1,)


def _square(x: TensorType) -> None:
    if x.rank < 2 or x.dims[-1] != x.dims[-2]:
        raise ShapeError(f"{x} is no square matrix")


def _transposed(builder: Builder, x: Value) -> Value:
    return builder.emit("aten.transpose.int", x, -1, -2)


def _half(builder: Builder, x: Value, upper: bool, unit: bool = False) -> Value:
    """The upper or lower triangle of matrices, with ones on the diagonal if asked for."""
    at = _lead(x.type)
    r, c = (f"i{x.type.rank - n}" for n in (2, 1))
    keep = f"{c} > {r}" if upper else f"{c} < {r}"
    diagonal = "1.0" if unit else f"X({at}{r}, {c})"
    return mapped(
        builder, f"r = {r} == {c} ? {diagonal} : {keep} ? X({at}{r}, {c}) : 0.0;", {"X": x}, x.type
    )


# -- LU ------------------------------------------------------------------------------------------
def _lu_types(a: TensorType) -> tuple[TensorType, TensorType, TensorType]:
    if a.rank < 2:
        raise ShapeError(f"{a} is no matrix")
    count = _dims.minimum(a.dims[-2], a.dims[-1])
    return a, TensorType(INT, (*a.dims[:-2], count)), TensorType(INT, a.dims[:-2])


def _lu(builder: Builder, a: Value) -> tuple[Value, Value, Value]:
    """Both factors in one matrix, the row (from 1 on) that each row is swapped with, and the first
    column without a pivot, or 0."""
    at = _lead(a.type)
    batch = at.rstrip(", ") or "0"
    search = f"for (int i = k + 1; i < rows; i++) if (abs(R({at}i, k)) > abs(R({at}p, k))) p = i;"
    body = (
        f"for (int i = 0; i < rows; i++) for (int j = 0; j < columns; j++) R_PUT({at}i, j, A({at}i, j)); int info = 0;"
        f" for (int k = 0; k < min(rows, columns); k++) {{ int p = k; {search} R1_PUT({at}k, p + 1);"
        f" if (p != k) for (int j = 0; j < columns; j++) {{ float t = R({at}k, j); R_PUT({at}k, j,"
        f" R({at}p, j)); R_PUT({at}p, j, t); }}"
        f" float d = R({at}k, k); if (d == 0.0) {{ if (info == 0) info = k + 1; continue; }}"
        f" for (int i = k + 1; i < rows; i++) {{ float f = R({at}i, k) / d; R_PUT({at}i, k, f);"
        f" for (int j = k + 1; j < columns; j++) R_PUT({at}i, j, R({at}i, j) - f * R({at}k, j));"
        f" }} }} R2_PUT({batch}, info);"
    )
    types = _lu_types(a.type)
    wide = types[2] if types[2].rank else types[2].with_dims((1,))
    numbers = {"rows": a.type.dims[-2], "columns": a.type.dims[-1]}
    lu, pivots, info = mapped_over_all(
        builder, body, {"A": a}, _over(a.type), types[0], types[1], wide, numbers=numbers
    )
    return lu, pivots, builder.emit("aten.view.default", info, types[2].dims)


def _order(builder: Builder, pivots: Value, rows: Size) -> Value:
    """For each row after the swaps, the row that it was before."""
    *batch, count = pivots.type.dims
    at, mine = _lead(pivots.type, 1), f"i{len(batch)}"
    body = f"r = {mine}; for (int k = count - 1; k >= 0; k--) {{ int p = PIVOT({at}k) - 1; r = r == k ? p : r == p ? k : r; }}"  # noqa: E501
    return mapped(
        builder, body, {"PIVOT": pivots}, TensorType(INT, (*batch, rows)), numbers={"count": count}
    )


def _swapped(builder: Builder, b: Value, order: Value) -> Value:
    """The rows of a matrix in an order."""
    at, r, c = _lead(b.type), f"i{b.type.rank - 2}", f"i{b.type.rank - 1}"
    return mapped(builder, f"r = B({at}ORDER({at}{r}), {c});", {"B": b, "ORDER": order}, b.type)


def _unswapped(builder: Builder, b: Value, order: Value) -> Value:
    """The rows of a matrix back from an order."""
    at, r, c = _lead(b.type), f"i{b.type.rank - 2}", f"i{b.type.rank - 1}"
    body = f"int from = 0; for (int k = 0; k < rows; k++) if (ORDER({at}k) == {r}) from = k; r = B({at}from, {c});"
    return mapped(
        builder, body, {"B": b, "ORDER": order}, b.type, numbers={"rows": b.type.dims[-2]}
    )


def _triangular(builder: Builder, a: Value, b: Value, upper: bool, unit: bool = False) -> Value:
    """The x with a x = b, where `a` is one triangle of a matrix."""
    batch = broadcast(a.type.dims[:-2], b.type.dims[:-2])
    a, b = (
        builder.emit("aten.expand.default", each, (*batch, *each.type.dims[-2:])) for each in (a, b)
    )
    at, c = _lead(b.type), f"i{b.type.rank - 2}"
    walk = "int i = rows - 1; i >= 0; i--" if upper else "int i = 0; i < rows; i++"
    known = "int j = i + 1; j < rows; j++" if upper else "int j = 0; j < i; j++"
    body = (
        f"for ({walk}) {{ float sum = B({at}i, {c}); for ({known}) sum -= A({at}i, j) * R({at}j, {c});"
        f" R_PUT({at}i, {c}, {'sum' if unit else f'sum / A({at}i, i)'}); }}"
    )
    over = (*batch, b.type.dims[-1])
    return mapped_over(
        builder, body, {"A": a, "B": b}, over, b.type, numbers={"rows": b.type.dims[-2]}
    )


def _lu_solve(builder: Builder, lu: Value, pivots: Value, b: Value, adjoint: bool = False) -> Value:
    batch = broadcast(lu.type.dims[:-2], b.type.dims[:-2])
    lu, b = (
        builder.emit("aten.expand.default", each, (*batch, *each.type.dims[-2:]))
        for each in (lu, b)
    )
    pivots = builder.emit("aten.expand.default", pivots, (*batch, pivots.type.dims[-1]))
    order = _order(builder, pivots, lu.type.dims[-2])
    if adjoint:
        transposed = _transposed(builder, lu)
        y = _triangular(builder, transposed, b, False)
        return _unswapped(builder, _triangular(builder, transposed, y, True, unit=True), order)
    y = _triangular(builder, lu, _swapped(builder, b, order), False, unit=True)
    return _triangular(builder, lu, y, True)


_factorization(
    "linalg_lu_factor_ex",
    lambda a, pivot=True, check_errors=False: _lu_types(a),
    lambda builder, node, a, pivot, check_errors: _lu(builder, a),
)


def _is_vector(a: TensorType, b: TensorType) -> bool:
    return b.rank == 1 or (a.rank - 1 == b.rank and b.dims == a.dims[:-1])


def _solve_shape(
    a: TensorType, b: TensorType, left: bool = True, check_errors: bool = False
) -> tuple[TensorType, ...]:
    _square(a)
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
        made = _lu_solve(
            builder, lu, pivots, builder.emit("aten.unsqueeze.default", b, b.type.rank)
        )
        made = builder.emit("aten.view.default", made, node.results[0].type.dims)
    elif left:
        made = _lu_solve(builder, lu, pivots, b)
    else:
        made = _transposed(
            builder, _lu_solve(builder, lu, pivots, _transposed(builder, b), adjoint=True)
        )
    return made, lu, pivots, info


_factorization("_linalg_solve_ex", _solve_shape, _solve)


def _lu_solve_any(
    builder: Builder, node: Node, lu: Value, pivots: Value, b: Value, left: bool, adjoint: bool
) -> Value:
    if left:
        return _lu_solve(builder, lu, pivots, b, adjoint)
    return _transposed(
        builder, _lu_solve(builder, lu, pivots, _transposed(builder, b), not adjoint)
    )


_factorization(
    "linalg_lu_solve",
    lambda lu, pivots, b, left=True, adjoint=False: _solve_shape(lu, b)[0],
    _lu_solve_any,
)


def _inverse_shape(a: TensorType, check_errors: bool = False) -> tuple[TensorType, TensorType]:
    _square(a)
    return a, TensorType(INT, a.dims[:-2])


def _eye(builder: Builder, like: TensorType, rows: Size, columns: Size) -> Value:
    eye = builder.emit("aten.eye.m", rows, columns, like.dtype)
    return builder.emit("aten.expand.default", eye, (*like.dims[:-2], rows, columns))


def _inverse(builder: Builder, node: Node, a: Value, check_errors: bool) -> tuple[Value, Value]:
    lu, pivots, info = _lu(builder, a)
    return _lu_solve(builder, lu, pivots, _eye(builder, a.type, *a.type.dims[-2:])), info


_factorization("linalg_inv_ex", _inverse_shape, _inverse)


def _determinant(builder: Builder, a: Value, logarithm: bool) -> tuple[Value, ...]:
    lu, pivots, _ = _lu(
        builder, _transposed(builder, a)
    )  # as torch does it, whose factors are results too
    at = _lead(a.type)
    step = (
        "sign = d < 0.0 ? -sign : d == 0.0 ? 0.0 : sign; size += pv_log(abs(d));"
        if logarithm
        else "sign *= d;"
    )
    body = (
        "float sign = 1.0, size = 0.0; for (int k = 0; k < rows; k++)"
        f" {{ float d = LU({at}k, k); {step} if (PIVOT({at}k) != k + 1) sign = -sign; }} r = sign;"
        + (" r1 = size;" if logarithm else "")
    )
    type = a.type.with_dims(a.type.dims[:-2] or (1,))
    made = mapped_all(
        builder,
        body,
        {"LU": lu, "PIVOT": pivots},
        *([type] * (1 + logarithm)),
        numbers={"rows": a.type.dims[-1]},
    )
    return *(builder.emit("aten.view.default", each, a.type.dims[:-2]) for each in made), lu, pivots


def _determinant_shape(count: int) -> Callable[[TensorType], tuple[TensorType, ...]]:
    def shape(a: TensorType) -> tuple[TensorType, ...]:
        _square(a)
        return *([a.with_dims(a.dims[:-2])] * count), *_lu_types(a)[:2]

    return shape


_factorization(
    "_linalg_det", _determinant_shape(1), lambda builder, node, a: _determinant(builder, a, False)
)
_factorization(
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
    lower = builder.emit("aten.slice.Tensor", lu, rank - 1, 0, low.dims[-1], 1)
    upper = builder.emit("aten.slice.Tensor", lu, rank - 2, 0, up.dims[-2], 1)
    eye = _eye(builder, permutation, rows, rows)
    return (
        _unswapped(builder, eye, _order(builder, pivots, rows)),
        _half(builder, lower, False, unit=True),
        _half(builder, upper, True),
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
    nothing = builder.emit("aten.full.default", (0,), 0.0, lu.type.dtype)
    return tuple(
        value if wanted else nothing
        for value, wanted in zip(made, (unpack_pivots, unpack_data, unpack_data))
    )


_factorization("lu_unpack", _unpack_shape, _unpack)


def _lu_parts_shape(a: TensorType, pivot: bool = True) -> tuple[TensorType, ...]:
    p, low, up = _parts_shape(a)
    return p if pivot else a.with_dims((0,)), low, up


def _lu_parts(builder: Builder, node: Node, a: Value, pivot: bool) -> tuple[Value, ...]:
    lu, pivots, _ = _lu(builder, a)
    return _parts(builder, lu, pivots, _parts_shape(a.type))


_factorization("linalg_lu", _lu_parts_shape, _lu_parts)


# -- triangles -----------------------------------------------------------------------------------
def _solve_triangular(
    builder: Builder, node: Node, a: Value, b: Value, upper: bool, left: bool, unit: bool
) -> Value:
    if left:
        return _triangular(builder, a, b, upper, unit)
    return _transposed(
        builder,
        _triangular(builder, _transposed(builder, a), _transposed(builder, b), not upper, unit),
    )


def _triangular_shape(a: TensorType, b: TensorType) -> TensorType:
    return b.with_dims((*broadcast(a.dims[:-2], b.dims[:-2]), *b.dims[-2:]))


_factorization(
    "linalg_solve_triangular",
    lambda a, b, upper, left=True, unitriangular=False: _triangular_shape(a, b),
    _solve_triangular,
)


def _older_triangular_shape(
    b: TensorType,
    a: TensorType,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[TensorType, TensorType]:
    made = _triangular_shape(a, b)
    return made, a.with_dims((*made.dims[:-2], *a.dims[-2:]))


def _older_triangular(
    builder: Builder, node: Node, b: Value, a: Value, upper: bool, transpose: bool, unit: bool
) -> tuple[Value, Value]:
    wide = builder.emit("aten.expand.default", a, node.results[1].type.dims)
    if transpose:
        a, upper = _transposed(builder, a), not upper
    return _triangular(builder, a, b, upper, unit), builder.emit("purevk.copy", wide)


_factorization("triangular_solve", _older_triangular_shape, _older_triangular)


# -- Cholesky ------------------------------------------------------------------------------------
def _cholesky(builder: Builder, a: Value, upper: bool) -> tuple[Value, Value]:
    a = _transposed(builder, a) if upper else a
    at = _lead(a.type)
    batch = at.rstrip(", ") or "0"
    body = (
        f"int info = 0; for (int j = 0; j < rows; j++) {{ float d = A({at}j, j); for (int k = 0; k"
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
        builder, body, {"A": a}, _over(a.type), a.type, wide, numbers={"rows": a.type.dims[-1]}
    )
    return _transposed(builder, made) if upper else made, builder.emit(
        "aten.view.default", info, info_type.dims
    )


def _cholesky_shape(
    a: TensorType, upper: bool = False, check_errors: bool = False
) -> tuple[TensorType, TensorType]:
    return _inverse_shape(a)


_factorization(
    "linalg_cholesky_ex",
    _cholesky_shape,
    lambda builder, node, a, upper, check_errors: _cholesky(builder, a, upper),
)
_factorization(
    "cholesky",
    lambda a, upper=False: _cholesky_shape(a)[0],
    lambda builder, node, a, upper: _cholesky(builder, a, upper)[0],
)


def _cholesky_solve(builder: Builder, factor: Value, b: Value, upper: bool) -> Value:
    transposed = _transposed(builder, factor)
    low, high = (transposed, factor) if upper else (factor, transposed)
    return _triangular(builder, high, _triangular(builder, low, b, False), True)


_factorization(
    "cholesky_solve",
    lambda b, factor, upper=False: _triangular_shape(factor, b),
    lambda builder, node, b, factor, upper: _cholesky_solve(builder, factor, b, upper),
)
_factorization(
    "cholesky_inverse",
    lambda factor, upper=False: factor,
    lambda builder, node, factor, upper: _cholesky_solve(
        builder, factor, _eye(builder, factor.type, *factor.type.dims[-2:]), upper
    ),
)


# -- QR ------------------------------------------------------------------------------------------
def _qr_types(a: TensorType) -> tuple[TensorType, TensorType]:
    return a, a.with_dims((*a.dims[:-2], _dims.minimum(a.dims[-2], a.dims[-1])))


def _reflectors(builder: Builder, a: Value) -> tuple[Value, Value]:
    """R with Householder's vectors below its diagonal, and their factors."""
    at = _lead(a.type)
    body = (
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
        builder, body, {"A": a}, _over(a.type), *_qr_types(a.type), numbers=numbers
    )
    return r, factors


def _reflect(builder: Builder, vectors: Value, factors: Value, x: Value, transpose: bool) -> Value:
    """The product of the reflections with x, or that of their transpose."""
    at, c = _lead(x.type), f"i{x.type.rank - 2}"
    walk = "int k = 0; k < count; k++" if transpose else "int k = count - 1; k >= 0; k--"
    body = (
        f"for (int i = 0; i < rows; i++) R_PUT({at}i, {c}, X({at}i, {c})); for ({walk}) {{ float s = R({at}k, {c});"
        f" for (int i = k + 1; i < rows; i++) s += V({at}i, k) * R({at}i, {c}); s *= TAU({at}k);"
        f" R_PUT({at}k, {c}, R({at}k, {c}) - s);"
        f" for (int i = k + 1; i < rows; i++) R_PUT({at}i, {c}, R({at}i, {c}) - s * V({at}i, k)); }}"
    )
    numbers = {"rows": x.type.dims[-2], "count": factors.type.dims[-1]}
    over = (*x.type.dims[:-2], x.type.dims[-1])
    return mapped_over(
        builder, body, {"V": vectors, "TAU": factors, "X": x}, over, x.type, numbers=numbers
    )


_factorization("geqrf", _qr_types, lambda builder, node, a: _reflectors(builder, a))


def _qr_shape(a: TensorType, mode: str = "reduced") -> tuple[TensorType, TensorType]:
    rows, columns = a.dims[-2:]
    count = rows if mode == "complete" else _dims.minimum(rows, columns)
    q = a.with_dims((0,)) if mode == "r" else a.with_dims((*a.dims[:-2], rows, count))
    return q, a.with_dims((*a.dims[:-2], count, columns))


def _qr(builder: Builder, node: Node, a: Value, mode: str) -> tuple[Value, Value]:
    packed, factors = _reflectors(builder, a)
    q, r = (value.type for value in node.results)
    upper = _half(
        builder, builder.emit("aten.slice.Tensor", packed, a.type.rank - 2, 0, r.dims[-2], 1), True
    )
    if mode == "r":
        return builder.emit("aten.full.default", (0,), 0.0, a.type.dtype), upper
    return _reflect(builder, packed, factors, _eye(builder, a.type, *q.dims[-2:]), False), upper


_factorization("linalg_qr", _qr_shape, _qr)
_factorization(
    "linalg_householder_product",
    lambda vectors, factors: vectors,
    lambda builder, node, vectors, factors: _reflect(
        builder, vectors, factors, _eye(builder, vectors.type, *vectors.type.dims[-2:]), False
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
    return _transposed(
        builder, _reflect(builder, vectors, factors, _transposed(builder, x), not transpose)
    )


_factorization(
    "ormqr", lambda vectors, factors, x, left=True, transpose=False: x, _multiply_reflected
)

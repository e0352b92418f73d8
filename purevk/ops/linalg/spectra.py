"""Singular values of small matrices, by Jacobi's method, and what follows from them: eigenvalues of
symmetric matrices, pseudo-inverses, ranks. Singular vectors are computed on the CPU, because LAPACK
chooses their signs.
"""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Arg, Node, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.linalg.small import (
    LARGEST,
    eye,
    lead,
    matrix_transpose,
    over_matrices,
    require_square,
)
from purevk.ops.map import mapped_over, mapped_over_all
from purevk.ops.registry import definition_of, rewrite
from purevk.tuning import DeviceTraits

_EPSILON = {DType.float32: 2.0**-23, DType.float64: 2.0**-52}


def _refuse(node: Node, traits: DeviceTraits) -> str | None:
    a = node.tensor("a").type
    if a.dtype not in _EPSILON:
        return f"no kernel for {a.dtype.name}"
    if not all(isinstance(size, int) and 0 < size <= LARGEST for size in a.dims[-2:]):
        return f"no kernel for other than 1 to {LARGEST} rows and columns"
    for parameter in ("compute_uv", "compute_v"):
        if parameter in definition_of(node).parameters and node.bool(parameter):
            return "no kernel for singular vectors"
    return None


def _orthogonal(builder: Builder, a: Value, vectors: bool) -> tuple[Value, Value | None]:
    """Rotates pairs of columns of matrices, with at least as many rows as columns, until all columns
    are orthogonal. Each dispatch goes over all pairs once. With `vectors` the product of the
    rotations is a second result."""
    rows, columns = a.type.dims[-2:]
    at = lead(a.type)
    v = eye(builder, a.type, columns, columns) if vectors else None

    def rotate(name: str, size: str) -> str:
        x, y = f"{name}({at}i, p)", f"{name}({at}i, q)"
        return (
            f" if (i < {size}) {{ float x = {x}, y = {y};"
            f" {name}_PUT({at}i, p, c * x - s * y); {name}_PUT({at}i, q, s * x + c * y); }}"
        )

    def copy(name: str, source: str, size: str) -> str:
        walk = f"for (int i = 0; i < {size}; i++) for (int j = 0; j < columns; j++)"
        return f"{walk} {name}_PUT({at}i, j, {source}({at}i, j)); "

    body = (
        copy("R", "A", "rows")
        + (copy("R1", "V", "columns") if vectors else "")
        + (
            "for (int p = 0; p < columns - 1; p++) for (int q = p + 1; q < columns; q++) {"
            f" float a = 0.0, b = 0.0, d = 0.0; for (int i = 0; i < rows; i++)"
            f" {{ float x = R({at}i, p), y = R({at}i, q); a += x * x; b += y * y; d += x * y; }}"
            f" if (!(abs(d) > {_EPSILON[a.type.dtype]!r} * sqrt(a) * sqrt(b))) continue;"
            " float z = (b - a) / (2.0 * d), t = (z < 0.0 ? -1.0 : 1.0) / (abs(z) + sqrt(1.0 + z * z));"
            " float c = 1.0 / sqrt(1.0 + t * t), s = c * t;"
            f" for (int i = 0; i < rows; i++) {{{rotate('R', 'rows')}{rotate('R1', 'columns') if vectors else ''} }} }}"
        )
    )
    numbers = {"rows": rows, "columns": columns}
    most = _dims.upper(columns)
    for _ in range(5 + most.bit_length() if most > 1 else 0):
        if v is None:
            a = mapped_over(builder, body, {"A": a}, over_matrices(a.type), a.type, numbers=numbers)
        else:
            a, v = mapped_over_all(
                builder,
                body,
                {"A": a, "V": v},
                over_matrices(a.type),
                a.type,
                v.type,
                numbers=numbers,
            )
    return a, v


def _scaled(builder: Builder, a: Value) -> tuple[Value, Value]:
    """Matrices whose largest element is 1 or -1, so that squares stay in range, and the factors that
    were divided out."""
    top = builder.emit("aten.amax.default", builder.emit("aten.abs.default", a), (-2, -1), True)
    top = builder.emit("aten.where.self", builder.emit("aten.gt.Tensor", top, 0.0), top, 1.0)
    return builder.emit("aten.div.Tensor", a, top), top


def _values(builder: Builder, a: Value) -> Value:
    """Singular values, in no order."""
    a, top = _scaled(
        builder, a if a.type.dims[-2] >= a.type.dims[-1] else matrix_transpose(builder, a)
    )
    norms = builder.emit(
        "aten.linalg_vector_norm.default", _orthogonal(builder, a, False)[0], 2, (-2,), False, None
    )
    return builder.emit(
        "aten.mul.Tensor", norms, builder.emit("aten.view.default", top, (*top.type.dims[:-2], 1))
    )


def _nothing(builder: Builder, a: Value) -> Value:
    return builder.emit("aten.full.default", (0,), 0.0, a.type.dtype)


def _svd_shape(
    a: TensorType, full_matrices: bool = False, compute_uv: bool = True, driver: str | None = None
) -> tuple[TensorType, ...]:
    rows, columns = a.dims[-2:]
    count = _dims.minimum(rows, columns)
    s = a.with_dims((*a.dims[:-2], count))
    if not compute_uv:
        return a.with_dims((0,)), s, a.with_dims((0,))
    left, right = (rows, columns) if full_matrices else (count, count)
    return a.with_dims((*a.dims[:-2], rows, left)), s, a.with_dims((*a.dims[:-2], right, columns))


def _svd(builder: Builder, node: Node, a: Value, *_: Arg) -> tuple[Value, ...]:
    return (
        _nothing(builder, a),
        builder.emit_all("aten.sort.default", _values(builder, a), -1, True)[0],
        _nothing(builder, a),
    )


rewrite("aten._linalg_svd.default", _svd_shape, _svd, supports=_refuse)


def _symmetric(builder: Builder, a: Value, upper: bool) -> Value:
    """The symmetric matrices of which `a` has one triangle."""
    half = "aten.triu.default" if upper else "aten.tril.default"
    rest = builder.emit(half, a, 1 if upper else -1)
    return builder.emit(
        "aten.add.Tensor", builder.emit(half, a, 0), matrix_transpose(builder, rest), 1
    )


def _eigh_shape(
    a: TensorType, UPLO: str = "L", compute_v: bool = True
) -> tuple[TensorType, TensorType]:
    require_square(a)
    return a.with_dims(a.dims[:-1]), a if compute_v else a.with_dims((0,))


def _eigh(
    builder: Builder, node: Node, a: Value, side: str, compute_v: bool
) -> tuple[Value, Value]:
    # A symmetric matrix plus its norm times the identity has no negative eigenvalue. Its eigenvalues
    # are then its singular values.
    a, top = _scaled(builder, _symmetric(builder, a, side.upper() == "U"))
    up = builder.emit("aten.linalg_vector_norm.default", a, 2, (-2, -1), True, None)
    moved = builder.emit(
        "aten.add.Tensor",
        a,
        builder.emit("aten.mul.Tensor", eye(builder, a.type, *a.type.dims[-2:]), up),
        1,
    )
    flat = (*up.type.dims[:-2], 1)
    values = builder.emit(
        "aten.sub.Tensor", _values(builder, moved), builder.emit("aten.view.default", up, flat), 1
    )
    values = builder.emit("aten.mul.Tensor", values, builder.emit("aten.view.default", top, flat))
    return builder.emit_all("aten.sort.default", values, -1, False)[0], _nothing(builder, a)


rewrite("aten._linalg_eigh.default", _eigh_shape, _eigh, supports=_refuse)


def _inverse_shape(
    a: TensorType,
    atol: TensorType | None = None,
    rtol: TensorType | None = None,
    hermitian: bool = False,
) -> TensorType:
    return a.with_dims((*a.dims[:-2], a.dims[-1], a.dims[-2]))


def _inverse(
    builder: Builder,
    node: Node,
    a: Value,
    atol: Value | None,
    rtol: Value | None,
    hermitian: bool,
) -> Value:
    """The sum of the outer products of the singular vectors, each divided by its singular value.
    Values up to the tolerance are left out."""
    rows, columns = a.type.dims[-2:]
    wide = rows < columns
    whole, top = _scaled(
        builder,
        _symmetric(builder, a, False) if hermitian else matrix_transpose(builder, a) if wide else a,
    )
    rotated, v = _orthogonal(builder, whole, True)
    norms = builder.emit("aten.linalg_vector_norm.default", rotated, 2, (-2,), True, None)
    atol, rtol = (
        builder.emit("aten.view.default", value, (*value.type.dims, 1, 1))
        if value is not None and value.type.rank
        else value
        for value in (atol, rtol)
    )
    share: Value | float
    if rtol is not None:
        share = rtol
    else:
        share = max(_dims.upper(rows), _dims.upper(columns)) * _EPSILON[a.type.dtype]
        if atol is not None:
            given = builder.emit("aten.gt.Tensor", atol, 0.0)
            share = builder.emit("aten.where.self", given, 0.0, share)
    least = builder.emit(
        "aten.mul.Tensor", builder.emit("aten.amax.default", norms, (-1,), True), share
    )
    if atol is not None:
        least = builder.emit(
            "aten.maximum.default",
            least,
            builder.emit(
                "aten._to_copy.default", builder.emit("aten.div.Tensor", atol, top), a.type.dtype
            ),
        )
    counts = builder.emit("aten.gt.Tensor", norms, least)
    over = builder.emit(
        "aten.where.self", counts, builder.emit("aten.reciprocal.default", norms), 0.0
    )
    left = builder.emit(
        "aten.mul.Tensor",
        builder.emit("aten.mul.Tensor", rotated, over),
        builder.emit("aten.div.Tensor", over, top),
    )
    made = builder.emit("aten.matmul.default", v, matrix_transpose(builder, left))
    return matrix_transpose(builder, made) if wide and not hermitian else made


rewrite("aten.linalg_pinv.atol_rtol_tensor", _inverse_shape, _inverse, supports=_refuse)

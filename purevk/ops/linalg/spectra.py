"""Singular values and vectors by Jacobi's method, and what follows from them: eigenvalues and
eigenvectors of symmetric matrices, pseudo-inverses, ranks. Tall matrices become the R of their QR
factors first.

The signs of vectors, and the vectors of values that are equal, differ from those of LAPACK.
"""

from __future__ import annotations

from purevk.ir import Arg, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.linalg.jacobi import EPSILON, LARGEST, LARGEST_ON_SOFTWARE, orthogonal_columns
from purevk.ops.linalg.reflections import reflect, reflections, upper_factor
from purevk.ops.linalg.small import LARGEST as LARGEST_SMALL
from purevk.ops.linalg.small import eye, matrix_transpose, require_square
from purevk.ops.promotion import real_dtype
from purevk.ops.registry import rewrite
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits


def _refuse(node: Node, traits: DeviceTraits) -> str | None:
    a = node.tensor("a").type
    if a.dtype not in EPSILON:
        return f"no kernel for {a.dtype.name}"
    if not all(isinstance(size, int) and size > 0 for size in a.dims[-2:]):
        return "no kernel for matrices of no or unknown rows or columns"
    columns = min(_dims.specialize(size) for size in a.dims[-2:])
    largest = LARGEST if traits.profile.has_fast_shared_memory else LARGEST_ON_SOFTWARE
    if columns > largest:
        return f"no kernel for more than {largest} rows and columns"
    return None


class _Reduced:
    """Matrices with at least as many rows as columns, and the R of their QR factors if they have many
    more: `small` in both cases, which has the same singular values and right vectors."""

    def __init__(self, builder: Builder, a: Value) -> None:
        self._builder, self._rows, self._columns = builder, *a.type.dims[-2:]
        self._factors: tuple[Value, Value] | None = None
        self.small = a
        if self._rows > max(self._columns, LARGEST_SMALL):
            self._factors = reflections(builder, a)
            self.small = upper_factor(builder, self._factors[0], self._columns)

    def widened(self, u: Value, full: bool = False) -> Value:
        """What vectors of `small`, as columns, are of the matrices. full: a basis of all rows."""
        if self._factors is None:
            return u
        builder, rows, columns = self._builder, self._rows, self._columns
        u = builder.aten.constant_pad_nd(u, (0, 0, 0, rows - columns), 0.0)
        if full:
            rest = builder.aten.slice.Tensor(
                eye(builder, u.type, rows, rows), u.type.rank - 1, start=columns
            )
            u = builder.aten.cat((u, rest), u.type.rank - 1)
        return reflect(builder, *self._factors, u, False)


def _basis(builder: Builder, rows: Value, lengths: Value, count: Size) -> Value:
    """Orthogonal vectors, as rows [..., n, m] with the longest first, scaled to length 1, as columns
    [..., m, count]; others that are orthogonal to them in place of those that are short, and after
    them."""
    longest = builder.aten.slice.Tensor(lengths, lengths.type.rank - 1, start=0, end=1)
    least = builder.aten.mul.Tensor(longest, EPSILON[rows.type.dtype])
    over = builder.aten.where.self(
        builder.aten.gt.Tensor(lengths, least), builder.aten.reciprocal(lengths), y=0.0
    )
    columns = matrix_transpose(
        builder, builder.aten.mul.Tensor(rows, builder.aten.unsqueeze(over, dim=-1))
    )
    packed, factors = reflections(builder, columns)
    *_, size, given = columns.type.dims
    basis = reflect(builder, packed, factors, eye(builder, columns.type, size, count), False)
    # The diagonal of R is 1 or -1.
    diagonal = builder.aten.diagonal(packed, dim1=-2, dim2=-1)
    signs = builder.aten.where.self(builder.aten.lt.Tensor(diagonal, y=0.0), x=-1.0, y=1.0)
    if count != given:
        signs = builder.aten.constant_pad_nd(signs, (0, count - given), 1.0)
    return builder.aten.mul.Tensor(basis, builder.aten.unsqueeze(signs, dim=-2))


def _scaled(builder: Builder, a: Value) -> tuple[Value, Value]:
    """Matrices whose largest element is 1 or -1, so that squares stay in range, and the factors that
    were divided out."""
    top = builder.aten.amax(builder.aten.abs(a), (-2, -1), keepdim=True)
    top = builder.aten.where.self(builder.aten.gt.Tensor(top, y=0.0), top, y=1.0)
    return builder.aten.div.Tensor(a, top), top


def _lengths(builder: Builder, rows: Value) -> Value:
    return builder.aten.linalg_vector_norm(rows, ord=2, dim=(-1,))


def _unscaled(builder: Builder, values: Value, top: Value) -> Value:
    """Singular values of matrices that `_scaled` has divided."""
    flat = builder.aten.view(top, (*top.type.dims[:-2], 1))
    return builder.aten.mul.Tensor(values, flat)


def _values(builder: Builder, a: Value) -> Value:
    """Singular values, in no order."""
    rows, columns = a.type.dims[-2:]
    reduced = _Reduced(builder, a if rows >= columns else matrix_transpose(builder, a))
    a, top = _scaled(builder, reduced.small)
    return _unscaled(builder, _lengths(builder, orthogonal_columns(builder, a, False)[0]), top)


def _in_order(builder: Builder, rows: Value, order: Value) -> Value:
    """The rows [..., n, m] in the order of indices [..., n]."""
    index = builder.aten.unsqueeze(order, dim=-1)
    index = builder.aten.expand(index, rows.type.dims)
    return builder.aten.gather(rows, dim=-2, index=index)


def _nothing(builder: Builder, a: Value) -> Value:
    return builder.aten.full((0,), fill_value=0.0, dtype=a.type.dtype)


def _svd_shape(
    a: TensorType, full_matrices: bool = False, compute_uv: bool = True, driver: str | None = None
) -> tuple[TensorType, ...]:
    rows, columns = a.dims[-2:]
    count = _dims.minimum(rows, columns)
    s = TensorType(real_dtype(a.dtype), (*a.dims[:-2], count))
    if not compute_uv:
        return a.with_dims((0,)), s, a.with_dims((0,))
    left, right = (rows, columns) if full_matrices else (count, count)
    return a.with_dims((*a.dims[:-2], rows, left)), s, a.with_dims((*a.dims[:-2], right, columns))


@rewrite("aten._linalg_svd.default", _svd_shape, supports=_refuse)
def _svd(
    builder: Builder, node: Node, a: Value, full: bool, compute_uv: bool, *_: Arg
) -> tuple[Value, ...]:
    if not compute_uv:
        values = builder.aten.sort.all(_values(builder, a), dim=-1, descending=True)[0]
        return _nothing(builder, a), values, _nothing(builder, a)
    rows, columns = a.type.dims[-2:]
    wide = bool(rows < columns)
    reduced = _Reduced(builder, matrix_transpose(builder, a) if wide else a)
    small, top = _scaled(builder, reduced.small)
    rotated, v = orthogonal_columns(builder, small, True)
    assert v is not None
    lengths, order = builder.aten.sort.all(_lengths(builder, rotated), dim=-1, descending=True)
    full = full and rows != columns
    count = small.type.dims[-2] if full else small.type.dims[-1]
    u = _basis(builder, _in_order(builder, rotated, order), lengths, count)
    u = reduced.widened(u, full)
    v = _in_order(builder, v, order)
    # A wide matrix is the transpose of u s v, whose v has rows here.
    left, right = (matrix_transpose(builder, v), matrix_transpose(builder, u)) if wide else (u, v)
    return left, _unscaled(builder, lengths, top), right


def _symmetric(builder: Builder, a: Value, upper: bool) -> Value:
    """The symmetric matrices of which `a` has one triangle."""
    half = "aten.triu.default" if upper else "aten.tril.default"
    rest = builder.emit(half, a, 1 if upper else -1)
    return builder.aten.add.Tensor(builder.emit(half, a, 0), matrix_transpose(builder, rest))


def _eigh_shape(
    a: TensorType, UPLO: str = "L", compute_v: bool = True
) -> tuple[TensorType, TensorType]:
    require_square(a)
    values = TensorType(real_dtype(a.dtype), a.dims[:-1])
    return values, a if compute_v else a.with_dims((0,))


@rewrite("aten._linalg_eigh.default", _eigh_shape, supports=_refuse)
def _eigh(
    builder: Builder, node: Node, a: Value, side: str, compute_v: bool
) -> tuple[Value, Value]:
    # A symmetric matrix plus its norm times the identity has no negative eigenvalue. Its eigenvalues
    # and eigenvectors are then its singular values and right singular vectors.
    a, top = _scaled(builder, _symmetric(builder, a, side.upper() == "U"))
    up = builder.aten.linalg_vector_norm(a, ord=2, dim=(-2, -1), keepdim=True)
    moved = builder.aten.add.Tensor(
        a,
        builder.aten.mul.Tensor(eye(builder, a.type, *a.type.dims[-2:]), up),
    )
    rotated, v = orthogonal_columns(builder, moved, compute_v)
    if v is None:
        flat = builder.aten.view(up, (*up.type.dims[:-2], 1))
        values = builder.aten.sub.Tensor(_lengths(builder, rotated), flat)
        values = builder.aten.sort.all(values)[0]
        return _unscaled(builder, values, top), _nothing(builder, a)
    # The quotient of a vector v, v a v, loses no digits to the norm.
    product = builder.aten.mul.Tensor(builder.aten.matmul(v, a), v)
    values = builder.aten.sum.dim_IntList(product, (-1,))
    values, order = builder.aten.sort.all(values)
    vectors = matrix_transpose(builder, _in_order(builder, v, order))
    return _unscaled(builder, values, top), vectors


@signature("a, atol=None, rtol=None, hermitian=False")
def _inverse_shape(a: TensorType) -> TensorType:
    return a.with_dims((*a.dims[:-2], a.dims[-1], a.dims[-2]))


@rewrite("aten.linalg_pinv.atol_rtol_tensor", _inverse_shape, supports=_refuse)
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
    if hermitian:
        a = _symmetric(builder, a, False)
    elif wide:
        a = matrix_transpose(builder, a)
    reduced = _Reduced(builder, a)
    whole, top = _scaled(builder, reduced.small)
    rotated, v = (
        None if rows is None else matrix_transpose(builder, rows)
        for rows in orthogonal_columns(builder, whole, True)
    )
    assert rotated is not None and v is not None
    norms = builder.aten.linalg_vector_norm(rotated, ord=2, dim=(-2,), keepdim=True)
    atol, rtol = (
        builder.aten.view(value, (*value.type.dims, 1, 1))
        if value is not None and value.type.rank
        else value
        for value in (atol, rtol)
    )
    share: Value | float
    if rtol is not None:
        share = rtol
    else:
        share = max(_dims.upper(rows), _dims.upper(columns)) * EPSILON[a.type.dtype]
        if atol is not None:
            given = builder.aten.gt.Tensor(atol, y=0.0)
            share = builder.aten.where.self(given, x=0.0, y=share)
    least = builder.aten.mul.Tensor(builder.aten.amax(norms, (-1,), keepdim=True), share)
    if atol is not None:
        least = builder.aten.maximum(
            least,
            builder.aten._to_copy(builder.aten.div.Tensor(atol, top), a.type.dtype),
        )
    counts = builder.aten.gt.Tensor(norms, least)
    over = builder.aten.where.self(counts, builder.aten.reciprocal(norms), y=0.0)
    left = builder.aten.mul.Tensor(
        builder.aten.mul.Tensor(rotated, over),
        builder.aten.div.Tensor(over, top),
    )
    made = builder.aten.matmul(left, matrix_transpose(builder, v))
    made = reduced.widened(made)
    return made if wide and not hermitian else matrix_transpose(builder, made)

"""Reductions beyond sums: indices of extremes, variance, norms, logarithms of sums of exponentials."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from purevk.dtypes import DType
from purevk.ir import Node, TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.promotion import float_type, real_dtype
from purevk.ops.reduce.reduction import NAME, Reduction
from purevk.ops.registry import ShapeError, Types, rewrite
from purevk.ops.shapes import reduced, wrap_all

Dims = Sequence[int] | int | None  # the dims of a reduction; None: all of them
Real = float | int


def reduce(
    builder: Builder,
    x: Value,
    kind: str | Reduction,
    dims: Sequence[int],
    keepdim: bool,
    dtype: DType,
) -> Value:
    """Emits `purevk.reduce`."""
    return reduce_with_index(builder, x, kind, dims, keepdim, dtype, None)[0]


def reduce_with_index(
    builder: Builder,
    x: Value,
    kind: str | Reduction,
    dims: Sequence[int],
    keepdim: bool,
    dtype: DType,
    index: DType | None,
) -> tuple[Value, ...]:
    """Emits `purevk.reduce`: the results, and if `index` is a dtype, the indices of the extreme
    elements. A 0-d tensor counts as one of one element."""
    if x.type.rank:
        return builder.emit_all(NAME, x, kind, tuple(dims), keepdim, dtype, index)
    flat = builder.aten.view(x, (1,))
    reduced_ = builder.emit_all(NAME, flat, kind, (0,), False, dtype, index)
    return tuple(builder.aten.view(value, ()) for value in reduced_)


# -- indices of extremes --------------------------------------------------------------------------
def _arg_shape(x: TensorType, dim: int | None = None, keepdim: bool = False) -> TensorType:
    dims = wrap_all(dim, x.rank)
    _refuse_empty(x, dims)
    return TensorType(DType.int64, reduced(x.dims, tuple(dims), keepdim))


def _refuse_empty(x: TensorType, dims: Sequence[int]) -> None:
    if any(isinstance(x.dims[d], int) and x.dims[d] == 0 for d in dims if d < x.rank):
        raise ShapeError(f"the extreme of no elements of {x}")


def _arg(name: str) -> None:
    def expand(builder: Builder, node: Node, x: Value, dim: int | None, keepdim: bool) -> Value:
        dims = wrap_all(dim, x.type.rank)
        return reduce(builder, x, name, dims, keepdim, node.result.type.dtype)

    rewrite(f"aten.{name}.default", _arg_shape)(expand)


_arg("argmax")
_arg("argmin")


def _extreme_shape(x: TensorType, dim: int, keepdim: bool = False) -> tuple[TensorType, TensorType]:
    index = _arg_shape(x, dim, keepdim)
    return index.with_dtype(x.dtype), index


def _extreme(name: str, kind: str) -> None:
    def expand(
        builder: Builder, node: Node, x: Value, dim: int, keepdim: bool
    ) -> tuple[Value, ...]:
        return reduce_with_index(
            builder,
            x,
            kind,
            wrap_all(dim, x.type.rank),
            keepdim,
            x.type.dtype,
            node.results[1].type.dtype,
        )

    rewrite(f"aten.{name}.dim", _extreme_shape)(expand)


_extreme("max", "argmax")
_extreme("min", "argmin")


def _aminmax_shape(
    x: TensorType, dim: int | None = None, keepdim: bool = False
) -> tuple[TensorType, TensorType]:
    made = _arg_shape(x, dim, keepdim).with_dtype(x.dtype)
    return made, made


@rewrite("aten.aminmax.default", _aminmax_shape)
def _aminmax(
    builder: Builder, node: Node, x: Value, dim: int | None, keepdim: bool
) -> tuple[Value, Value]:
    dims = wrap_all(dim, x.type.rank)
    low, high = (reduce(builder, x, kind, dims, keepdim, x.type.dtype) for kind in ("amin", "amax"))
    return low, high


# -- variance ------------------------------------------------------------------------------------
def _variance(correction: Real | None, root: bool) -> Reduction:
    less = float(1 if correction is None else correction)
    text = f"(float(n) > {less!r} ? a / (float(n) - {less!r}) : a > 0.0 ? PV_INF : PV_NAN)"
    return Reduction(finish=f"sqrt({text})" if root else text, variance=True)


def _float_reduced(x: TensorType, dim: Dims, keepdim: bool) -> TensorType:
    if not (x.dtype.is_float or x.dtype.is_complex):
        raise ShapeError(f"variance of {x.dtype.name}")
    return TensorType(real_dtype(x.dtype), reduced(x.dims, wrap_all(dim, x.rank), keepdim))


def _with_mean(x: TensorType, dim: Dims, keepdim: bool) -> tuple[TensorType, TensorType]:
    mean = x.with_dims(reduced(x.dims, wrap_all(dim, x.rank), keepdim))
    return _float_reduced(x, dim, keepdim), mean


def _spreads(name: str, root: bool, types: Callable[[TensorType, Dims, bool], Types]) -> None:
    """Variance or its root, and the mean if `types` has two."""

    def expand(
        builder: Builder,
        node: Node,
        x: Value,
        dim: Dims = None,
        correction: Real | None = None,
        keepdim: bool = False,
    ) -> tuple[Value, ...]:
        dims = wrap_all(dim, x.type.rank)
        kinds: tuple[Reduction | str, ...] = _variance(correction, root), "mean"
        return tuple(
            reduce(builder, x, kind, dims, keepdim, result.type.dtype)
            for kind, result in zip(kinds, node.results)
        )

    rewrite(
        f"aten.{name}.correction",
        lambda x, dim=None, correction=None, keepdim=False: types(x, dim, keepdim),
    )(expand)
    rewrite(
        f"aten.{name}.dim", lambda x, dim=None, unbiased=True, keepdim=False: types(x, dim, keepdim)
    )(expand)
    if types is _float_reduced:
        rewrite(f"aten.{name}.default", lambda x, unbiased=True: types(x, None, False))(
            lambda builder, node, x, unbiased: expand(builder, node, x, correction=unbiased)
        )


for _name, _root in {"var": False, "std": True}.items():
    _spreads(_name, _root, _float_reduced)
    _spreads(f"{_name}_mean", _root, _with_mean)


# -- norms ---------------------------------------------------------------------------------------
def norm_reduction(p: float) -> Reduction:
    """The p-norm."""
    if p == 0:
        return Reduction(load="(v != ACC(0) ? ACC(1) : ACC(0))")
    if p == 1:
        return Reduction(load="abs(v)")
    if p == 2:
        return Reduction(load="((v) * (v))", finish="sqrt(a)")
    if math.isinf(p):
        return (
            Reduction("ACC(0)", "pv_max(a, b)", "abs(v)")
            if p > 0
            else Reduction("HIGHEST", "pv_min(a, b)", "abs(v)")
        )
    return Reduction(load=f"pv_pow(abs(v), {float(p)!r})", finish=f"pv_pow(a, {1.0 / p!r})")


def _norm(
    builder: Builder, x: Value, p: Real | None, dims: Sequence[int], keepdim: bool, dtype: DType
) -> Value:
    if not x.type.dtype.is_float:
        x = builder.aten._to_copy(x, dtype)
    return reduce(builder, x, norm_reduction(2.0 if p is None else float(p)), dims, keepdim, dtype)


def _norm_shape(
    x: TensorType,
    ord: Real | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: DType | None = None,
) -> TensorType:
    made = real_dtype(dtype or float_type(x.dtype))
    return TensorType(made, reduced(x.dims, wrap_all(dim, x.rank), keepdim))


@rewrite("aten.linalg_vector_norm.default", _norm_shape)
@rewrite("aten.norm.Scalar", lambda x, p=2: _norm_shape(x, p))
@rewrite(
    "aten.norm.ScalarOpt_dim", lambda x, p, dim, keepdim=False: _norm_shape(x, p, dim, keepdim)
)
@rewrite(
    "aten.norm.ScalarOpt_dim_dtype",
    lambda x, p, dim, keepdim, dtype: _norm_shape(x, p, dim, keepdim, dtype),
)
def _vector_norm(
    builder: Builder,
    node: Node,
    x: Value,
    p: Real | None,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: DType | None = None,
) -> Value:
    dims = wrap_all(dim, x.type.rank)
    return _norm(builder, x, p, dims, keepdim, node.result.type.dtype)


# -- sums of something else ----------------------------------------------------------------------
@rewrite(
    "aten.logsumexp.default",
    lambda x, dim, keepdim=False: TensorType(
        float_type(x.dtype), reduced(x.dims, wrap_all(dim, x.rank), keepdim)
    ),
)
def _logsumexp(builder: Builder, node: Node, x: Value, dim: Dims, keepdim: bool) -> Value:
    dims = wrap_all(dim, x.type.rank)
    if not x.type.dtype.is_float:
        x = builder.aten._to_copy(x, node.result.type.dtype)
    return reduce(builder, x, Reduction(logarithm=True), dims, keepdim, node.result.type.dtype)


@rewrite(
    "aten.count_nonzero.default",
    lambda x, dim=None: TensorType(DType.int64, reduced(x.dims, wrap_all(dim, x.rank), False)),
)
@rewrite(
    "aten.count_nonzero.dim_IntList",
    lambda x, dim: TensorType(DType.int64, reduced(x.dims, wrap_all(dim, x.rank), False)),
)
def _count(builder: Builder, node: Node, x: Value, dim: Dims = None) -> Value:
    found = builder.aten.ne.Tensor(x, y=0)
    return reduce(builder, found, "sum", wrap_all(dim, x.type.rank), False, node.result.type.dtype)


def _nansum_shape(
    x: TensorType, dim: Dims = None, keepdim: bool = False, dtype: DType | None = None
) -> TensorType:
    made = dtype or (x.dtype if x.dtype.is_float or x.dtype.is_complex else DType.int64)
    return TensorType(made, reduced(x.dims, wrap_all(dim, x.rank), keepdim))


@rewrite("aten.nansum.default", _nansum_shape)
def _nansum(
    builder: Builder, node: Node, x: Value, dim: Dims, keepdim: bool, dtype: DType | None
) -> Value:
    if x.type.dtype.is_float:
        x = builder.aten.where.self(builder.aten.isnan(x), x=0.0, y=x)
    dims = dim if dim is None or isinstance(dim, int) else tuple(dim)
    return builder.aten.sum.dim_IntList(x, dims, keepdim, node.result.type.dtype)


@rewrite("aten.dist.default", lambda x, y, p=2: TensorType(real_dtype(float_type(x.dtype)), ()))
def _dist(builder: Builder, node: Node, x: Value, y: Value, p: Real) -> Value:
    difference = builder.aten.sub.Tensor(x, y)
    return _norm(builder, difference, p, range(difference.type.rank), False, node.result.type.dtype)

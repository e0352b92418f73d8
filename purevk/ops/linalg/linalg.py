"""Dot and outer products, sums of matmuls, cross products, distances, trilinear forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Node, Scalar, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.fold import Fold, Loop, folded
from purevk.ops.matmul.matmul import DISTANCES, METRICS, matmul_type
from purevk.ops.matmul.operators import matmul_shape
from purevk.ops.promotion import promote_types
from purevk.ops.registry import ShapeError, rewrite
from purevk.ops.shapes import broadcast, wrap, wrap_all
from purevk.tuning import DeviceTraits


# -- dot and outer products, sums of matmuls -----------------------------------------------------
def _scaled_sum(
    builder: Builder,
    x: Value,
    product: Value,
    beta: Value | Scalar,
    alpha: Value | Scalar,
    dtype: DType,
) -> Value:
    """beta * x + alpha * product. If beta is 0, x is not read."""
    if not dtype.is_float:
        beta, alpha = (int(each) if isinstance(each, float) else each for each in (beta, alpha))
    if not (isinstance(alpha, (int, float)) and alpha == 1):
        product = builder.aten.mul.Tensor(product, alpha)
    if not (isinstance(beta, (int, float)) and beta == 0):
        product = builder.aten.add.Tensor(product, x, beta)
    return builder.aten._to_copy(product, dtype)


def _dot_shape(x: TensorType, y: TensorType) -> TensorType:
    if x.rank != 1 or y.rank != 1 or not _dims.assume(x.dims[0], "==", y.dims[0]):
        raise ShapeError(f"the dot product of {x} and {y}")
    return x.with_dims(())


@rewrite("aten.dot.default", _dot_shape, "aten.vdot.default")
def _dot(builder: Builder, node: Node, x: Value, y: Value) -> Value:
    product = builder.aten.mul.Tensor(x, y)
    return builder.aten.sum.dim_IntList(product, (0,), keepdim=False, dtype=node.result.type.dtype)


rewrite("aten.mv.default", matmul_shape)(lambda builder, node, a, b: builder.aten.matmul(a, b))


def _outer(builder: Builder, x: Value, y: Value) -> Value:
    return builder.aten.mul.Tensor(builder.aten.unsqueeze(x, dim=1), y)


rewrite(
    "aten.outer.default",
    lambda x, y: TensorType(promote_types(x.dtype, y.dtype), (x.dims[0], y.dims[0])),
    "aten.ger.default",
)(lambda builder, node, x, y: _outer(builder, x, y))


def _added(
    name: str,
    product: Callable[[Builder, Value, Value], Value],
    shape: Callable[[TensorType, TensorType], TensorType],
) -> None:
    """beta * x + alpha * product(a, b)"""

    def expand(
        builder: Builder,
        node: Node,
        x: Value,
        a: Value,
        b: Value,
        beta: Value | Scalar,
        alpha: Value | Scalar,
    ) -> Value:
        return _scaled_sum(builder, x, product(builder, a, b), beta, alpha, node.result.type.dtype)

    def checked(
        x: TensorType, a: TensorType, b: TensorType, beta: float = 1, alpha: float = 1
    ) -> TensorType:
        made = shape(a, b)
        if broadcast(x.dims, made.dims) != made.dims:
            raise ShapeError(f"cannot add {made} to {x}")
        return made

    rewrite(name, checked)(expand)


def _multiply(builder: Builder, a: Value, b: Value) -> Value:
    return builder.purevk.unrounded_matmul(a, b)


def _summed(builder: Builder, a: Value, b: Value) -> Value:
    """The sum of the matmuls of a batch, as one matmul of longer rows."""
    count, n, k = a.type.dims
    left = builder.aten.view(builder.aten.permute(a, (1, 0, 2)), (n, count * k))
    right = builder.aten.view(b, (count * k, b.type.dims[2]))
    return _multiply(builder, left, right)


_added("aten.addmv.default", _multiply, matmul_shape)
_added("aten.baddbmm.default", _multiply, matmul_type)
_added("aten.addbmm.default", _summed, lambda a, b: a.with_dims((a.dims[1], b.dims[2])))
_added(
    "aten.addr.default",
    _outer,
    lambda a, b: a.with_dims((a.dims[0], b.dims[0])),
)


# -- others --------------------------------------------------------------------------------------
@rewrite(
    "aten.trace.default",
    lambda x: TensorType(x.dtype if x.dtype.is_float or x.dtype.is_complex else DType.int64, ()),
)
def _trace(builder: Builder, node: Node, x: Value) -> Value:
    return builder.aten.sum.dim_IntList(
        builder.aten.diagonal(x),
        (0,),
        keepdim=False,
        dtype=node.result.type.dtype,
    )


def _cross_shape(x: TensorType, y: TensorType, dim: int | None = -1) -> TensorType:
    sizes = broadcast(x.dims, y.dims)
    at = _cross_dim(sizes, dim)
    if sizes[at] != 3:
        raise ShapeError(f"the cross product along dim {dim} of {x} and {y}")
    return TensorType(promote_types(x.dtype, y.dtype), sizes)


def _cross_dim(sizes: Sequence[Size], dim: int | None) -> int:
    if dim is None:
        return next((d for d, size in enumerate(sizes) if isinstance(size, int) and size == 3), 0)
    return wrap(dim, len(sizes))


@rewrite("aten.cross.default", lambda x, y, dim=None: _cross_shape(x, y, dim))
@rewrite("aten.linalg_cross.default", _cross_shape)
def _cross(builder: Builder, node: Node, x: Value, y: Value, dim: int | None) -> Value:
    type = node.result.type
    at = _cross_dim(type.dims, dim)
    wide = []
    for value in (x, y):
        value = builder.aten._to_copy(value, type.dtype)
        wide.append(builder.aten.expand(value, type.dims))
    rolled = [builder.aten.roll(value, (-n,), (at,)) for value in wide for n in (1, 2)]
    left = builder.aten.mul.Tensor(rolled[0], rolled[3])
    return builder.aten.sub.Tensor(left, builder.aten.mul.Tensor(rolled[1], rolled[2]))


# -- distances -----------------------------------------------------------------------------------
_DISTANCE_TYPES = (DType.float32, DType.float16, DType.bfloat16)  # of `purevk.distances`


def _distance(p: float, a: str, b: str, width: Size, before: str = "") -> Fold:
    """Sets r to the distance between two rows of `width` elements at `k`."""
    step, finish = {
        0.0: ("r += pv_isnan(d) ? d : d != 0.0 ? 1.0 : 0.0;", ""),
        1.0: ("r += d;", ""),
        2.0: ("r += d * d;", "r = sqrt(r);"),
        math.inf: ("r = pv_max(r, d);", ""),
    }.get(p, (f"r += pv_pow(d, {p!r});", f"r = pv_pow(r, {1.0 / p if p else 1.0!r});"))
    return Fold(
        (Loop("k", "0", "width", width, "width"),),
        f"T_COORD d = abs({a} - {b}); {step}",
        join="r = pv_max(r, v);" if p == math.inf else "r += v;",
        start="r = 0.0;",
        before=before,
        finish=finish,
    )


def _cdist_shape(
    x: TensorType, y: TensorType, p: float, compute_mode: int | None = None
) -> TensorType:
    if x.rank < 2 or y.rank < 2 or not _dims.assume(x.dims[-1], "==", y.dims[-1]):
        raise ShapeError(f"distances between {x} and {y}")
    return x.with_dims((*broadcast(x.dims[:-2], y.dims[:-2]), x.dims[-2], y.dims[-2]))


@rewrite("aten.cdist.default", lambda x, y, p=2.0, compute_mode=None: _cdist_shape(x, y, p))
@rewrite("aten._cdist_forward.default", _cdist_shape)
def _cdist(
    builder: Builder, node: Node, x: Value, y: Value, p: float, compute_mode: int | None
) -> Value:
    type = node.result.type
    batch = type.dims[:-2]
    x, y = (
        value
        if value.type.dims[:-2] == batch
        else builder.aten.expand(value, (*batch, *value.type.dims[-2:]))
        for value in (x, y)
    )
    rank = type.rank
    order = (*range(rank - 2), rank - 1, rank - 2)
    if (
        builder.traits.profile.has_fast_shared_memory
        and float(p) in METRICS
        and x.type.dtype is y.type.dtype
        and x.type.dtype in _DISTANCE_TYPES
    ):
        return builder.emit(DISTANCES, x, builder.aten.permute(y, order), float(p))
    # Neighbouring invocations read neighbouring elements of y.
    y = builder.purevk.copy(builder.aten.permute(y, order))
    lead = [f"i{d}" for d in range(rank - 2)]
    a, b = ", ".join([*lead, f"i{rank - 2}", "k"]), ", ".join([*lead, "k", f"i{rank - 1}"])
    width = x.type.dims[-1]
    fold = _distance(float(p), f"A({a})", f"B({b})", width)
    return folded(builder, fold, {"A": x, "B": y}, type, numbers={"width": width})[0]


def _pdist_shape(x: TensorType, p: float = 2.0) -> TensorType:
    return x.with_dims((x.dims[0] * (x.dims[0] - 1) // 2,))


@rewrite("aten._pdist_forward.default", _pdist_shape, "aten.pdist.default")
def _pdist(builder: Builder, node: Node, x: Value, p: float) -> Value:
    count, width = x.type.dims
    find = "LOOPS(2 * loop(4)) FIND_PAIR(count)"
    fold = _distance(float(p), "X(a, k)", "X(b, k)", width, find)
    numbers = {"count": count, "width": width}
    return folded(builder, fold, {"X": x}, node.result.type, numbers=numbers)[0]


# -- trilinear forms -----------------------------------------------------------------------------
class _Trilinear(NamedTuple):
    """The dims of `aten._trilinear`: the sizes of the whole product, and the dims that are summed."""

    sizes: tuple[Size, ...]
    summed: tuple[int, ...]

    @classmethod
    def of(
        cls,
        tensors: Sequence[TensorType],
        expands: Sequence[Sequence[int]],
        sumdim: Sequence[int],
    ) -> _Trilinear:
        sizes = broadcast(*(_widened(x, expand) for x, expand in zip(tensors, expands)))
        return cls(sizes, wrap_all(sumdim, len(sizes)) if sumdim else ())


def _widened(x: TensorType, expand: Sequence[int]) -> tuple[Size, ...]:
    """The sizes of a tensor with the dims `expand` inserted."""
    made = list(x.dims)
    for d in sorted(expand):
        made.insert(d, 1)
    return tuple(made)


def _trilinear_shape(
    a: TensorType,
    b: TensorType,
    c: TensorType,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> TensorType:
    sizes, summed = _Trilinear.of((a, b, c), (expand1, expand2, expand3), sumdim)
    return a.with_dims([size for d, size in enumerate(sizes) if d not in summed])


def _refuse_trilinear(node: Node, traits: DeviceTraits) -> str | None:
    if not node.result.type.dtype.is_float:
        return f"no kernel for {node.result.type.dtype.name}"
    return None


@rewrite("aten._trilinear.default", _trilinear_shape, supports=_refuse_trilinear)
def _trilinear(
    builder: Builder,
    node: Node,
    a: Value,
    b: Value,
    c: Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int,
) -> Value:
    """The sum over some dims of the product of three tensors, each of which lacks some dims. The
    product is never stored."""
    expands = (expand1, expand2, expand3)
    whole, summed = _Trilinear.of((a.type, b.type, c.type), expands, sumdim)
    wide = [
        builder.aten.view(each, _widened(each.type, expand))
        for each, expand in zip((a, b, c), expands)
    ]
    kept = [d for d in range(len(whole)) if d not in summed]
    names = {d: f"i{kept.index(d)}" if d in kept else f"k{d}" for d in range(len(whole))}

    def at(value: Value) -> str:
        return ", ".join(
            "0" if size == 1 and whole[d] != 1 else names[d]
            for d, size in enumerate(value.type.dims)
        )

    product = " * ".join(f"{name}({at(each)})" for name, each in zip("ABC", wide))
    fold = Fold(
        tuple(Loop(f"k{d}", "0", f"count_{d}", whole[d], f"count_{d}") for d in summed),
        f"r += {product};",
    )
    numbers = {f"count_{d}": whole[d] for d in summed}
    return folded(builder, fold, dict(zip("ABC", wide)), node.result.type, numbers=numbers)[0]

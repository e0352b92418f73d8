"""Normalizations with statistics of channels or groups of channels: batch, instance and group norm.

If groups are many, or small enough for one workgroup each, they have a kernel; on GPUs, several
workgroups share a large group (`group_slices.py`). Otherwise the result
is `x * scale + shift`, with one scale and shift per channel (and per image, unless it is a batch
norm). The result keeps the layout of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, packed
from purevk.lower.expression import Expression
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import gcd4
from purevk.ops.builder import Builder
from purevk.ops.image_layout import LayoutQuery
from purevk.ops.promotion import wide_type
from purevk.ops.reduce.group_slices import form_of, lower_slices
from purevk.ops.reduce.normalization import EpilogueIndex, alike, batch_norm_factors, emit_norm
from purevk.ops.reduce.reduction import Reduction
from purevk.ops.reduce.statistics import reduce
from purevk.ops.registry import Kernel, Order, ShapeError, Supports, define, rewrite
from purevk.ops.shapes import is_empty
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits

_BIASED = Reduction(finish="(a / float(n))", variance=True)


def _moments(builder: Builder, x: Value, dims: Sequence[int]) -> tuple[Value, Value]:
    """Mean and variance over some dims, which keep the size 1."""
    wide = wide_type(x.type.dtype)
    return reduce(builder, x, "mean", dims, True, wide), reduce(
        builder, x, _BIASED, dims, True, wide
    )


def _scaled(builder: Builder, x: Value, scale: Value, shift: Value) -> Value:
    made = builder.aten.add.Tensor(builder.aten.mul.Tensor(x, scale), shift)
    return builder.aten._to_copy(made, x.type.dtype)


def _normalized(
    builder: Builder, x: Value, mean: Value, scale: Value, bias: Value | None = None
) -> Value:
    """Not x * scale + shift, which cancel where the mean is far from 0."""
    made = builder.aten.sub.Tensor(x, mean)
    made = builder.aten.mul.Tensor(made, scale)
    if bias is not None:
        made = builder.aten.add.Tensor(made, bias)
    return builder.aten._to_copy(made, x.type.dtype)


def _rstd(builder: Builder, variance: Value, eps: float) -> Value:
    return builder.aten.rsqrt(builder.aten.add.Tensor(variance, float(eps)))


def _as(builder: Builder, value: Value, dtype: DType, sizes: Sequence[Size] | None = None) -> Value:
    made = builder.aten._to_copy(value, dtype)
    return made if sizes is None else builder.aten.view(made, tuple(sizes))


def _refuse(node: Node, traits: DeviceTraits) -> str | None:
    dtype = node.tensor("x").type.dtype
    return None if dtype.is_float else f"no kernel for {dtype.name}"


# -- group norm ----------------------------------------------------------------------------------
NAME = "purevk.group_norm"


@signature("x, weight, bias, groups: Size, eps, epilogue=None, extras=()")
def _kernel_shape(x: TensorType, epilogue: Expression | None) -> TensorType:
    return x if epilogue is None else x.with_dtype(epilogue.dtypes[epilogue.outputs[0]])


def _nhwc_order(rank: int) -> Order:
    """The order in memory of the dims of an NHWC image, or of one with other spatial dims."""
    return (0, *range(2, rank), 1)


def _kernel_lower(lowering: Lowering, node: Node) -> None:
    x, out = lowering.operand(node.tensor("x")), lowering.operand(node.result)
    groups = node.size("groups")
    if is_empty(out.type):
        return
    batch, channels, area = x.dims[0], x.dims[1], _dims.product(x.dims[2:])
    nhwc = not out.layout.is_contiguous(out.dims)
    order = _nhwc_order(len(x.dims)) if nhwc else None
    wanted = Layout.dense(x.dims, order).strides
    if not isinstance(x.offset, int) or any(
        size != 1 and a != b for size, a, b in zip(x.dims, x.strides, wanted)
    ):
        x = dense(lowering, x, order)
    weight, bias = (packed(lowering, node.optional_tensor(name)) for name in ("weight", "bias"))
    offsets = [
        operand.offset
        for operand in ((x, out, weight, bias) if nhwc else (x, out))
        if operand is not None
    ]
    inner = channels // groups
    vector = gcd4(inner if nhwc else area, *offsets)
    aligned = gcd4(x.offset, out.offset)
    if form := form_of(lowering.traits, x.type, groups, nhwc, vector, aligned):
        lower_slices(lowering, node, x, out, weight, bias, form)
        return
    channel = (1, "channel(row, col)")
    if nhwc:
        index = EpilogueIndex("row_start(row) + offset_in_row(col)", column=channel)
    else:
        index = EpilogueIndex("row * columns + col", row=channel)
    emit_norm(
        lowering,
        node,
        x,
        out,
        weight,
        bias,
        batch * groups,
        inner * area,
        vector=vector,
        macros={"GROUP": 2 if nhwc else 1},
        group={"group_channels": inner, "area": area, "groups": groups},
        index=index,
    )


def _kernel_order(node: Node, query: LayoutQuery) -> tuple[Order | None, ...]:
    sizes = node.result.type.dims
    order = _nhwc_order(len(sizes))
    return (order if query(node.tensor("x")).dense_order(sizes) == order else None,)


define(NAME, _kernel_shape, Kernel(_kernel_lower, layouts=_kernel_order, epilogue=True))


def _normalize_groups(
    builder: Builder, x: Value, weight: Value | None, bias: Value | None, groups: Size, eps: float
) -> tuple[Value, Value, Value]:
    """The result, and the mean and 1 / deviation of each group."""
    batch, channels, *rest = x.type.dims
    seen = builder.aten.view(x, (batch, groups, channels // groups, *rest))
    mean, variance = _moments(builder, seen, range(2, seen.type.rank))
    rstd = _rstd(builder, variance, eps)
    profile = builder.traits.profile
    if (
        _dims.upper(batch * groups) >= profile.min_norm_groups
        or _dims.upper(_dims.product(seen.type.dims[2:])) <= profile.max_norm_elements
    ):
        made = builder.emit(NAME, x, *alike(builder, weight, bias), groups, eps, None, ())
        mean, rstd = (_as(builder, each, x.type.dtype, (batch, groups)) for each in (mean, rstd))
        return made, mean, rstd
    flat = [builder.aten.view(value, (batch, groups, 1)) for value in (mean, rstd)]
    by_group = (1, groups, channels // groups)
    scale = flat[1]
    if weight is not None:
        wide = _as(builder, weight, rstd.type.dtype, by_group)
        scale = builder.aten.mul.Tensor(scale, wide)
    factors = [flat[0], scale]
    if bias is not None:
        factors.append(_as(builder, bias, rstd.type.dtype, by_group))
    sizes = (batch, channels, *([1] * len(rest)))
    for number, value in enumerate(factors):
        wide = builder.aten.expand(value, (batch, groups, channels // groups))
        factors[number] = builder.aten.view(wide, sizes)
    made = _normalized(builder, x, *factors)
    mean, rstd = (_as(builder, each, x.type.dtype, (batch, groups)) for each in (mean, rstd))
    return made, mean, rstd


@signature("x, weight, bias, N: Size, C: Size, HxW: Size, group: int, eps")
def _group_shape(x: TensorType, N: Size, group: int) -> tuple[TensorType, ...]:
    if x.dims[1] % group != 0:
        raise ShapeError(f"{x.dims[1]} channels in {group} groups")
    stats = x.with_dims((N, group))
    return x, stats, stats


rewrite("aten.native_group_norm.default", _group_shape, supports=_refuse)(
    lambda builder, node, x, weight, bias, n, c, hw, groups, eps: _normalize_groups(
        builder, x, weight, bias, groups, eps
    )
)
rewrite(
    "aten.group_norm.default",
    lambda x, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True: x,
    supports=_refuse,
)(
    lambda builder, node, x, groups, weight, bias, eps, _: _normalize_groups(
        builder, x, weight, bias, groups, eps
    )[0]
)


# -- batch norm ----------------------------------------------------------------------------------
def _others(x: TensorType) -> list[int]:
    return [d for d in range(x.rank) if d != 1]


def _of_channels(builder: Builder, value: Value, x: Value) -> Value:
    return builder.aten.view(value, (x.type.dims[1], *([1] * (x.type.rank - 2))))


class _BatchNorm(NamedTuple):
    """The result, the mean and 1 / deviation of the batch (empty if the running ones are used), and
    the running mean and variance that follow, if there are any."""

    result: Value
    mean: Value
    rstd: Value
    running: tuple[Value, ...]


def _normalize_batch(
    builder: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> _BatchNorm:
    if training or mean is None or variance is None:
        channels = (x.type.dims[1],)
        mine, theirs = (
            builder.aten.view(value, channels) for value in _moments(builder, x, _others(x.type))
        )
        scale = _rstd(builder, theirs, eps)
        if weight is not None:
            scale = builder.aten.mul.Tensor(scale, weight)
        factors = [mine, scale, *([bias] if bias is not None else [])]
        made = _normalized(builder, x, *(_of_channels(builder, value, x) for value in factors))
        running: tuple[Value, ...] = ()
        if mean is not None and variance is not None:
            count = _dims.product(size for d, size in enumerate(x.type.dims) if d != 1)
            summed = builder.aten.mul.Tensor(theirs, count)
            unbiased = builder.aten.div.Tensor(summed, count - 1)
            running = (
                _moved(builder, mean, mine, momentum),
                _moved(builder, variance, unbiased, momentum),
            )
        return _BatchNorm(made, mine, _rstd(builder, theirs, eps), running)
    scale, shift = batch_norm_factors(builder, weight, bias, mean, variance, eps)
    made = _scaled(builder, x, _of_channels(builder, scale, x), _of_channels(builder, shift, x))
    empty = builder.aten.full((0,), fill_value=0.0, dtype=DType.float32)
    return _BatchNorm(made, empty, empty, (mean, variance))


def _moved(builder: Builder, old: Value, new: Value, momentum: float) -> Value:
    """A running statistic after a batch."""
    made = builder.aten.add.Tensor(
        builder.aten.mul.Tensor(old, 1.0 - momentum),
        builder.aten.mul.Tensor(new, momentum),
    )
    return builder.aten._to_copy(made, old.type.dtype)


@signature("x, weight, bias, running_mean, running_var, training, momentum, eps")
def _batch_shape(x: TensorType, training: bool) -> tuple[TensorType, ...]:
    saved = TensorType(x.dtype, (x.dims[1],) if training else (0,))
    return x, saved, saved


def _refuse_training(parameter: str) -> Supports:
    """`parameter`: whether the statistics are those of the batch."""

    def supports(node: Node, traits: DeviceTraits) -> str | None:
        if node.bool(parameter) and node.optional_tensor("running_mean") is not None:
            return "no kernel that updates running statistics in place"
        return _refuse(node, traits)

    return supports


for _name in ("_native_batch_norm_legit", "native_batch_norm"):
    rewrite(f"aten.{_name}.default", _batch_shape, supports=_refuse_training("training"))(
        lambda builder, node, *args: _normalize_batch(builder, *args)[:3]
    )


@rewrite(
    "aten._native_batch_norm_legit_functional.default",
    lambda x, weight, bias, running_mean, running_var, training, momentum, eps: (
        *_batch_shape(x, weight, bias, running_mean, running_var, training, momentum, eps),
        running_mean,
        running_var,
    ),
    supports=_refuse,
)
def _batch_functional(builder: Builder, node: Node, *args: Any) -> tuple[Value, ...]:
    made = _normalize_batch(builder, *args)
    return (*made[:3], *made.running)


@signature("x, weight, bias, running_mean, running_var, momentum, eps")
def _updated_shape(
    x: TensorType, running_mean: TensorType, running_var: TensorType
) -> tuple[TensorType, ...]:
    made = _batch_shape(x=x, training=True)
    return *made, TensorType(DType.uint8, (0,)), running_mean, running_var


@rewrite("aten._batch_norm_with_update_functional.default", _updated_shape, supports=_refuse)
def _updated(builder: Builder, node: Node, *args: Any) -> tuple[Value, ...]:
    x, weight, bias, mean, variance, momentum, eps = args
    made = _normalize_batch(builder, x, weight, bias, mean, variance, True, momentum, eps)
    reserve = builder.aten.full(
        node.results[3].type.dims, fill_value=0, dtype=node.results[3].type.dtype
    )
    return (*made[:3], reserve, *made.running)


rewrite(
    "aten._native_batch_norm_legit.no_stats",
    lambda x, weight, bias, training, momentum, eps: _batch_shape(
        x, weight, bias, None, None, True, momentum, eps
    ),
    supports=_refuse,
)(
    lambda builder, node, x, weight, bias, training, momentum, eps: _normalize_batch(
        builder, x, weight, bias, None, None, True, momentum, eps
    )[:3]
)
rewrite(
    "aten.batch_norm.default",
    lambda x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True: (
        x
    ),
    supports=_refuse_training("training"),
)(lambda builder, node, *args: _normalize_batch(builder, *args[:8]).result)


@signature(
    "x, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled=True"
)
def _instance_shape(x: TensorType) -> TensorType:
    return x


@rewrite(
    "aten.instance_norm.default", _instance_shape, supports=_refuse_training("use_input_stats")
)
def _instance(
    builder: Builder,
    node: Node,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    variance: Value | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Value:
    if use_input_stats:
        return _normalize_groups(builder, x, weight, bias, x.type.dims[1], eps)[0]
    return _normalize_batch(builder, x, weight, bias, mean, variance, False, momentum, eps).result

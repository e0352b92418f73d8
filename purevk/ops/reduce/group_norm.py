"""Normalizations whose statistics are of channels or groups of channels: batch, instance and group
norm.

Groups that are many or small enough for a workgroup each have a kernel. All else is `x * scale +
shift` with one number of each a channel (and, but for batch norm, an image). Either way x stays
where it lies in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, packed
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import gcd4
from purevk.ops.builder import Builder
from purevk.ops.promotion import wide_type
from purevk.ops.reduce.normalization import alike, batch_norm_factors, emit_norm
from purevk.ops.reduce.reduction import Reduction
from purevk.ops.reduce.statistics import reduce
from purevk.ops.registry import Kernel, Operator, ShapeError, register, rewrite

_BIASED = Reduction(finish="(a / float(n))", variance=True)


def _moments(builder: Builder, x: Value, dims: Sequence[int]) -> tuple[Value, Value]:
    """Mean and variance over some dims, which keep the size 1."""
    wide = wide_type(x.type.dtype)
    return reduce(builder, x, "mean", dims, True, wide), reduce(
        builder, x, _BIASED, dims, True, wide
    )


def _scaled(builder: Builder, x: Value, scale: Value, shift: Value) -> Value:
    made = builder.emit("aten.add.Tensor", builder.emit("aten.mul.Tensor", x, scale), shift, 1)
    return builder.emit("aten._to_copy.default", made, x.type.dtype)


def _rstd(builder: Builder, variance: Value, eps: float) -> Value:
    return builder.emit(
        "aten.rsqrt.default", builder.emit("aten.add.Tensor", variance, float(eps), 1)
    )


def _as(builder: Builder, value: Value, dtype: DType, sizes: Sequence[Size] | None = None) -> Value:
    made = builder.emit("aten._to_copy.default", value, dtype)
    return made if sizes is None else builder.emit("aten.view.default", made, tuple(sizes))


def _refuse(node: Node, traits: Any) -> str | None:
    dtype = node.args[0].type.dtype
    return None if dtype.is_float else f"no kernel for {dtype.name}"


# -- group norm ----------------------------------------------------------------------------------
NAME = "purevk.group_norm"


def _kernel_shape(
    x: TensorType,
    weight: TensorType | None,
    bias: TensorType | None,
    groups: int,
    eps: float,
    epilogue: Any = None,
    extras: tuple = (),
) -> TensorType:
    return x if epilogue is None else x.with_dtype(epilogue.dtypes[epilogue.outputs[0]])


def _channels_last(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def _kernel_lower(lowering: Lowering, node: Node) -> None:
    x_value, weight_value, bias_value, groups, eps, epilogue, extras = node.args
    x, out = lowering.operand(x_value), lowering.operand(node.result)
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    batch, channels, area = x.dims[0], x.dims[1], _dims.product(x.dims[2:])
    last = not out.layout.is_contiguous(out.dims)
    order = _channels_last(len(x.dims)) if last else None
    wanted = Layout.dense(x.dims, order).strides
    if not isinstance(x.offset, int) or any(
        size != 1 and a != b for size, a, b in zip(x.dims, x.strides, wanted)
    ):
        x = dense(lowering, x, order)
    weight, bias = (packed(lowering, value) for value in (weight_value, bias_value))
    offsets = [
        operand.offset
        for operand in ((x, out, weight, bias) if last else (x, out))
        if operand is not None
    ]
    inner = channels // groups
    vector = gcd4(inner if last else area, *offsets)
    channel = (1, "channel(row, col)")
    if last:
        place = {"full": "beginning(row) + place(col)", "column": channel}
    else:
        place = {"full": "row * columns + col", "column": None, "row": channel}
    emit_norm(
        lowering,
        x,
        out,
        weight,
        bias,
        batch * groups,
        inner * area,
        eps,
        vector,
        {"GROUP": 2 if last else 1},
        {"group_channels": inner, "area": area, "groups": groups},
        epilogue,
        extras,
        place,
    )


def _kernel_order(node: Node, layout_of: Any) -> tuple:
    sizes = node.result.type.dims
    last = _channels_last(len(sizes))
    return (last if layout_of(node.args[0]).dense_order(sizes) == last else None,)


register(
    Operator(
        NAME,
        _kernel_shape,
        Kernel(_kernel_lower, layouts=_kernel_order, epilogue=True, bfloat16=False),
    )
)


def _normalize_groups(
    builder: Builder, x: Value, weight: Any, bias: Any, groups: int, eps: float
) -> tuple[Value, Value, Value]:
    batch, channels, *rest = x.type.dims
    seen = builder.emit("aten.view.default", x, (batch, groups, channels // groups, *rest))
    mean, variance = _moments(builder, seen, range(2, seen.type.rank))
    rstd = _rstd(builder, variance, eps)
    profile = builder.traits.profile
    if (
        _dims.upper(batch * groups) >= profile.min_norm_groups
        or _dims.upper(_dims.product(seen.type.dims[2:])) <= profile.max_norm_elements
    ):
        made = builder.emit(NAME, x, *alike(builder, weight, bias), groups, eps, None, ())
        return made, *(_as(builder, value, x.type.dtype, (batch, groups)) for value in (mean, rstd))
    flat = [builder.emit("aten.view.default", value, (batch, groups, 1)) for value in (mean, rstd)]
    sizes = (1, groups, channels // groups)
    scale = (
        flat[1]
        if weight is None
        else builder.emit("aten.mul.Tensor", flat[1], _as(builder, weight, rstd.type.dtype, sizes))
    )
    shift = builder.emit("aten.neg.default", builder.emit("aten.mul.Tensor", flat[0], scale))
    if bias is not None:
        shift = builder.emit(
            "aten.add.Tensor", shift, _as(builder, bias, rstd.type.dtype, sizes), 1
        )
    scale, shift = (
        builder.emit("aten.expand.default", value, (batch, groups, channels // groups))
        for value in (scale, shift)
    )
    sizes = (batch, channels, *([1] * len(rest)))
    scale, shift = (builder.emit("aten.view.default", value, sizes) for value in (scale, shift))
    made = _scaled(builder, x, scale, shift)
    stats = tuple(_as(builder, value, x.type.dtype, (batch, groups)) for value in (mean, rstd))
    return made, *stats


def _group_shape(
    x: TensorType,
    weight: TensorType | None,
    bias: TensorType | None,
    N: Size,
    C: Size,
    HxW: Size,
    group: int,
    eps: float,
) -> tuple[TensorType, ...]:
    if x.dims[1] % group != 0:
        raise ShapeError(f"{x.dims[1]} channels in {group} groups")
    stats = x.with_dims((N, group))
    return x, stats, stats


rewrite(
    "aten.native_group_norm.default",
    _group_shape,
    lambda builder, node, x, weight, bias, n, c, hw, groups, eps: _normalize_groups(
        builder, x, weight, bias, groups, eps
    ),
    supports=_refuse,
)
rewrite(
    "aten.group_norm.default",
    lambda x, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True: x,
    lambda builder, node, x, groups, weight, bias, eps, _: _normalize_groups(
        builder, x, weight, bias, groups, eps
    )[0],
    supports=_refuse,
)


# -- batch norm ----------------------------------------------------------------------------------
def _others(x: TensorType) -> list[int]:
    return [d for d in range(x.rank) if d != 1]


def _of_channels(builder: Builder, value: Value, x: Value) -> Value:
    return builder.emit("aten.view.default", value, (x.type.dims[1], *([1] * (x.type.rank - 2))))


def _normalize_batch(
    builder: Builder,
    x: Value,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """The result, the mean and 1 / deviation of the batch, and the running mean and variance that
    follow."""
    if training:
        channels = (x.type.dims[1],)
        mine, theirs = (
            builder.emit("aten.view.default", value, channels)
            for value in _moments(builder, x, _others(x.type))
        )
        scale, shift = batch_norm_factors(builder, weight, bias, mine, theirs, eps)
        made = _scaled(builder, x, _of_channels(builder, scale, x), _of_channels(builder, shift, x))
        count = _dims.product(size for d, size in enumerate(x.type.dims) if d != 1)
        running = (mean, variance)
        if mean is not None:
            unbiased = builder.emit(
                "aten.mul.Tensor",
                builder.emit(
                    "aten.div.Tensor", builder.emit("aten.mul.Tensor", theirs, count), count - 1
                ),
                momentum,
            )
            running = (
                _moved(builder, mean, builder.emit("aten.mul.Tensor", mine, momentum), momentum),
                _moved(builder, variance, unbiased, momentum),
            )
        rstd = _rstd(builder, theirs, eps)
        return made, mine, rstd, *running
    scale, shift = batch_norm_factors(builder, weight, bias, mean, variance, eps)
    made = _scaled(builder, x, _of_channels(builder, scale, x), _of_channels(builder, shift, x))
    empty = builder.emit("aten.full.default", (0,), 0.0, DType.float32)
    return made, empty, empty, mean, variance


def _moved(builder: Builder, old: Value, part: Value, momentum: float) -> Value:
    made = builder.emit(
        "aten.add.Tensor", builder.emit("aten.mul.Tensor", old, 1.0 - momentum), part, 1
    )
    return builder.emit("aten._to_copy.default", made, old.type.dtype)


def _batch_shape(
    x: TensorType,
    weight: TensorType | None,
    bias: TensorType | None,
    running_mean: TensorType | None,
    running_var: TensorType | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[TensorType, ...]:
    saved = TensorType(x.dtype, (x.dims[1],) if training else (0,))
    return x, saved, saved


def _typed(builder: Builder, node: Node, made: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(
        value
        if value.type.dtype is result.type.dtype
        else builder.emit("aten._to_copy.default", value, result.type.dtype)
        for value, result in zip(made, node.results)
    )


def _refuse_training(node: Node, traits: Any) -> str | None:
    if node.args[5] and node.args[3] is not None:
        return "no kernel that updates running statistics in place"
    return _refuse(node, traits)


for _name in ("_native_batch_norm_legit", "native_batch_norm"):
    rewrite(
        f"aten.{_name}.default",
        _batch_shape,
        lambda builder, node, *args: _typed(builder, node, _normalize_batch(builder, *args)),
        supports=_refuse_training,
    )
rewrite(
    "aten._native_batch_norm_legit_functional.default",
    lambda x, weight, bias, running_mean, running_var, training, momentum, eps: (
        *_batch_shape(x, weight, bias, running_mean, running_var, training, momentum, eps),
        running_mean,
        running_var,
    ),
    lambda builder, node, *args: _typed(builder, node, _normalize_batch(builder, *args)),
    supports=_refuse,
)


def _updated(
    builder: Builder,
    node: Node,
    x: Value,
    weight: Any,
    bias: Any,
    mean: Value,
    variance: Value,
    momentum: float,
    eps: float,
) -> tuple:
    made = _normalize_batch(builder, x, weight, bias, mean, variance, True, momentum, eps)
    reserve = builder.emit(
        "aten.full.default", node.results[3].type.dims, 0, node.results[3].type.dtype
    )
    return _typed(builder, node, (*made[:3], reserve, *made[3:]))


def _updated_shape(
    x: TensorType,
    weight: Any,
    bias: Any,
    running_mean: TensorType,
    running_var: TensorType,
    momentum: float,
    eps: float,
) -> tuple:
    made = _batch_shape(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return *made, TensorType(DType.uint8, (0,)), running_mean, running_var


rewrite(
    "aten._batch_norm_with_update_functional.default", _updated_shape, _updated, supports=_refuse
)
rewrite(
    "aten._native_batch_norm_legit.no_stats",
    lambda x, weight, bias, training, momentum, eps: _batch_shape(
        x, weight, bias, None, None, True, momentum, eps
    ),
    lambda builder, node, x, weight, bias, training, momentum, eps: _typed(
        builder, node, _normalize_batch(builder, x, weight, bias, None, None, True, momentum, eps)
    ),
    supports=_refuse,
)
rewrite(
    "aten.batch_norm.default",
    lambda x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True: (
        x
    ),
    lambda builder, node, *args: _normalize_batch(builder, *args[:8])[0],
    supports=_refuse_training,
)


def _instance_shape(
    x: TensorType,
    weight: TensorType | None,
    bias: TensorType | None,
    running_mean: TensorType | None,
    running_var: TensorType | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> TensorType:
    return x


def _instance(
    builder: Builder,
    node: Node,
    x: Value,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    own: bool,
    momentum: float,
    eps: float,
    _: Any,
) -> Value:
    if own:
        return _normalize_groups(builder, x, weight, bias, x.type.dims[1], eps)[0]
    return _normalize_batch(builder, x, weight, bias, mean, variance, False, momentum, eps)[0]


rewrite("aten.instance_norm.default", _instance_shape, _instance, supports=_refuse_training)

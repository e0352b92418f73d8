"""Rows that are longer than an invocation may walk: sums of parts in place of one loop."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from purevk.dtypes import DType
from purevk.ir import Node, Size, Value
from purevk.ir import dims as _dims
from purevk.lower.rows import most_columns
from purevk.ops.builder import Builder
from purevk.ops.conv.convolution import NAME as CONVOLUTION
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.ops.movement.rearrange import pad
from purevk.ops.promotion import promote_types, wide_type
from purevk.ops.reduce.normalization import NAME as NORM
from purevk.ops.reduce.normalization import passes_of_norm
from purevk.ops.reduce.reduction import NAME as REDUCE
from purevk.ops.reduce.softmax import NAME as SOFTMAX
from purevk.ops.reduce.softmax import PASSES
from purevk.ops.registry import in_parts
from purevk.tuning import DeviceTraits

_MOST_PARTS = 64  # of a size that varies: smaller ones pay for all of them


def to_dtype(builder: Builder, value: Value, dtype: DType) -> Value:
    return value if value.type.dtype is dtype else builder.aten._to_copy(value, dtype)


def _wide(builder: Builder, value: Value) -> Value:
    return to_dtype(builder, value, wide_type(value.type.dtype))


def typed(builder: Builder, value: Value, node: Node) -> Value:
    """A result in the dtype and with the sizes of the node's."""
    type = node.results[0].type
    if value.type.dtype is not type.dtype:
        value = builder.aten._to_copy(value, type.dtype)
    return value if value.type.dims == type.dims else builder.aten.view(value, type.dims)


def _is_longer(size: Size, most: int) -> bool:
    """Whether a size may be above `most`, and has a bound for which parts can be planned."""
    largest = _dims.UNBOUNDED if isinstance(size, int) else _MOST_PARTS * max(most, 1)
    return most < _dims.upper(size) < min(_dims.UNBOUNDED, largest)


def _ends(size: Size, most: int) -> list[tuple[Size, Size]]:
    """A size in parts of up to `most`: the first element of each, and the one after the last."""
    parts = -(-_dims.upper(size) // most)
    ends = [size * part // parts for part in range(parts + 1)]
    return list(pairwise(ends))


# -- rows that are reduced -----------------------------------------------------------------------
def softmax(builder: Builder, node: Node) -> Value:
    """`purevk.softmax` by reductions and pointwise operators."""
    x = node.tensor("x")
    x = to_dtype(builder, x, wide_type(promote_types(x.type.dtype, node.result.type.dtype)))
    dims = (node.int("dim") % x.type.rank,)
    top = builder.emit(REDUCE, x, "amax", dims, True, x.type.dtype)
    below = builder.aten.sub.Tensor(x, top)
    powers = builder.aten.exp(below)
    total = builder.emit(REDUCE, powers, "sum", dims, True, x.type.dtype)
    if node.bool("log"):
        return typed(
            builder,
            builder.aten.sub.Tensor(below, builder.aten.log(total)),
            node,
        )
    made = builder.aten.div.Tensor(powers, total)
    if node.bool("zero_rows"):
        made = builder.aten.where.self(builder.aten.eq.Tensor(top, float("-inf")), x=0.0, y=made)
    return typed(builder, made, node)


def normalize(
    builder: Builder,
    x: Value,
    dims: Sequence[int],
    eps: float,
    dtype: DType,
    rms: bool = False,
) -> Value:
    """Elements over their standard deviation along `dims`, or (`rms`) over the root of their mean
    square, in `dtype`. Without `rms`, the mean is subtracted first."""
    x = to_dtype(builder, x, dtype)
    if not rms:
        x = builder.aten.sub.Tensor(x, builder.emit(REDUCE, x, "mean", tuple(dims), True, dtype))
    mean = builder.emit(REDUCE, builder.aten.mul.Tensor(x, x), "mean", tuple(dims), True, dtype)
    root = builder.aten.sqrt(builder.aten.add.Tensor(mean, float(eps)))
    return builder.aten.div.Tensor(x, root)


def scaled(builder: Builder, x: Value, weight: Value | None, bias: Value | None) -> Value:
    """x * weight + bias, of those that there are."""
    made = x if weight is None else builder.aten.mul.Tensor(x, weight)
    return made if bias is None else builder.aten.add.Tensor(made, bias)


def norm(builder: Builder, node: Node) -> Value:
    """`purevk.norm` by reductions and pointwise operators."""
    x, rank = node.tensor("x"), node.tensor("x").type.rank
    dims = range(rank - node.int("count"), rank)
    dtype = wide_type(x.type.dtype)
    made = normalize(builder, x, dims, node.float("eps"), dtype, node.bool("rms"))
    weight, bias = node.optional_tensor("weight"), node.optional_tensor("bias")
    return typed(builder, scaled(builder, made, weight, bias), node)


def _long_softmax(node: Node, traits: DeviceTraits) -> bool:
    x = node.tensor("x").type
    return _is_longer(x.dims[node.int("dim") % x.rank], most_columns(traits, PASSES))


def _long_norm(node: Node, traits: DeviceTraits) -> bool:
    x, passes = node.tensor("x").type, passes_of_norm(node.bool("rms"))
    columns = _dims.product(x.dims[x.rank - node.int("count") :])
    return _is_longer(columns, most_columns(traits, passes))


in_parts(SOFTMAX, softmax, _long_softmax)
in_parts(NORM, norm, _long_norm)


# -- sums of products ----------------------------------------------------------------------------
def _sum(builder: Builder, node: Node, parts: Sequence[Value]) -> Value:
    total = parts[0]
    for part in parts[1:]:
        total = builder.aten.add.Tensor(total, part)
    return typed(builder, total, node)


def _most_terms(traits: DeviceTraits) -> int:
    """Terms of a matmul whose kernel takes 4 in an iteration, and 512 in a loop of their own."""
    return 512 * (traits.max_iterations - 8) // 130


def _matmul(builder: Builder, node: Node) -> Value:
    a, b, bias = node.tensor("a"), node.tensor("b"), node.optional_tensor("bias")
    parts: list[Value] = []
    for start, end in _ends(a.type.dims[-1], _most_terms(builder.traits)):
        left = builder.aten.slice.Tensor(a, a.type.rank - 1, start, end)
        right = builder.aten.slice.Tensor(b, b.type.rank - 2, start, end)
        own = None if parts or bias is None else _wide(builder, bias)
        parts.append(
            builder.emit(MATMUL, _wide(builder, left), _wide(builder, right), own, None, ())
        )
    return _sum(builder, node, parts)


def _window(node: Node) -> list[int]:
    """Rows, columns and channels of a convolution's window."""
    return [_dims.upper(size) for size in node.tensor("weight").type.dims[:3]]


def _iterations(window: Sequence[int], dtype: DType) -> int:
    """Of a convolution. All kernels but that of float64 take 4 channels at once."""
    height, width, channels = window
    each = channels if dtype is DType.float64 else -(-channels // 4)
    return 1 + height * (2 + width * (2 + each))


def _convolution(builder: Builder, node: Node) -> Value:
    """The sum of convolutions with parts of the window, along its longest dim. Parts that are still too
    long are cut again."""
    window, dtype = _window(node), node.tensor("x").type.dtype
    dim = max(range(3), key=lambda d: window[d] if d < 2 else window[d] // 4)

    def iterations(length: int) -> int:
        return _iterations([length if d == dim else n for d, n in enumerate(window)], dtype)

    lengths = range(1, window[dim] + 1)
    most = bisect_right(lengths, builder.traits.max_iterations, key=iterations)
    weight, bias = node.tensor("weight"), node.optional_tensor("bias")
    parts: list[Value] = []
    for start, end in _ends(weight.type.dims[dim], max(most, 1 if dim < 2 else 4)):
        terms = _wide(builder, builder.aten.slice.Tensor(weight, dim, start, end))
        own = None if parts or bias is None else _wide(builder, bias)
        some = node.with_arguments(weight=terms, bias=own)
        some = (_of_taps if dim < 2 else _of_channels)(builder, some, start, end, dim)
        parts.append(builder.emit(CONVOLUTION, *some.args))
    return _sum(builder, node, parts)


def _of_channels(builder: Builder, node: Node, start: Size, end: Size, dim: int) -> Node:
    """The node with the channels from `start` to `end` of each group."""
    x, groups = node.tensor("x"), node.int("groups")
    batch, channels, *sizes = x.type.dims
    in_groups = builder.aten.view(x, (batch, groups, channels // groups, *sizes))
    some = builder.aten.slice.Tensor(in_groups, dim=2, start=start, end=end)
    some = builder.aten.reshape(some, (batch, groups * (end - start), *sizes))
    return node.with_arguments(x=_wide(builder, some))


def _of_taps(builder: Builder, node: Node, start: Size, end: Size, dim: int) -> Node:
    """The node with what the taps from `start` to `end` read of the rows (dim 0) or columns (dim 1)."""
    x, padding = node.tensor("x"), [*node.ints("padding")]
    stride, dilation = node.ints("stride")[dim], node.ints("dilation")[dim]
    before = padding[dim] - start * dilation
    span = (node.result.type.dims[2 + dim] - 1) * stride + (end - start - 1) * dilation + 1
    pads = (before, span - before - x.type.dims[2 + dim])
    padding[dim] = 0
    some = pad(builder, x, (0, 0, *pads) if dim == 0 else pads)
    return node.with_arguments(x=_wide(builder, some), padding=tuple(padding))


def _long_matmul(node: Node, traits: DeviceTraits) -> bool:
    return _is_longer(node.tensor("a").type.dims[-1], _most_terms(traits))


def _long_convolution(node: Node, traits: DeviceTraits) -> bool:
    window = _window(node)
    long = _iterations(window, node.tensor("x").type.dtype) > traits.max_iterations
    return long and max(window) < _dims.UNBOUNDED


in_parts(MATMUL, _matmul, _long_matmul)
in_parts(CONVOLUTION, _convolution, _long_convolution)


def group_norm(builder: Builder, node: Node) -> Value:
    """`purevk.group_norm` by reductions and pointwise operators."""
    x = node.tensor("x")
    batch, channels, *sizes = x.type.dims
    rows = (batch, node.size("groups"), channels // node.size("groups") * _dims.product(sizes))
    made = builder.aten.view(x, rows)
    made = normalize(builder, made, (2,), node.float("eps"), wide_type(x.type.dtype))
    made = builder.aten.view(made, x.type.dims)
    weight, bias = (
        None if value is None else builder.aten.view(value, (channels, *[1] * len(sizes)))
        for value in (node.optional_tensor("weight"), node.optional_tensor("bias"))
    )
    return typed(builder, scaled(builder, made, weight, bias), node)

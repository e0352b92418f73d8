"""Tensors that are larger than one binding: operators as parts of the same operator, each of which
reads and writes slices of them, or as sums of such parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from purevk.errors import GraphError
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import identity
from purevk.ops.attention.attention import NAME as ATTENTION
from purevk.ops.builder import Builder
from purevk.ops.conv.convolution import NAME as CONVOLUTION
from purevk.ops.elementwise.pieces import NAME as PIECES
from purevk.ops.image.pooling import NAME as POOL
from purevk.ops.image.resample import RESIZED
from purevk.ops.long_rows import group_norm, norm, softmax, to_dtype, typed
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.ops.promotion import wide_type
from purevk.ops.reduce.group_norm import NAME as GROUP_NORM
from purevk.ops.reduce.normalization import NAME as NORM
from purevk.ops.reduce.reduction import NAME as REDUCE
from purevk.ops.reduce.scan import NAME as SCAN
from purevk.ops.reduce.softmax import NAME as SOFTMAX
from purevk.ops.registry import in_parts
from purevk.ops.row_parts import BETTER, Slices, has_parts, join_flat, join_reduced
from purevk.ops.sort.sort import NAME as SORT
from purevk.tuning import DeviceTraits

_SLACK = 512  # bytes of a binding before and after a slice


@dataclass(frozen=True)
class Axis:
    """A dim along which a node can be cut.

    Attributes:
        size: of the dim.
        args: the dims that are cut of tensors, by the names of parameters. A tensor whose size there
            is 1 stays whole.
        results: the dim of each result that is cut; None: each part gives a part of a sum.
        join: makes the result of the slices; None: they are parts of it.
        least: how long slices have to be, so that what becomes of them is smaller.
    """

    size: Size
    args: Mapping[str, int]
    results: int | None
    join: Callable[[Builder, Node, Slices], Sequence[Value]] | None = None
    least: int = 1

    def cuts(self, node: Node) -> dict[Value, int]:
        """The tensors that are cut, with their dims."""
        tensors = {node.optional_tensor(name): dim for name, dim in self.args.items()}
        found = {
            value: dim
            for value, dim in tensors.items()
            if value is not None and value.type.dims[dim] != 1
        }
        if self.results is not None:
            found |= dict.fromkeys(node.results, self.results)
        return found


Axes = Callable[[Node], Sequence[Axis]]


def _part(builder: Builder, value: Value, dim: int, start: int, size: Size) -> Value:
    return builder.purevk.part(value, dim, start, size)


def _joined(
    builder: Builder, parts: Sequence[Value], starts: Iterable[int], dim: int, type: TensorType
) -> Value:
    """The tensor of a type that parts along a dim make."""
    pieces = tuple(
        (
            identity(type.dtype),
            (part,),
            (),
            part.type.dims,
            (1,) * type.rank,
            (tuple(start if d == dim else 0 for d in range(type.rank)),),
        )
        for part, start in zip(parts, starts)
    )
    return builder.emit(PIECES, pieces, type.dims, type.dtype)


def _sliced(builder: Builder, node: Node, axis: Axis, start: int, size: Size) -> Node:
    """The node for a slice of its arguments, its results missing."""
    cuts = axis.cuts(node)
    some = {
        name: _part(builder, value, cuts[value], start, size)
        for name in axis.args
        for value in [node.optional_tensor(name)]
        if value is not None and value in cuts
    }
    return node.with_arguments(**some)


def _cut(builder: Builder, node: Node) -> Sequence[Value]:
    axis = _choose(node, builder.traits)
    if axis is None:
        raise GraphError(f"{node.op} cannot be cut", where=node.source)
    length = _length(node, axis, builder.traits)
    slices = [
        (start, _dims.minimum(_dims.maximum(axis.size - start, 0), length))
        for start in range(0, _dims.upper(axis.size), length)
    ]
    if axis.join is not None:
        return axis.join(builder, node, slices)
    made = [builder.emit_all(node.op, *_sliced(builder, node, axis, *each).args) for each in slices]
    starts = [start for start, _ in slices]
    assert axis.results is not None  # else there is a function that joins
    return tuple(
        _joined(builder, parts, starts, axis.results, result.type)
        for parts, result in zip(zip(*made), node.results)
    )


# -- which axis ----------------------------------------------------------------------------------
def _large(node: Node, traits: DeviceTraits) -> list[Value]:
    """The tensors of a node that one binding does not span."""
    return [
        value
        for value in dict.fromkeys((*node.inputs, *node.results))
        if _bytes(node, value) > traits.max_storage_range
    ]


def _bytes(node: Node, value: Value) -> int:
    """The bytes of a tensor, or of the copy that a kernel makes of it."""
    if node.op == CONVOLUTION and value is node.tensor("x"):  # pixels get 4 elements each
        channels = max(_dims.upper(value.type.dims[1]), 1)
        return value.type.nbytes // channels * max(channels, 4)
    return value.type.nbytes


def _length(node: Node, axis: Axis, traits: DeviceTraits) -> int:
    """How long slices are, so that bindings span those of all tensors, or of most."""
    limit = max(traits.max_storage_range - _SLACK, 1)
    cuts = axis.cuts(node)
    lengths = [
        limit * _dims.upper(value.type.dims[cuts[value]]) // _bytes(node, value)
        for value in _large(node, traits)
        if value in cuts
    ]
    size = _dims.upper(axis.size)
    length = max(min(lengths), 1)
    length = min(length, -(-size // 2))
    for multiple in (64, 16, 4):
        if length >= 4 * multiple:
            return length - length % multiple
    return length


def _choose(node: Node, traits: DeviceTraits) -> Axis | None:
    """The axis along which to cut a node: most of its large tensors, and the outermost dims of these."""
    large = _large(node, traits)
    best: tuple[tuple[int, int, bool], Axis] | None = None
    for axis in _AXES[node.op](node) if large else ():
        cuts = axis.cuts(node)
        whole = [value for value in large if value not in cuts]
        if len(whole) == len(large) or not 1 < _dims.upper(axis.size) < _dims.UNBOUNDED:
            continue
        if _length(node, axis, traits) < axis.least:
            continue
        inner = [
            value
            for value in large
            if value in cuts and any(size != 1 for size in value.type.dims[: cuts[value]])
        ]
        cost = (len(whole), len(inner), axis.join is not None)
        if best is None or cost < best[0]:
            best = cost, axis
    return None if best is None else best[1]


# -- reductions ----------------------------------------------------------------------------------
def _reduce_axes(node: Node) -> list[Axis]:
    x, dims, keepdim = node.tensor("x"), node.ints("dims"), node.bool("keepdim")
    axes, at = [], 0
    for d, size in enumerate(x.type.dims):
        if d not in dims:
            axes.append(Axis(size, {"x": d}, at))
        elif node.arg("kind") in BETTER and len(dims) > 1:
            if len(dims) == x.type.rank:
                axes.append(Axis(size, {"x": d}, None, join_flat))
        elif has_parts(node):
            axes.append(Axis(size, {"x": d}, None, partial(join_reduced, dim=d), 2))
        at += keepdim or d not in dims
    return axes


# -- sums of products ----------------------------------------------------------------------------
def _sum(builder: Builder, node: Node, slices: Slices, args: Mapping[str, int]) -> Sequence[Value]:
    """The sum of the results of a node for slices of its terms, in a wide type."""
    wide = wide_type(node.result.type.dtype)
    bias = node.optional_tensor("bias")
    total: Value | None = None
    for start, size in slices:
        some = {
            name: to_dtype(builder, _part(builder, node.tensor(name), dim, start, size), wide)
            for name, dim in args.items()
        }
        own = None if total is not None or bias is None else to_dtype(builder, bias, wide)
        made = builder.emit(node.op, *node.with_arguments(**some, bias=own).args)
        total = made if total is None else builder.aten.add.Tensor(total, made)
    assert total is not None  # there are several slices
    return (typed(builder, total, node),)


def _matmul_axes(node: Node) -> list[Axis]:
    a, b, out = node.tensor("a").type, node.tensor("b").type, node.result.type
    axes = []
    for d, size in enumerate(out.dims[:-2]):
        at = {name: d - out.rank + type.rank for name, type in (("a", a), ("b", b))}
        axes.append(Axis(size, {name: dim for name, dim in at.items() if dim >= 0}, d))
    axes.append(Axis(out.dims[-2], {"a": a.rank - 2}, out.rank - 2))
    axes.append(Axis(out.dims[-1], {"b": b.rank - 1, "bias": 0}, out.rank - 1))
    terms = {"a": a.rank - 1, "b": b.rank - 2}
    return [*axes, Axis(a.dims[-1], terms, None, partial(_sum, args=terms))]


def _convolution_axes(node: Node) -> list[Axis]:
    x, weight, out = node.tensor("x").type, node.tensor("weight").type, node.result.type
    axes = [Axis(out.dims[0], {"x": 0}, 0)]
    if node.int("groups") == 1:
        terms = {"x": 1, "weight": 2}
        axes.append(Axis(out.dims[1], {"weight": 3, "bias": 0}, 1))
        axes.append(Axis(x.dims[1], terms, None, partial(_sum, args=terms)))
    else:
        axes.append(_group_axis(node, {"weight": 3, "bias": 0}))
    if isinstance(x.dims[2], int) and isinstance(weight.dims[0], int):
        axes.append(Axis(out.dims[2], {"x": 2}, 2, _join_rows))
    return axes


def _join_rows(builder: Builder, node: Node, slices: Slices) -> Sequence[Value]:
    """A convolution of bands of an image, each with the rows beyond its ends that its windows reach."""
    x, out = node.tensor("x"), node.result.type
    step, pad, apart = (node.ints(name)[0] for name in ("stride", "padding", "dilation"))
    height, reach = (
        _dims.specialize(x.type.dims[2]),
        apart * (_dims.specialize(node.tensor("weight").type.dims[0]) - 1),
    )
    before = -(
        -pad // step
    )  # rows of the result that windows reach beyond the band, and are dropped
    parts = []
    for start, size in slices:
        length = _dims.specialize(size)
        row = min(max(start - before, 0), (height - 1) // step)  # a band has a row at least
        dropped, first = start - row, row * step
        end = min(max((start + length - 1) * step - pad + reach, first) + 1, height)
        band = _part(builder, x, 2, first, end - first)
        made = builder.emit(node.op, *node.with_arguments(x=band).args)
        parts.append(_part(builder, made, 2, dropped, length))
    return (_joined(builder, parts, [start for start, _ in slices], 2, out),)


def _group_axis(node: Node, others: Mapping[str, int]) -> Axis:
    """The groups of channels. `others`: dims of other arguments that have all of them."""
    join = partial(_join_groups, args={"x": 1, **others})
    return Axis(node.size("groups"), {"x": 1, **others}, 1, join)


def _join_groups(
    builder: Builder, node: Node, slices: Slices, args: Mapping[str, int]
) -> Sequence[Value]:
    groups, out = node.size("groups"), node.result.type
    tensors = {name: node.optional_tensor(name) for name in args}
    parts = []
    for start, size in slices:
        some = {
            name: _part(builder, value, dim, start * each, size * each)
            for name, dim in args.items()
            for value in [tensors[name]]
            if value is not None
            for each in [_dims.specialize(value.type.dims[dim] // groups)]
        }
        parts.append(builder.emit(node.op, *node.with_arguments(**some, groups=size).args))
    each = _dims.specialize(out.dims[1] // groups)
    return (_joined(builder, parts, [start * each for start, _ in slices], 1, out),)


def _group_norm_axes(node: Node) -> list[Axis]:
    x = node.tensor("x").type
    return [Axis(x.dims[0], {"x": 0}, 0), _group_axis(node, {"weight": 0, "bias": 0})]


# -- operators whose dims are independent of one another -----------------------------------------
def _outer_axes(*args: str, dims: Sequence[int] | Callable[[Node], Iterable[int]]) -> Axes:
    """Dims of the results that are dims of the arguments `args` too."""

    def axes(node: Node) -> list[Axis]:
        out = node.results[0].type
        chosen = dims(node) if callable(dims) else dims
        return [Axis(out.dims[d], dict.fromkeys(args, d), d) for d in chosen]

    return axes


def _attention_axes(node: Node) -> list[Axis]:
    if node.arg("functions") is not None or node.bool("blocks"):
        return []
    named = {
        name: node.optional_tensor(name) for name in ("q", "k", "v", "mask", "limits", "sinks")
    }
    axes = []
    for d in (0, 1):
        size = node.result.type.dims[d]
        tensors = {name: value.type.dims for name, value in named.items() if value is not None}
        lead = {name: d - 4 + len(dims) for name, dims in tensors.items()}
        args = {name: dim for name, dim in lead.items() if dim >= 0}
        if all(tensors[name][dim] in (1, size) for name, dim in args.items() if name not in "kv"):
            same = all(tensors[name][args[name]] == size for name in "kv")
            axes += [Axis(size, args, d)] if same else []
    return axes


def _scan_axes(node: Node) -> Sequence[Axis]:
    x, dim = node.tensor("x").type, node.int("dim") % node.tensor("x").type.rank
    axes = _outer_axes("x", dims=_but_dim)(node)
    if isinstance(x.dims[dim], int):
        axes = [*axes, Axis(x.dims[dim], {"x": dim}, dim, partial(_join_scan, dim=dim), 2)]
    return axes


def _join_scan(builder: Builder, node: Node, slices: Slices, dim: int) -> Sequence[Value]:
    """A scan of parts of rows, each continued from the end of the part before."""
    kind, x = node.str("kind"), node.tensor("x")
    parts: list[Sequence[Value]] = []
    for start, size in slices:
        part = _part(builder, x, dim, start, size)
        made = builder.emit_all(node.op, *node.with_arguments(x=part).args)
        if len(made) == 2:
            made = (made[0], builder.aten.add.Tensor(made[1], start))
        if parts:
            last = _dims.specialize(parts[-1][0].type.dims[dim]) - 1
            ends = [_part(builder, each, dim, last, 1) for each in parts[-1]]
            if len(made) == 2:
                replaces = builder.emit(_LATER[kind], made[0], ends[0])
                if x.type.dtype.is_float:
                    lost = builder.aten.isnan(made[0])
                    replaces = builder.aten.logical_or(replaces, lost)
                made = tuple(
                    builder.aten.where.self(replaces, each, end) for each, end in zip(made, ends)
                )
            else:
                more = (1,) if kind == "sum" else ()
                made = (builder.emit(_CONTINUED[kind], made[0], ends[0], *more),)
        parts.append(made)
    starts = [start for start, _ in slices]
    return [
        _joined(builder, each, starts, dim, result.type)
        for each, result in zip(zip(*parts), node.results)
    ]


_LATER = {"max": "aten.ge.Tensor", "min": "aten.le.Tensor"}
_CONTINUED = {
    "sum": "aten.add.Tensor", "prod": "aten.mul.Tensor", "logsumexp": "aten.logaddexp.default",
}  # fmt: skip


def _but_dim(node: Node) -> list[int]:
    rank = node.results[0].type.rank
    return [d for d in range(rank) if d != node.int("dim") % rank]


_AXES: dict[str, Axes] = {
    REDUCE: _reduce_axes,
    MATMUL: _matmul_axes,
    CONVOLUTION: _convolution_axes,
    SOFTMAX: _outer_axes("x", dims=_but_dim),
    NORM: _outer_axes("x", dims=lambda node: range(node.result.type.rank - node.int("count"))),
    GROUP_NORM: _group_norm_axes,
    POOL: _outer_axes("x", dims=(0, 1)),
    SCAN: _scan_axes,
    SORT: _outer_axes("x", dims=_but_dim),
    ATTENTION: _attention_axes,
    **{
        f"aten.{kind}.{overload}": _outer_axes("x", dims=(0, 1))
        for kind in RESIZED
        for overload in ("default", "vec")
    },
}
for _name in _AXES:
    in_parts(_name, _cut, lambda node, traits: _choose(node, traits) is not None)


def _outgrow(node: Node, traits: DeviceTraits) -> bool:
    return bool(_large(node, traits))


# Rows and groups that are larger than a binding.
in_parts(SOFTMAX, softmax, _outgrow)
in_parts(NORM, norm, _outgrow)
in_parts(GROUP_NORM, group_norm, _outgrow)

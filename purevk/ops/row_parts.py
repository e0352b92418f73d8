"""Reductions of parts of rows, and of what these give: where a row is larger than one binding, or longer
than a workgroup may walk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from purevk.dtypes import DType
from purevk.ir import Node, Size, Value
from purevk.ir import dims as _dims
from purevk.lower.map import coordinates
from purevk.lower.rows import most_columns
from purevk.ops.builder import Builder
from purevk.ops.long_rows import to_dtype, typed
from purevk.ops.map import mapped
from purevk.ops.promotion import promote_types, wide_type
from purevk.ops.reduce.reduction import NAME as REDUCE
from purevk.ops.reduce.reduction import Reduction
from purevk.ops.reduce.scan import NAME as SCAN
from purevk.ops.reduce.scan import longest_row
from purevk.ops.registry import in_parts
from purevk.tuning import DeviceTraits

Slices = Sequence[tuple[int, Size]]  # the first index of each, and how many


def has_parts(node: Node) -> bool:
    """Whether the results of parts of a row give that of the row."""
    kind = node.arg("kind")
    if not isinstance(kind, Reduction):
        return True
    counts = kind.variance or _COUNT.search(kind.finish) is not None
    return not kind.best and (not counts or isinstance(_count(node), int))


def _count(node: Node) -> Size:
    """How many elements are reduced to one."""
    return _dims.product(node.tensor("x").type.dims[d] for d in node.ints("dims"))


_COUNT = re.compile(r"\bn\b")
BETTER = {"argmax": "aten.gt.Tensor", "argmin": "aten.lt.Tensor"}


def join_reduced(builder: Builder, node: Node, slices: Slices, dim: int) -> Sequence[Value]:
    """A reduction of parts of rows, and then of the results of these."""
    x, kind, dims = node.tensor("x"), node.arg("kind"), node.ints("dims")
    parts = [builder.purevk.part(x, dim, *each) for each in slices]
    if kind in BETTER:
        return _join_best(builder, node, [start for start, _ in slices], parts, dim)
    dtype, source = node.results[0].type.dtype, x.type.dtype
    wide = wide_type(promote_types(dtype, source)) if dtype.is_float else dtype

    def whole(value: Value, kind: str | Reduction, dtype: DType) -> Value:
        return builder.emit(REDUCE, value, kind, dims, True, dtype)

    last: str | Reduction
    if isinstance(kind, Reduction):
        finish = _COUNT.sub(str(_count(node)), kind.finish)
        last = replace(kind, load="(v)", finish=finish, variance=False)
        if kind.variance:
            below = builder.aten.sub.Tensor(x, whole(x, "mean", wide))
            made = whole(builder.aten.mul.Tensor(below, below), "sum", wide)
            return (typed(builder, whole(made, last, dtype), node),)
        first: str | Reduction = replace(kind, finish="(a)")
    else:
        first = "sum" if kind == "mean" else node.str("kind")
        last = first
    made = builder.aten.cat(tuple(whole(part, first, wide) for part in parts), dim)
    made = whole(made, last, wide if kind == "mean" else dtype)
    if kind == "mean":
        made = builder.aten.div.Tensor(made, _count(node))
    return (typed(builder, made, node),)


def _is_long(node: Node, traits: DeviceTraits) -> bool:
    """Whether a workgroup may not walk a row of which the kernel makes no parts."""
    kind = node.arg("kind")
    whole = kind in BETTER or (isinstance(kind, Reduction) and kind.variance)
    return whole and _most_terms(traits) < _dims.upper(_count(node)) < _dims.UNBOUNDED


def _most_terms(traits: DeviceTraits) -> int:
    return most_columns(traits, 2)


def squared_deviations(builder: Builder, node: Node, x: Value) -> Value:
    """A reduction of squares around the mean, by sums of `x`, the operand in a wide type."""
    how, dims, dtype = node.attribute("kind", Reduction), node.ints("dims"), x.type.dtype
    mean = builder.emit(REDUCE, x, "mean", dims, True, dtype)
    centred = builder.aten.sub.Tensor(x, mean)
    squares = builder.aten.mul.Tensor(centred, centred)
    total = builder.emit(REDUCE, squares, "sum", dims, node.bool("keepdim"), dtype)
    body = f"float a = X({coordinates(total.type.rank)}); r = {how.finish};"
    numbers = {"n": _dims.product(x.type.dims[d] for d in dims)}
    return typed(builder, mapped(builder, body, {"X": total}, total.type, numbers=numbers), node)


def _reduce_in_parts(builder: Builder, node: Node) -> Sequence[Value]:
    x, dims = node.tensor("x"), node.ints("dims")
    if node.arg("kind") not in BETTER:
        dtype = wide_type(promote_types(node.result.type.dtype, x.type.dtype))
        return (squared_deviations(builder, node, to_dtype(builder, x, dtype)),)
    if len(dims) > 1:
        return join_flat(builder, node, ())
    size, length = x.type.dims[dims[0]], _most_terms(builder.traits)
    starts = range(0, _dims.upper(size), length)
    left = [_dims.maximum(size - start, 0) for start in starts]
    slices = [(start, _dims.minimum(each, length)) for start, each in zip(starts, left)]
    return join_reduced(builder, node, slices, dims[0])


def join_flat(builder: Builder, node: Node, slices: Slices) -> Sequence[Value]:
    """The index of the best element of all, as that of a single row."""
    x = node.tensor("x")
    flat = builder.aten.view(x, (x.type.numel,))
    made = builder.emit_all(REDUCE, *node.with_arguments(x=flat, dims=(0,), keepdim=False).args)
    return [builder.aten.view(value, result.type.dims) for value, result in zip(made, node.results)]


def _join_best(
    builder: Builder, node: Node, starts: Sequence[int], parts: Sequence[Value], dim: int
) -> Sequence[Value]:
    """The largest or smallest elements of rows, and where they are, from those of parts of rows. NaN
    is before all others, and of equal elements the first one is taken."""
    kind, index = node.str("kind"), node.optional_dtype("index")
    dtype = node.results[0].type.dtype if index is None else index
    best: tuple[Value, Value] | None = None
    for start, part in zip(starts, parts):
        source = part.type.dtype
        value, at = builder.emit_all(REDUCE, part, kind, (dim,), True, source, dtype)
        at = builder.aten.add.Tensor(at, start)
        if best is None:
            best = value, at
            continue
        better = builder.emit(BETTER[kind], value, best[0])
        if source.is_float:
            lost, found = (builder.aten.isnan(each) for each in (best[0], value))
            found = builder.aten.logical_and(found, builder.aten.logical_not(lost))
            better = builder.aten.logical_or(better, found)
            better = builder.aten.logical_and(better, builder.aten.logical_not(lost))
        best = (
            builder.aten.where.self(better, value, best[0]),
            builder.aten.where.self(better, at, best[1]),
        )
    assert best is not None  # there are several parts
    results = best if index is not None else best[1:]
    return [
        builder.aten.view(to_dtype(builder, made, result.type.dtype), result.type.dims)
        for made, result in zip(results, node.results)
    ]


in_parts(REDUCE, _reduce_in_parts, _is_long)


# -- running extremes ----------------------------------------------------------------------------
_REPLACES = {"max": "aten.ge.Tensor", "min": "aten.le.Tensor"}


def _scan_in_parts(builder: Builder, node: Node) -> Sequence[Value]:
    """Running extremes of parts, joined with the last ones of the part before. Of equal elements the last
    one counts, and NaN replaces all others."""
    x, dim, kind = node.tensor("x"), node.int("dim") % node.tensor("x").type.rank, node.str("kind")
    length, most = x.type.dims[dim], longest_row(builder.traits)
    made: list[tuple[Value, Value]] = []
    for start in range(0, _dims.upper(length), most):
        size = _dims.minimum(_dims.maximum(length - start, 0), most)
        part = builder.purevk.part(x, dim, start, size)
        value, at = builder.emit_all(SCAN, part, kind, dim, *node.args[3:])
        at = builder.aten.add.Tensor(at, start)
        if made:
            last, index = (builder.purevk.part(each, dim, most - 1, 1) for each in made[-1])
            better = builder.emit(_REPLACES[kind], value, last)
            if x.type.dtype.is_float:
                kept = builder.aten.logical_not(builder.aten.isnan(last))
                better = builder.aten.logical_and(better, kept)
                better = builder.aten.logical_or(better, builder.aten.isnan(value))
            value = builder.aten.where.self(better, value, last)
            at = builder.aten.where.self(better, at, index)
        made.append((value, at))
    return [builder.aten.cat(tuple(each), dim) for each in zip(*made)]


def _long_scan(node: Node, traits: DeviceTraits) -> bool:
    length = _dims.upper(node.tensor("x").type.dims[node.int("dim")])
    return node.str("kind") in _REPLACES and longest_row(traits) < length < _dims.UNBOUNDED


in_parts(SCAN, _scan_in_parts, _long_scan)

"""Sums, products and norms of complex numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Node, Size, Value
from purevk.ir import dims as _dims
from purevk.lower.map import coordinates
from purevk.ops.builder import Builder
from purevk.ops.complex.movement import by_parts
from purevk.ops.complex.split import (
    Made,
    Pairs,
    Parts,
    Split,
    apply_by,
    computing,
    expand_by,
    expand_by_own,
)
from purevk.ops.fold import Fold, Loop, folded
from purevk.ops.map import mapped_over_all
from purevk.ops.shapes import wrap, wrap_all

apply_by("aten.cumsum.default")(by_parts)
_FEW_PAIRS = 64  # that a sum of neighbours leaves at first


@apply_by("aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim")
def _sum(split: Split, node: Node) -> Sequence[Made]:
    """A sum of pairs, if there are any: their parts are not neighbours in memory."""
    x, result = node.tensor("x"), node.result.type
    if not x.type.dtype.is_complex or not x.type.rank or not split.has_pairs(x):
        return by_parts(split, node)
    whole = node.op.endswith(".default")
    dims = None if whole else node.optional_ints("dim")
    wanted = wrap_all(dims, x.type.rank) if dims else tuple(range(x.type.rank))
    dtype, emit = computing(node), split.emit
    name = "aten.mean.dim" if "mean" in node.op else "aten.sum.dim_IntList"
    pairs = split.pairs(x, dtype)
    *lead, columns = x.type.dims
    few = _divisor(columns) if x.type.rank - 1 in wanted else 1
    if few > 1:
        # Neighbouring pairs are added up last, so that rows of many numbers are read.
        pairs = emit("aten.view.default", pairs, (*lead, columns // few, 2 * few))
        pairs = emit(name, pairs, wanted, True, dtype)
        pairs = emit("aten.view.default", pairs, (*pairs.type.dims[:-2], few, 2))
        wanted = (x.type.rank - 1,)
    made = emit(name, pairs, wanted, True, dtype)
    return [Pairs(emit("aten.view.default", made, (*result.dims, 2)))]


def _divisor(size: Size) -> int:
    """The largest power of 2 up to `_FEW_PAIRS` that divides a size."""
    return math.gcd(size, _FEW_PAIRS) if isinstance(size, int) and size else 1


@expand_by("aten.any.default", "aten.any.dim", "aten.all.default", "aten.all.dim")
def _tests(builder: Builder, node: Node) -> Value:
    bools = builder.aten.ne.Tensor(node.tensor("x"), y=0)
    return builder.emit(node.op, bools, *node.args[1:])


@expand_by(
    "aten.linalg_vector_norm.default",
    "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dim",
    "aten.norm.ScalarOpt_dim_dtype",
)
def _norm(builder: Builder, node: Node) -> Value:
    lengths = builder.aten.abs(node.tensor("x"))
    args = tuple(
        arg.component if isinstance(arg, DType) and arg.is_complex else arg for arg in node.args[1:]
    )
    made = builder.emit(node.op, lengths, *args)
    return (
        made
        if made.type.dtype is node.result.type.dtype
        else builder.aten._to_copy(made, node.result.type.dtype)
    )


@expand_by("aten.std.correction", "aten.std.dim", "aten.std.default")
def _deviation(builder: Builder, node: Node) -> Value:
    variance = builder.emit(node.op.replace("std", "var"), *node.args)
    return builder.aten.sqrt(variance)


@expand_by(
    "aten.var_mean.correction",
    "aten.var_mean.dim",
    "aten.std_mean.correction",
    "aten.std_mean.dim",
)
def _with_mean(builder: Builder, node: Node) -> tuple[Value, Value]:
    spread = builder.emit(node.op.replace("_mean", ""), *node.args)
    x, rank = node.tensor("x"), node.tensor("x").type.rank
    dims = wrap_all(node.optional_ints("dim"), rank)
    return spread, builder.aten.mean.dim(x, dims, node.bool("keepdim"))


@expand_by("aten.var.correction", "aten.var.dim", "aten.var.default")
def _variance(builder: Builder, node: Node) -> Value:
    """The sum of the variances of the parts."""
    parts = [builder.emit(f"aten.{name}.default", node.tensor("x")) for name in ("real", "imag")]
    first, second = (builder.emit(node.op, part, *node.args[1:]) for part in parts)
    return builder.aten.add.Tensor(first, second)


expand_by_own("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList", "aten.trace.default")


def _multiplied(split: Split, x: Value, dim: int, running: bool, dtype: DType) -> Parts:
    """The product along a dim, or the running products."""
    parts = split.parts(x, dtype)
    rank, length, type = x.type.rank, x.type.dims[dim], parts.real.type
    at = coordinates(rank, **{f"d{dim}": "j"})
    multiply = f"MULTIPLY_COMPLEX({type.dtype.acc}, RE({at}), IM({at}), r, r1)"
    inputs = {"RE": parts.real, "IM": parts.imaginary}
    over = tuple(1 if d == dim else size for d, size in enumerate(x.type.dims))
    if not running:
        fold = Fold(
            (Loop("j", "0", f"re_size_{dim}", length, f"re_size_{dim}"),),
            multiply,
            join=f"MULTIPLY_COMPLEX({type.dtype.acc}, v, v1, r, r1)",
            start="r = 1.0; r1 = 0.0;",
        )
        result = type.with_dims(over)
        return Parts(*folded(split.builder, fold, inputs, result, result))
    return Parts(*_running_products(split.builder, parts, dim, over, multiply))


def _running_products(
    builder: Builder, parts: Parts, dim: int, over: Sequence[Size], multiply: str
) -> tuple[Value, Value]:
    """One invocation per row. Each part of a long row continues where the last one ended."""
    type = parts.real.type
    length, most = type.dims[dim], builder.traits.max_iterations - 32
    at = coordinates(type.rank, **{f"d{dim}": "j"})
    step = f"{multiply} R_PUT({at}, r); R1_PUT({at}, r1);"
    made: list[tuple[Value, ...]] = []
    for first in range(0, max(_dims.upper(length), 1), most):
        last = _dims.minimum(length, first + most)
        some = [
            builder.aten.slice.Tensor(part, dim, first, last)
            for part in (parts.real, parts.imaginary)
        ]
        inputs, start = dict(zip(("RE", "IM"), some)), "T_R r = 1.0, r1 = 0.0;"
        if made:
            inputs |= dict(zip(("BEFORE", "BEFORE1"), made[-1]))
            end = coordinates(type.rank, **{f"d{dim}": f"before_size_{dim} - 1"})
            start = f"T_R r = BEFORE({end}), r1 = BEFORE1({end});"
        count = f"re_size_{dim}"
        body = f"{start} LOOPS(loop({count})) for (int j = 0; j < {count}; j++) {{ {step} }}"
        part = some[0].type
        made.append(mapped_over_all(builder, body, inputs, over, part, part))
    real, imaginary = (
        each[0] if len(each) == 1 else builder.aten.cat(tuple(each), dim) for each in zip(*made)
    )
    return real, imaginary


@apply_by("aten.prod.default", "aten.prod.dim_int", "aten.cumprod.default")
def _product(split: Split, node: Node) -> Made:
    x, result = node.tensor("x"), node.result.type
    if not x.type.rank:
        return split.parts(x, result.dtype.component)
    if node.op == "aten.prod.default":
        flat = split.builder.aten.view(split.pairs(x), (x.type.numel, 2))
        whole = Value("flat", x.type.with_dims((x.type.numel,)))
        split.define(whole, Pairs(flat))
        x, dim = whole, 0
    else:
        dim = wrap(node.int("dim"), x.type.rank)
    running = node.op == "aten.cumprod.default"
    made = _multiplied(split, x, dim, running, result.dtype.component)
    return Parts(
        *(split.builder.aten.view(part, result.dims) for part in (made.real, made.imaginary))
    )

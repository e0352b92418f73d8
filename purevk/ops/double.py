"""Double precision where a kernel is written for float alone: the same, expressed by what runs in
double precision.

Speed is no concern here; that the numbers are those of float64, and that nothing goes to the CPU,
is. What `purevk.map` makes has double precision by itself (`lower.expression.in_double`).
"""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, Value
from purevk.ir import dims as _dims
from purevk.lower.map import coordinates
from purevk.ops.builder import Builder
from purevk.ops.conv.convolution import NAME as CONVOLUTION
from purevk.ops.long_rows import group_norm, norm, softmax, typed
from purevk.ops.map import mapped, mapped_over
from purevk.ops.reduce.group_norm import NAME as GROUP_NORM
from purevk.ops.reduce.normalization import NAME as NORM
from purevk.ops.reduce.reduction import NAME as REDUCE
from purevk.ops.reduce.reduction import Reduction
from purevk.ops.reduce.scan import NAME as SCAN
from purevk.ops.reduce.softmax import NAME as SOFTMAX
from purevk.ops.registry import in_double
from purevk.ops.row_parts import squared_deviations
from purevk.ops.sort.ranked import select_by_sorting
from purevk.ops.sort.selection import NAME as SELECT
from purevk.ops.sort.sort import NAME as SORT

WIDE = DType.float64


def _wide(builder: Builder, value: Value) -> Value:
    return value if value.type.dtype is WIDE else builder.aten._to_copy(value, WIDE)


# -- order ---------------------------------------------------------------------------------------
def _keys(builder: Builder, x: Value) -> Value:
    """Whole numbers that are ordered as the elements are: NaN above all, and -0 as 0."""
    at = coordinates(x.type.rank)
    body = (
        f"double v = X({at}); int64_t bits = v == 0.0 ? int64_t(0) : packInt2x32(ivec2(unpackDouble2x32(v)));"
        " r = pv_isnan(v) ? PV_INT64_MAX : bits < int64_t(0) ? bits ^ PV_INT64_MAX : bits;"
    )
    return mapped(builder, body, {"X": x}, x.type.with_dtype(DType.int64))


def _sort(builder: Builder, node: Node) -> tuple[Value, Value]:
    x, dim = node.tensor("x"), node.int("dim")
    descending, count, index = node.bool("descending"), node.size("count"), node.dtype("index")
    _, indices = builder.emit_all(SORT, _keys(builder, x), dim, descending, count, index)
    return builder.aten.gather(x, dim, indices), indices


def _select(builder: Builder, node: Node) -> tuple[Value, Value]:
    x, dim = node.tensor("x"), node.int("dim")
    rank, number, index = node.str("rank"), node.size("number"), node.dtype("index")
    if rank == "kth":
        _, indices = builder.emit_all(SELECT, _keys(builder, x), dim, rank, number, index)
        return builder.aten.gather(x, dim, indices), indices
    return select_by_sorting(builder, node, _keys(builder, x))


in_double(SORT, _sort)
in_double(SELECT, _select)


# -- reductions ----------------------------------------------------------------------------------
def _reduce(builder: Builder, node: Node) -> Value:
    x, how = _wide(builder, node.tensor("x")), node.attribute("kind", Reduction)
    dims = node.ints("dims")
    if how.logarithm:
        top = builder.emit(REDUCE, x, "amax", dims, True, WIDE)
        top = builder.aten.where.self(builder.aten.isinf(top), x=0.0, y=top)
        powers = builder.aten.exp(builder.aten.sub.Tensor(x, top))
        total = builder.aten.log(builder.emit(REDUCE, powers, "sum", dims, True, WIDE))
        return typed(builder, builder.aten.add.Tensor(total, top), node)
    return squared_deviations(builder, node, x)


def _needs_parts(node: Node) -> bool:
    how = node.arg("kind")
    return isinstance(how, Reduction) and (how.logarithm or how.variance)


def _scan(builder: Builder, node: Node) -> Value:
    """Running logarithms of sums of exponentials, with one invocation per row. Each part of a long
    row continues where the last one ended."""
    x = _wide(builder, node.tensor("x"))
    dim = node.int("dim") % x.type.rank
    length, most = x.type.dims[dim], builder.traits.max_iterations - 1
    over = tuple(1 if d == dim else size for d, size in enumerate(x.type.dims))
    at = coordinates(x.type.rank, **{f"d{dim}": "j"})
    walk = (
        f" LOOPS(loop(x_size_{dim})) for (int j = 0; j < x_size_{dim}; j++) {{"
        f" ADD_EXPONENTIAL(X({at})) R_PUT({at}, top + pv_log(sum)); }}"
    )
    parts: list[Value] = []
    for first in range(0, max(_dims.upper(length), 1), most):
        last = (
            length if first + most >= _dims.upper(length) else _dims.minimum(length, first + most)
        )
        part = builder.aten.slice.Tensor(x, dim, first, last)
        start, inputs = "double top = -PV_INF, sum = 0.0;", {"X": part}
        if parts:
            start = f"double top = BEFORE({coordinates(x.type.rank, **{f'd{dim}': f'before_size_{dim} - 1'})}), sum = 1.0;"  # noqa: E501
            inputs["BEFORE"] = parts[-1]
        parts.append(mapped_over(builder, start + walk, inputs, over, part.type))
    return typed(
        builder,
        parts[0] if len(parts) == 1 else builder.aten.cat(tuple(parts), dim),
        node,
    )


in_double(REDUCE, _reduce, _needs_parts)
in_double(SOFTMAX, softmax)
in_double(SCAN, _scan, lambda node: node.str("kind") == "logsumexp")


# -- norms ---------------------------------------------------------------------------------------
in_double(NORM, norm)
in_double(GROUP_NORM, group_norm)


# -- convolutions -------------------------------------------------------------------------------------
def _convolution(builder: Builder, node: Node) -> Value:
    """One invocation per element of the result."""
    x, weight, bias = node.tensor("x"), node.tensor("weight"), node.optional_tensor("bias")
    stride, padding = node.ints("stride"), node.ints("padding")
    dilation, spread = node.ints("dilation"), node.ints("spread")
    numbers: dict[str, Size] = {
        "groups": node.int("groups"),
        "stride_y": stride[0],
        "stride_x": stride[1],
        "pad_y": padding[0],
        "pad_x": padding[1],
        "dilation_y": dilation[0],
        "dilation_x": dilation[1],
        "spread_y": spread[0],
        "spread_x": spread[1],
    }
    # A bias has a number for each channel after spreading, or before.
    return mapped(
        builder,
        "",
        {"X": x, "W": weight} | ({} if bias is None else {"B": bias}),
        node.result.type,
        numbers=numbers,
        template="conv/conv2d_elements.comp",
        macros={"START": "0.0" if bias is None else "B(o)"},
    )


in_double(CONVOLUTION, _convolution)

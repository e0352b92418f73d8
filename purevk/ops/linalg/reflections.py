"""Householder's reflections of matrices of any size: how to find them, and how to apply them."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense_operand
from purevk.lower.lowering import Lowering
from purevk.ops.builder import Builder
from purevk.ops.linalg.small import LARGEST, matrix_kernel, matrix_transpose, triangle
from purevk.ops.linalg.triangular import solve_triangle
from purevk.ops.registry import Kernel, ShapeError, define
from purevk.tuning import DeviceTraits

REFLECTIONS = "purevk.reflections"
MOST = 4096  # reflections: a panel of them is a few nodes, and each is one of the repeated dispatch
_PART = 4096  # rows of a workgroup, if there are less than _MOST_PARTS
_MOST_PARTS = 256


def _is_small(traits: DeviceTraits, rows: Size, columns: Size) -> bool:
    """Whether an invocation takes a whole matrix."""
    return max(_dims.upper(rows), _dims.upper(columns)) <= LARGEST and not traits.too_long(
        _dims.minimum(rows, columns), columns + 3, 2 * rows + 4
    )


# -- the kernel ----------------------------------------------------------------------------------
def _shape(x: TensorType, top: TensorType) -> tuple[TensorType, TensorType]:
    if x.rank != 3 or top.dims != x.dims[:2]:
        raise ShapeError(f"{top} are not the largest elements of columns {x}")
    return x, x.with_dims((x.dims[0], _dims.minimum(x.dims[1], x.dims[2])))


def _lower(lowering: Lowering, node: Node) -> None:
    x, top = (dense_operand(lowering, node.tensor(name)) for name in ("x", "top"))
    out, factors = (lowering.operand(value) for value in node.results)
    (matrices, columns, rows), count = x.dims, factors.dims[1]
    # Software devices run the invocations of a workgroup one after another, to each barrier.
    local = 16
    if lowering.traits.profile.has_fast_shared_memory and _dims.upper(rows) > LARGEST:
        local = 64 if _dims.upper(rows) < _PART else 256
    parts = _dims.minimum(_dims.maximum(_dims.ceil_div(rows, _PART), 1), _MOST_PARTS)
    macros: dict[str, str | int] = {"T": x.dtype.glsl, "LOCAL": local}
    if x.dtype is DType.float64:
        macros["HAS_FLOAT64"] = 1
    lowering.dispatch(
        "linalg/reflections.comp",
        {
            "x": x,
            "top": top,
            "work": lowering.temporary(x.type),
            "sums": lowering.temporary(x.type.with_dims((2, matrices, columns, parts, 2))),
            "heads": lowering.temporary(x.type.with_dims((matrices, count, 2))),
            "out": out,
            "factors": factors,
        },
        {
            "rows": rows,
            "columns": columns,
            "count": count,
            "matrices": matrices,
            "parts": parts,
            "part": _dims.ceil_div(rows, parts),
            "iteration": 0,
        },
        macros,
        grid=lowering.linear_grid(matrices * columns * parts, 1),
        flops=2 * matrices * columns * count * rows,
        specialize=(),
        repeat=count + 2,
    )


def _supports(node: Node, traits: DeviceTraits) -> str | None:
    dtype = node.tensor("x").type.dtype
    return None if dtype in (DType.float32, DType.float64) else f"no kernel for {dtype.name}"


# x is [matrices, columns, rows]: columns of matrices, as rows; `top` is the largest element of each.
define(REFLECTIONS, _shape, Kernel(_lower, supports=_supports, bfloat16=False))


# -- what operators use --------------------------------------------------------------------------
def _part(builder: Builder, x: Value, dim: int, start: Size, end: Size) -> Value:
    return builder.aten.slice.Tensor(x, x.type.rank + dim, start=start, end=end)


def reflections(builder: Builder, a: Value) -> tuple[Value, Value]:
    """R with the vectors of the reflections below its diagonal, and their factors."""
    *batch, rows, columns = a.type.dims
    count = _dims.minimum(rows, columns)
    types = a.type, a.type.with_dims((*batch, count))
    if _is_small(builder.traits, rows, columns):
        numbers = {"rows": rows, "columns": columns}
        packed, factors = matrix_kernel(builder, "reflectors", {"A": a}, numbers, *types)
        return packed, factors
    flat = builder.aten.view(matrix_transpose(builder, a), (_dims.product(batch), columns, rows))
    top = builder.aten.amax(builder.aten.abs(flat), (-1,))
    packed, factors = builder.emit_all(REFLECTIONS, flat, top)
    packed = matrix_transpose(builder, builder.aten.view(packed, (*batch, columns, rows)))
    return packed, builder.aten.view(factors, types[1].dims)


def upper_factor(builder: Builder, packed: Value, rows: Size) -> Value:
    """The first rows of the R of `reflections`."""
    return triangle(builder, _part(builder, packed, -2, 0, rows), True)


def reflect(builder: Builder, packed: Value, factors: Value, x: Value, transpose: bool) -> Value:
    """The product of the reflections with x, or that of their transpose."""
    rows, count = x.type.dims[-2], factors.type.dims[-1]
    if _is_small(builder.traits, rows, count):
        numbers = {"rows": rows, "count": count}
        inputs = {"V": packed, "TAU": factors, "X": x}
        return matrix_kernel(builder, "reflect", inputs, numbers, x.type, FORWARD=int(transpose))[0]
    most = _dims.upper(count)
    packed = _part(builder, packed, -1, 0, count)
    if not isinstance(count, int):
        packed = builder.aten.constant_pad_nd(packed, (0, most - count), 0.0)
        factors = builder.aten.constant_pad_nd(factors, (0, most - count), 0.0)
    # One whose factor is 0 changes nothing.
    counts = builder.aten.ne.Scalar(factors, 0.0)
    vectors = triangle(builder, packed, False, unit=True)
    vectors = builder.aten.where.self(builder.aten.unsqueeze(counts, dim=-2), vectors, 0.0)
    over = builder.aten.where.self(counts, builder.aten.reciprocal(factors), 1.0)
    starts = range(0, most, LARGEST)
    for start in starts if transpose else reversed(starts):
        end = min(start + LARGEST, most)
        panel, diagonal = (_part(builder, each, -1, start, end) for each in (vectors, over))
        x = _reflect_together(builder, panel, diagonal, x, transpose)
    return x


def _reflect_together(
    builder: Builder, vectors: Value, over: Value, x: Value, transpose: bool
) -> Value:
    """The product of some reflections with x, as matmuls: it is I - V T V^T with V the vectors. The
    inverse of T is the upper triangle of V^T V, with the inverse factors on its diagonal."""
    across = matrix_transpose(builder, vectors)
    inverse = builder.aten.triu(builder.aten.matmul(across, vectors), 1)
    inverse = builder.aten.add.Tensor(inverse, builder.aten.diag_embed(over))
    if transpose:
        inverse = matrix_transpose(builder, inverse)
    y = solve_triangle(builder, inverse, builder.aten.matmul(across, x), not transpose)
    return builder.aten.sub.Tensor(x, builder.aten.matmul(vectors, y))

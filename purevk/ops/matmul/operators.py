"""The operators of torch that become `purevk.matmul`: products of matrices, and linear layers."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Scalar, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.elements import acc_of
from purevk.lower.expression import ROUND, Expression
from purevk.lower.gpu_tiles import prefers_columns
from purevk.ops.builder import Builder
from purevk.ops.facts import of_addmm, of_linear, of_matmul
from purevk.ops.map import mapped
from purevk.ops.matmul.choice import both_half
from purevk.ops.matmul.matmul import KERNEL_TYPES, NAME, check_kinds, is_of_columns, matmul_type
from purevk.ops.promotion import promote_types
from purevk.ops.registry import ShapeError, define, rewrite_node
from purevk.ops.shapes import broadcast, equal_shapes
from purevk.ops.signatures import signature

_UNROUNDED_MATMUL = "purevk.unrounded_matmul"
# The result of a kernel before it is rounded, where what follows may become its epilogue.
_UNROUNDED = Expression((DType.float32,), (), (), (0,))


def _multiply(builder: Builder, a: Value, b: Value, unrounded: bool = False) -> Value:
    """A matmul. Integers and double precision have a kernel of their own. `unrounded`: the result is
    float32 in place of a dtype of 16 bits."""
    dtype = promote_types(a.type.dtype, b.type.dtype)
    if dtype in KERNEL_TYPES:
        epilogue = _UNROUNDED if unrounded and dtype in ROUND else None
        return builder.emit(NAME, a, b, None, epilogue, ())
    return multiply_elements(builder, a, b, dtype)


def _bmm_shape(a: TensorType, b: TensorType) -> TensorType:
    if a.rank != 3 or b.rank != 3 or not equal_shapes(a.dims[:1], b.dims[:1]):
        raise ShapeError(f"bmm of {a} and {b}", why="as many matrices of both are expected")
    return matmul_type(a, b)


@rewrite_node("aten.bmm.default", _bmm_shape)
@rewrite_node("aten.mm.default", matmul_type, rowwise=of_matmul)
def _expand_mm(builder: Builder, node: Node) -> Value:
    return _multiply(builder, node.tensor("a"), node.tensor("b"))


def _int_mm_shape(x: TensorType, y: TensorType) -> TensorType:
    bytes_only = x.dtype in (DType.int8, DType.uint8) and y.dtype is DType.int8
    if x.rank != 2 or y.rank != 2 or not bytes_only:
        raise ShapeError(
            f"_int_mm of {x} and {y}",
            why="a matrix of int8 or uint8, and one of int8, are expected",
        )
    return matmul_type(x, y).with_dtype(DType.int32)


@rewrite_node("aten._int_mm.default", _int_mm_shape)
def _expand_int_mm(builder: Builder, node: Node) -> Value:
    x, y = (builder.aten._to_copy(node.tensor(name), DType.int32) for name in "xy")
    return builder.aten.mm(x, y)


@signature(
    "x, y, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False"
)
def _scaled_mm_shape(x: TensorType, y: TensorType, out_dtype: DType | None) -> TensorType:
    if not x.dtype.is_float8 or not y.dtype.is_float8 or x.rank != 2 or y.rank != 2:
        raise ShapeError(f"_scaled_mm of {x} and {y}: matrices of 8-bit floats are expected")
    return matmul_type(x, y.with_dtype(x.dtype)).with_dtype(out_dtype or x.dtype)


# `passes/float8.py` replaces it: no kernel takes 8-bit floats.
define("aten._scaled_mm.default", _scaled_mm_shape, None)


def matmul_shape(a: TensorType, b: TensorType) -> TensorType:
    left = a if a.rank > 1 else a.with_dims((1, *a.dims))
    right = b if b.rank > 1 else b.with_dims((*b.dims, 1))
    result = matmul_type(left, right)
    sizes = list(result.dims)
    if a.rank == 1:
        del sizes[-2]
    if b.rank == 1:
        del sizes[-1]
    return result.with_dims(sizes)


def _unrounded_shape(a: TensorType, b: TensorType) -> TensorType:
    result = matmul_shape(a, b)
    return result.with_dtype(DType.float32) if result.dtype in ROUND else result


# For operators that compute further before they round.
@rewrite_node(_UNROUNDED_MATMUL, _unrounded_shape)
@rewrite_node("aten.matmul.default", matmul_shape, rowwise=of_matmul)
def _expand_matmul(builder: Builder, node: Node) -> Value:
    a, b = node.tensor("a"), node.tensor("b")
    left = a if a.type.rank > 1 else builder.aten.view(a, (1, *a.type.dims))
    right = b if b.type.rank > 1 else builder.aten.view(b, (*b.type.dims, 1))
    result = _multiply(builder, left, right, node.op == _UNROUNDED_MATMUL)
    return builder.aten.view(result, node.result.type.dims)


def _linear_shape(x: TensorType, weight: TensorType, bias: TensorType | None = None) -> TensorType:
    if (
        x.rank < 1
        or weight.rank not in (1, 2)
        or not _dims.assume(x.dims[-1], "==", weight.dims[-1])
    ):
        raise ShapeError(f"cannot apply a linear layer with weight {weight} to {x}")
    check_kinds(x, weight, bias)
    result = x.with_dims((*x.dims[:-1], *weight.dims[:-1]))
    if bias is not None and _dims.product(broadcast(result.dims, bias.dims)) != result.numel:
        raise ShapeError(f"cannot add {bias} to a linear layer with weight {weight} of {x}")
    return result


@rewrite_node("aten.linear.default", _linear_shape, rowwise=of_linear)
def _expand_linear(builder: Builder, node: Node) -> Value:
    x, weight, bias = node.tensor("x"), node.tensor("weight"), node.optional_tensor("bias")
    if weight.type.rank == 1:  # one column, without a dim of its own
        weight = builder.aten.view(weight, (1, *weight.type.dims))
        result = builder.aten.linear(x, weight)
        result = builder.aten.view(result, node.result.type.dims)
        return result if bias is None else builder.aten.add.Tensor(result, bias)
    k, n = weight.type.dims[1], weight.type.dims[0]
    if bias is not None and not is_of_columns(bias.type, n):  # torch broadcasts any bias
        weight = builder.aten.permute(weight, (1, 0))
        result = builder.emit(_UNROUNDED_MATMUL, x, weight)
        bias = builder.aten._to_copy(bias, result.type.dtype)
        result = builder.aten.add.Tensor(result, bias)
        result = builder.aten._to_copy(result, node.result.type.dtype)
        return builder.aten.view(result, node.result.type.dims)
    rows = _dims.product(x.type.dims[:-1])
    flat = builder.aten.view(x, (rows, k))
    limit = builder.traits.max_storage_range
    if weight.type.nbytes > limit and weight.type.is_static:
        row_bytes = _dims.specialize(k) * weight.type.dtype.itemsize
        result = _linear_in_parts(builder, flat, weight, bias, limit // row_bytes)
        return builder.aten.view(result, (*x.type.dims[:-1], n))
    packed = builder.aten.permute(weight, (1, 0))
    if x.type.dtype not in KERNEL_TYPES:
        result = _multiply(builder, flat, packed)
        result = result if bias is None else builder.aten.add.Tensor(result, bias)
        return builder.aten.view(result, (*x.type.dims[:-1], n))
    half = both_half(x.type.dtype, weight.type.dtype) and (
        x.type.dtype is DType.float16 or builder.traits.bfloat16_fragments
    )
    columns = prefers_columns(builder.traits, _dims.upper(rows), _dims.upper(k), half)
    if weight in builder.graph.constants and not columns:
        packed = builder.purevk.copy(packed)
    result = builder.emit(NAME, flat, packed, bias, None, ())
    return builder.aten.view(result, (*x.type.dims[:-1], n))


def _linear_in_parts(
    builder: Builder, flat: Value, weight: Value, bias: Value | None, count: int
) -> Value:
    """A linear layer whose weight is larger than one binding can span: one matmul for every `count`
    rows of the weight."""
    n, count = _dims.specialize(weight.type.dims[0]), count // 64 * 64 or max(count, 1)
    parts: list[Value] = []
    for start in range(0, n, count):
        end = min(start + count, n)
        rows = builder.aten.permute(
            builder.aten.slice.Tensor(weight, dim=0, start=start, end=end),
            (1, 0),
        )
        own = None if bias is None else builder.aten.slice.Tensor(bias, dim=0, start=start, end=end)
        parts.append(builder.emit(NAME, flat, rows, own, None, ()))
    return builder.aten.cat(tuple(parts), dim=1)


def _addmm_shape(
    bias: TensorType, a: TensorType, b: TensorType, beta: Scalar = 1, alpha: Scalar = 1
) -> TensorType:
    check_kinds(a, bias)
    return matmul_type(a, b)


@rewrite_node("aten.addmm.default", _addmm_shape, rowwise=of_addmm)
def _expand_addmm(builder: Builder, node: Node) -> Value:
    bias, a, b = node.tensor("bias"), node.tensor("a"), node.tensor("b")
    beta, alpha = node.tensor_or_scalar("beta"), node.tensor_or_scalar("alpha")
    unscaled = isinstance(alpha, (int, float)) and alpha == 1
    static = isinstance(beta, (int, float))
    plain = unscaled and static and beta == 1 and a.type.dtype in KERNEL_TYPES
    if plain and is_of_columns(bias.type, b.type.dims[1]):
        return builder.emit(NAME, a, b, bias, None, ())
    result = builder.emit(_UNROUNDED_MATMUL, a, b)
    if not unscaled:
        if isinstance(alpha, int) and a.type.dtype.is_float:
            alpha = float(alpha)
        result = builder.aten.mul.Tensor(result, alpha)
    if not (static and beta == 0):  # the bias may be infinite
        result = builder.aten.add.Tensor(result, bias, beta)
    return builder.aten._to_copy(result, node.result.type.dtype)


def multiply_elements(builder: Builder, a: Value, b: Value, dtype: DType) -> Value:
    """A matmul in a type that the matmul kernels lack: one invocation per element, long rows in
    parts."""
    type = matmul_type(a.type, b.type)
    depth, most = a.type.dims[-1], builder.traits.max_iterations
    if _dims.upper(depth) >= most:

        def part(start: Size, end: Size) -> Value:
            left = builder.aten.slice.Tensor(a, a.type.rank - 1, start, end)
            right = builder.aten.slice.Tensor(b, b.type.rank - 2, start, end)
            return multiply_elements(builder, left, right, dtype)

        return builder.aten.add.Tensor(part(0, depth // 2), part(depth // 2, depth))
    rank = type.rank

    def at(value: Value, row_text: str, column: str) -> str:
        lead = rank - value.type.rank
        batch = [
            "0" if size == 1 else f"i{lead + d}" for d, size in enumerate(value.type.dims[:-2])
        ]
        return ", ".join([*batch, row_text, column])

    acc = acc_of(dtype)
    term = f"{acc}(A({at(a, f'i{rank - 2}', 'k')})) * {acc}(B({at(b, 'k', f'i{rank - 1}')}))"
    count = f"a_size_{a.type.rank - 1}"
    body = f"LOOPS(loop({count})) SUM_OVER({acc}, k, 0, {count}, {term}) r = sum;"
    return mapped(builder, body, {"A": a, "B": b}, TensorType(dtype, type.dims))

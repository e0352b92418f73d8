"""Matmuls whose rows are multiplied by different matrices, as in a mixture of experts.

`purevk.grouped_matmul` reads the groups of rows from a tensor, so no size depends on them: the grid
is that of the most tiles that there can be, and each workgroup finds its rows. Only the matrices of
groups with rows are read.
"""

from __future__ import annotations

from collections.abc import Iterator

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, dense_operand
from purevk.lower.epilogue import matrix_epilogue
from purevk.lower.expression import Expression
from purevk.lower.gpu_kernels import Problem
from purevk.lower.gpu_tiles import choose_rows
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4, gcd8
from purevk.ops.builder import Builder
from purevk.ops.fold import Fold, Loop, folded
from purevk.ops.matmul.choice import (
    Batches,
    Choice,
    both_half,
    choose_registers,
    matrix_macros,
    reads_wide,
    vector_macros,
)
from purevk.ops.matmul.matmul import matmul_type
from purevk.ops.promotion import promote_types
from purevk.ops.registry import Kernel, ShapeError, define, rewrite
from purevk.tuning import DeviceTraits

NAME = "purevk.grouped_matmul"
_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
_GRID = 65535  # workgroups along a dim of a grid that every device takes


# -- rows in groups -----------------------------------------------------------------------------
def _result(a: TensorType, b: TensorType) -> TensorType:
    """The type of the rows of `a`, each multiplied by one of the matrices `b`."""
    if a.rank != 2 or b.rank != 3 or not _dims.assume(a.dims[1], "==", b.dims[1]):
        raise ShapeError(f"cannot multiply the rows of {a} by the matrices of {b}")
    return a.with_dims((a.dims[0], b.dims[2]))


def _shape(
    a: TensorType,
    b: TensorType,
    groups: TensorType,
    sorted: bool = True,
    epilogue: Expression | None = None,
    extras: tuple[TensorType, ...] = (),
) -> TensorType:
    result = _result(a, b)
    if groups.rank != 1 or groups.dims[0] != (b.dims[0] if sorted else a.dims[0]):
        raise ShapeError(f"cannot take {groups} for the groups of {a} with {b}")
    return result if epilogue is None else result.with_dtype(epilogue.dtypes[epilogue.outputs[0]])


def _supports(node: Node, traits: DeviceTraits) -> str | None:
    a, b, groups = (node.tensor(name).type for name in ("a", "b", "groups"))
    if a.dtype not in (DType.float32, DType.float16) or b.dtype not in _FLOATS:
        return f"no kernel for {a.dtype.name} with {b.dtype.name}"
    return None if groups.dtype is DType.int32 else f"no kernel for groups of {groups.dtype.name}"


def choose_grouped(
    traits: DeviceTraits,
    sizes: tuple[Size, Size, Size],
    groups: Size,
    half: bool,
    transposed: bool,
    vectors: tuple[bool, bool],
    sorted: bool,
    wide: bool = False,
    bfloat16: bool = False,
) -> Choice:
    """The kernel for `sizes` m, n, k. It is chosen for groups of equal sizes; `wide` and `bfloat16` as
    for a `Problem`."""
    m, n, k = (_dims.upper(size) for size in sizes)
    used = max(min(_dims.upper(groups), m), 1)
    rows = max(-(-m // used), 1) if sorted else 1
    if not traits.profile.has_fast_shared_memory:
        return choose_registers(traits, rows, n, k, used, gcd4(k), gcd4(k if transposed else n))
    problem = Problem(rows, n, k, used, half, transposed, vectors, wide=wide, bfloat16=bfloat16)
    return choose_rows(traits, problem, not sorted)


def _lower(lowering: Lowering, node: Node) -> None:
    a, b, out = (lowering.operand(v) for v in (node.tensor("a"), node.tensor("b"), node.result))
    groups, sorted = dense_operand(lowering, node.tensor("groups")), node.bool("sorted")
    (m, n), k, count = out.dims, a.dims[1], b.dims[0]
    # A's rows are dense, or it is copied; matrices may be dense along either dim.
    if a.strides[1] != 1 or not isinstance(a.offset, int):
        a = dense(lowering, a)
    if 1 not in b.strides[1:] or not isinstance(b.offset, int):
        b = dense(lowering, b)
    transposed = b.strides[2] != 1
    ldb = b.strides[1 + transposed]
    vectors = (
        gcd4(k, a.strides[0], a.offset),
        gcd4(k if transposed else n, ldb, b.strides[0], b.offset),
        gcd4(n, out.strides[0], out.offset),
    )
    half = both_half(a.dtype, b.dtype)
    wide = half and gcd8(k, n, a.strides[0], a.offset, ldb, b.strides[0], b.offset)
    choice = choose_grouped(
        lowering.traits,
        (m, n, k),
        count,
        half,
        transposed,
        vectors[:2],
        sorted,
        wide,
        half and a.dtype is DType.bfloat16,
    )
    rows = choice.rows_per_group
    tiles: Size = m
    form = 3
    if sorted:
        # Few rows get a workgroup each, of which only the first of a tile works.
        form = 2 if _dims.upper(m) <= _dims.upper(m) // rows + _dims.upper(count) + 1 else 1
        tiles = m if form == 2 else m // rows + count + 1
    epilogue = matrix_epilogue(lowering, node, out, vectors[2])
    macros = vector_macros(b, *vectors, reads_wide(choice)) | matrix_macros(choice, a, out, k)
    macros |= {"B_TRANSPOSED": int(transposed), "ROW_GROUPS": form}
    params: dict[str, Size] = {"M": m, "N": n, "K": k, "lda": a.strides[0], "ldb": ldb}
    params |= {"ldo": out.strides[0], "groups": count, **Batches(batch_b=b.strides[0]).params}
    columns = choice.grid(m, n, 1)[0]
    for first, part in _parts(lowering, b):
        whole = part is b
        lowering.dispatch(
            choice.template,
            {"a": a, "b": part, "bias": None, "groups": groups, "out": out},
            {**params, "first_matrix": first, "matrices": part.dims[0]},
            macros,
            form=choice,
            epilogue=epilogue,
            grid=(columns, tiles, 1),
            flops=2 * m * n * k if whole or first == 0 else 0,
            nbytes=_traffic(node) if whole or first == 0 else 0,
        )


def _parts(lowering: Lowering, b: Operand) -> Iterator[tuple[Size, Operand]]:
    """The matrices in parts that one binding spans, each with the number of its first matrix."""
    limit = lowering.traits.max_storage_range
    if b.storage.type.nbytes <= limit or not b.type.is_static:
        yield 0, b
        return
    count, rows, columns = map(_dims.specialize, b.dims)
    # A window starts at a multiple of 256 bytes, so that some bytes more are bound.
    most = max((limit - 512) // (rows * columns * b.dtype.itemsize), 1)
    for first in range(0, count, most):
        number = min(most, count - first)
        layout = Layout(b.offset + first * b.strides[0], b.strides)
        part = Operand(b.storage, layout, b.type.with_dims((number, *b.dims[1:])))
        yield first, lowering.window(part)


def _traffic(node: Node) -> Size:
    """Bytes that are read and written. There are no more matrices in use than rows."""
    a, b = node.tensor("a").type, node.tensor("b").type
    used = _dims.minimum(a.dims[0], b.dims[0])
    matrices = used * b.dims[1] * b.dims[2] * b.dtype.itemsize
    others = (node.tensor("a"), node.tensor("groups"), node.result, *node.tensors("extras"))
    return sum((value.type.numel * value.type.dtype.itemsize for value in others), matrices)


# Row m of the result is row m of a, multiplied by one of the matrices b. groups says which: with
# `sorted`, groups[g] is the first row behind those of matrix g, and the rows behind all groups give
# 0; else groups[m] is the matrix of row m.
define(NAME, _shape, Kernel(_lower, supports=_supports, epilogue=True))


def emit_grouped(builder: Builder, a: Value, b: Value, groups: Value, sorted: bool = True) -> Value:
    """`purevk.grouped_matmul`, in the dtype of `a`. The matrices are read as they are; `a` is small
    and is converted if its dtype is another."""
    dtype = a.type.dtype
    if b.type.dtype is not dtype:
        a = builder.aten._to_copy(a, DType.float32)
    groups = builder.aten._to_copy(groups, DType.int32)
    made = builder.emit(NAME, a, b, groups, sorted, None, ())
    return builder.aten._to_copy(made, dtype)


def takes_rows(rows: Size) -> bool:
    """Whether the kernel takes as many rows of groups that are not sorted."""
    return _dims.upper(rows) <= _GRID


# -- operators of torch -------------------------------------------------------------------------
def _grouped_mm_shape(
    a: TensorType,
    b: TensorType,
    offs: TensorType | None = None,
    bias: TensorType | None = None,
    out_dtype: DType | None = None,
) -> TensorType:
    dtype = out_dtype or promote_types(a.dtype, b.dtype)
    if offs is None:
        return matmul_type(a, b).with_dtype(dtype)
    if (a.rank, b.rank) == (2, 3):
        return _result(a, b).with_dtype(dtype)
    if (a.rank, b.rank) not in ((3, 2), (2, 2)) or a.dims[-1] != b.dims[0]:
        raise ShapeError(f"cannot multiply {a} by {b} in groups")
    lead = (offs.dims[0],) if a.rank == 2 else ()
    return TensorType(dtype, (*lead, a.dims[-2], b.dims[1]))


def _refuse_grouped_mm(node: Node, traits: DeviceTraits) -> str | None:
    if node.optional_tensor("bias") is not None:
        return "no kernel with a bias"
    a, b = node.tensor("a").type, node.tensor("b").type
    if a.dtype not in _FLOATS or b.dtype is not a.dtype:
        return f"no kernel for {a.dtype.name} with {b.dtype.name}"
    return None


def _depth_in_groups(builder: Builder, a: Value, b: Value, offs: Value) -> Value:
    """A matmul for each part of the columns of a and the rows of b."""
    type = TensorType(a.type.dtype, (offs.type.dims[0], a.type.dims[0], b.type.dims[1]))
    depth = a.type.dims[1]
    fold = Fold(
        (Loop("k", "max(first, 0)", "last", depth, "depth"),),
        "r += float(A(i1, k)) * float(B(k, i2));",
        before="int first = i0 > 0 ? int(O(i0 - 1)) : 0, last = min(int(O(i0)), depth);",
    )
    inputs = {"A": a, "B": b, "O": offs}
    return folded(builder, fold, inputs, type, numbers={"depth": depth})[0]


@rewrite(
    "aten._grouped_mm.default",
    _grouped_mm_shape,
    "transformers.grouped_mm_fallback.default",  # the same, of dtypes that torch does not export
    supports=_refuse_grouped_mm,
)
def _grouped_mm(
    builder: Builder, node: Node, a: Value, b: Value, offs: Value | None, *_: object
) -> Value:
    if offs is None:
        return builder.aten.bmm(a, b)
    if b.type.rank == 3:
        return emit_grouped(builder, a, b, offs)
    if a.type.rank == 3:  # columns in groups: the rows of the transposed matrices
        turned = builder.aten.permute(a, (0, 2, 1))
        rows = builder.aten.permute(b, (1, 0))
        made = emit_grouped(builder, rows, turned, offs)
        return builder.aten.permute(made, (1, 0))
    return _depth_in_groups(builder, a, b, offs)

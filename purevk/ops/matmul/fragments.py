"""Matrices of 16 bits in the order of the fragments of matrix cores, the operators that make them, and
the matmul that reads them without shared memory (`glsl/matmul/fragment_blocks.glslh` has the order).

Such a matrix of [rows, terms] is a tensor [ceil(rows / 16), terms / 16, 256]. What fills the last block
of rows may be anything.
"""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, packed
from purevk.lower.expression import Expression
from purevk.lower.gpu_kernels import Problem
from purevk.lower.gpu_tiles import choose_fragment_tile
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.matrix_core_kernels import Fragments
from purevk.lower.numbers import gcd4
from purevk.ops.matmul.few_rows import lower_few_rows_of_blocks
from purevk.ops.matmul.fused import ToCache, fusion_of, stored_type
from purevk.ops.registry import Kernel, ShapeError, define
from purevk.tuning import DeviceTraits

NAME = "purevk.matmul_fragments"
ROWS = "purevk.row_blocks"
COLUMNS = "purevk.column_blocks"
BLOCK = 16


def blocks_type(dtype: DType, rows: Size, terms: Size) -> TensorType:
    """The type of a matrix in the order of fragments."""
    return TensorType(dtype, (_dims.ceil_div(rows, BLOCK), terms // BLOCK, BLOCK * BLOCK))


def has_fragments(traits: DeviceTraits, dtype: DType) -> bool:
    """Whether the device multiplies fragments of 16 x 16 x 16 of a dtype, whose order is known."""
    known = dtype in (DType.float16, DType.bfloat16)
    return known and BLOCK in traits.fragment_columns(dtype)


def matrix_of(blocks: TensorType) -> TensorType:
    """The matrix [terms, columns] whose right operand has this type."""
    return TensorType(blocks.dtype, (blocks.dims[1] * BLOCK, blocks.dims[0] * BLOCK))


def tile_of(
    traits: DeviceTraits,
    dtype: DType,
    rows: Size,
    columns: Size,
    terms: Size,
    paired: bool = False,
    always: bool = False,
    copied: int = 0,
    alone: bool = False,
) -> Fragments | None:
    """The tile for a matmul with operands in the order of fragments; None if another kernel is
    faster, or runs while this one does not. `paired`, `always`, `copied` and `alone` are those of
    `choose_fragment_tile`."""
    if not has_fragments(traits, dtype) or not all(isinstance(s, int) for s in (columns, terms)):
        return None
    problem = problem_of(dtype, rows, columns, terms)
    return choose_fragment_tile(traits, problem, paired, always, copied, alone)


def problem_of(
    dtype: DType, rows: Size, columns: Size, terms: Size, window: bool = False
) -> Problem:
    """What a kernel for operands in the order of fragments is chosen for."""
    m, n, k = map(_dims.upper, (rows, columns, terms))
    bfloat16 = dtype is DType.bfloat16
    return Problem(m, n, k, half=True, transposed=True, window=window, wide=True, bfloat16=bfloat16)


def _shape(
    a: TensorType,
    b: TensorType,
    rows: Size,
    bias: TensorType | None = None,
    blocks: bool = False,
    epilogue: Expression | ToCache | None = None,
    extras: tuple[TensorType, ...] = (),
    pair: int = 0,
    norm: TensorType | None = None,
    eps: float = 0.0,
    caches: tuple[TensorType, ...] = (),
) -> TensorType:
    """The rows of `a` times the columns of `b`, which is in the order of fragments. So is a, but for few
    rows, and with `blocks` the result. The other parameters are those of `fused.py`; a pair of many
    rows is a multiple of 16."""
    terms = a.dims[1] if a.rank == 2 else a.dims[1] * BLOCK
    if a.rank not in (2, 3) or b.rank != 3 or terms != matrix_of(b).dims[0]:
        raise ShapeError(f"cannot multiply {a} by {b} in the order of fragments")
    product = TensorType(a.dtype, (rows, matrix_of(b).dims[1]))
    result = stored_type(product, epilogue, pair, caches)
    return blocks_type(result.dtype, *result.dims) if blocks else result


def _lower(lowering: Lowering, node: Node) -> None:
    a, b = lowering.operand(node.tensor("a")), lowering.operand(node.tensor("b"))
    if len(a.dims) == 2:
        lower_few_rows_of_blocks(lowering, node, matrix_of(b.type))
        return
    bias, m = packed(lowering, node.optional_tensor("bias")), node.size("rows")
    n, k = b.dims[0] * BLOCK, b.dims[1] * BLOCK
    a, b = (x if _is_dense(x) else dense(lowering, x) for x in (a, b))
    blocks, paired = node.bool("blocks"), node.int("pair") > 0
    sizes = (m, n // 2 if paired else n) if blocks else None
    fusion = fusion_of(lowering, node, sizes, ahead=not paired)
    out = lowering.operand(node.result) if blocks else fusion.out
    tile = tile_of(lowering.traits, a.dtype, m, n, k, paired, always=True)
    if tile is None:  # the pass has seen one
        raise ShapeError(f"{node.op} of {a.type} and {b.type}")
    turn, rest = tile.turn(_dims.specialize(k))
    lowering.dispatch(
        tile.template,
        {"a": a, "b": b, "bias": bias, "out": out},
        {"M": m, "N": n, "K": k, **fusion.params},
        {
            **fusion.macros,
            **dict.fromkeys(("VEC8_A", "VEC8_B", "VEC4_OUT"), 1),
            "BLOCKS_OUT": int(blocks),
            "BFLOAT16": int(a.dtype is DType.bfloat16),
            "TURN": turn,
            "REST": rest,
        },
        form=tile,
        epilogue=fusion.epilogue,
        grid=tile.grid(m, n, 1),
        flops=2 * m * n * k,
    )


def _is_dense(operand: Operand) -> bool:
    aligned = isinstance(operand.offset, int) and operand.offset % 8 == 0
    return aligned and operand.layout.is_contiguous(operand.dims)


define(NAME, _shape, Kernel(_lower), mutates=(10,))


def _rows_shape(x: TensorType) -> TensorType:
    if x.rank != 2 or x.dtype.itemsize != 2:
        raise ShapeError(f"{x} has no fragments")
    return blocks_type(x.dtype, *x.dims)


def _copy(
    lowering: Lowering,
    template: str,
    x: Operand,
    out: Operand,
    sizes: dict[str, Size],
    each: int,
    macros: dict[str, str | int],
) -> None:
    """Appends the dispatch of a copy into the order of fragments, whose invocations make `each`
    elements. `sizes`: the parameters of the template but for offsets."""
    local = lowering.traits.profile.workgroup_size
    lowering.dispatch(
        template,
        {"in": x, "out": out},
        sizes,
        macros,
        local=local,
        grid=lowering.linear_grid(out.type.numel // each, local),
    )


def _rows_lower(lowering: Lowering, node: Node) -> None:
    x, out = lowering.operand(node.tensor("x")), lowering.operand(node.result)
    if x.strides[1] != 1 or not gcd4(x.strides[0], x.offset):
        x = dense(lowering, x)
    sizes = {"M": x.dims[0], "K": x.dims[1], "ld": x.strides[0]}
    _copy(lowering, "matmul/row_blocks.comp", x, out, sizes, 8, {})


# The rows of a matrix in the order of fragments, as a left operand.
define(ROWS, _rows_shape, Kernel(_rows_lower))


def _columns_shape(x: TensorType) -> TensorType:
    if x.rank != 2 or x.dtype.itemsize != 2:
        raise ShapeError(f"{x} has no fragments")
    terms, columns = x.dims
    return blocks_type(x.dtype, columns, terms)


def _columns_lower(lowering: Lowering, node: Node) -> None:
    x, out = lowering.operand(node.tensor("x")), lowering.operand(node.result)
    dense_terms = x.strides[0] == 1 and bool(gcd4(x.strides[1], x.offset))
    if not dense_terms and (x.strides[1] != 1 or not gcd4(x.strides[0], x.offset)):
        x = dense(lowering, x)
    sizes = {"K": x.dims[0], "N": x.dims[1], "ld": x.strides[1 if dense_terms else 0]}
    macros: dict[str, str | int] = {"DENSE_TERMS": int(dense_terms)}
    _copy(lowering, "matmul/column_blocks.comp", x, out, sizes, 16, macros)


# The columns of a matrix [terms, columns] in the order of fragments, as a right operand. Both sizes are
# multiples of 16.
define(COLUMNS, _columns_shape, Kernel(_columns_lower))

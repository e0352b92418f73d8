"""Matrices of 16 bits in the order of the fragments of matrix cores, the operators that make them, and
the matmul that reads them without shared memory (`glsl/matmul/fragment_blocks.glslh` has the order).

Such a matrix of [rows, terms] is a tensor [ceil(rows / 16), terms / 16, 256]. What fills the last block
of rows may be anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, packed
from purevk.lower.epilogue import make_epilogue
from purevk.lower.expression import Expression
from purevk.lower.gpu_kernels import Problem
from purevk.lower.gpu_tiles import choose_fragment_tile
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.matrix_core_kernels import Fragments
from purevk.ops.builder import Builder
from purevk.ops.reduce.normalization import lower_norm
from purevk.ops.registry import Kernel, Operator, ShapeError, register
from purevk.tuning import DeviceTraits

NAME = "purevk.matmul_fragments"
NORM = "purevk.norm_blocks"
BLOCK = 16


def blocks_type(dtype: DType, rows: Size, terms: Size) -> TensorType:
    """The type of a matrix in the order of fragments."""
    return TensorType(dtype, (_dims.ceil_div(rows, BLOCK), terms // BLOCK, BLOCK * BLOCK))


def right_blocks(builder: Builder, b: Value) -> Value:
    """A matrix [terms, columns] in the order of fragments, for the right operand."""
    terms, columns = b.type.dims
    split = (terms // BLOCK, 4, 4, columns // BLOCK, 4, 2, 2)
    made = builder.emit("aten.view.default", b, split)
    made = builder.emit("aten.permute.default", made, (3, 0, 4, 6, 1, 5, 2))
    made = builder.emit("purevk.copy", made)
    return builder.emit("aten.view.default", made, blocks_type(b.type.dtype, columns, terms).dims)


def has_fragments(traits: DeviceTraits, dtype: DType) -> bool:
    """Whether the device multiplies fragments of 16 x 16 x 16 of a dtype, whose order is known."""
    known = dtype in (DType.float16, DType.bfloat16)
    return known and BLOCK in traits.fragment_columns(dtype)


def tile_of(
    traits: DeviceTraits, dtype: DType, rows: Size, columns: Size, terms: Size
) -> Fragments | None:
    """The tile for a matmul with operands in the order of fragments; None if another kernel is
    faster, or runs while this one does not."""
    if not has_fragments(traits, dtype) or not all(isinstance(s, int) for s in (columns, terms)):
        return None
    problem = Problem(
        _dims.upper(rows),
        _dims.upper(columns),
        _dims.upper(terms),
        half=True,
        transposed=True,
        wide=True,
        bfloat16=dtype is DType.bfloat16,
    )
    return choose_fragment_tile(traits, problem)


def _shape(
    a: TensorType,
    b: TensorType,
    rows: Size,
    bias: TensorType | None = None,
    blocks: bool = False,
    epilogue: Expression | None = None,
    extras: tuple[TensorType, ...] = (),
) -> TensorType:
    if a.rank != 3 or b.rank != 3 or a.dims[1:] != b.dims[1:] or a.dtype is not b.dtype:
        raise ShapeError(f"cannot multiply {a} by {b} in the order of fragments")
    dtype = a.dtype if epilogue is None else epilogue.dtypes[epilogue.outputs[0]]
    columns = b.dims[0] * BLOCK
    return blocks_type(dtype, rows, columns) if blocks else TensorType(dtype, (rows, columns))


def _lower(lowering: Lowering, node: Node) -> None:
    a, b = lowering.operand(node.tensor("a")), lowering.operand(node.tensor("b"))
    bias, out = packed(lowering, node.optional_tensor("bias")), lowering.operand(node.result)
    m, blocks = node.size("rows"), node.bool("blocks")
    n, k = b.dims[0] * BLOCK, b.dims[1] * BLOCK
    a, b = (x if _is_dense(x) else dense(lowering, x) for x in (a, b))
    tile = tile_of(lowering.traits, a.dtype, m, n, k)
    if tile is None:  # the pass has seen one
        raise ShapeError(f"{node.op} of {a.type} and {b.type}")
    rows = Operand(out.storage, Layout.dense((m, n)), TensorType(out.dtype, (m, n)))
    made = make_epilogue(
        lowering,
        node.optional_attribute("epilogue", Expression),
        node.tensors("extras"),
        rows,
        "b, m, n",
        "m * N + n",
        (1, "n"),
        True,
        (0, "m"),
        ahead=True,
    )
    macros: dict[str, str | int] = {
        "T_A": a.dtype.glsl,
        "T_B": b.dtype.glsl,
        "T_OUT": out.dtype.glsl,
        **dict.fromkeys(("VEC8_A", "VEC8_B", "VEC4_OUT"), 1),
        "BLOCKS_OUT": int(blocks),
        "BIAS": int(bias is not None),
        "BFLOAT16": int(a.dtype is DType.bfloat16),
        **tile.macros(),
        "TURN": tile.turn(_dims.specialize(k)),
        **made.macros,
    }
    buffers = {"a": (a, "r"), "b": (b, "r"), "out": (out, "w"), **made.buffers}
    if bias is not None:
        macros["T_BIAS"] = bias.dtype.glsl
        buffers["bias"] = (bias, "r")
    params: dict[str, Size] = {
        "M": m,
        "N": n,
        "K": k,
        "ldo": n if blocks else out.strides[0],
        "offset_a": a.offset,
        "offset_b": b.offset,
        "offset_o": out.offset,
        "offset_bias": 0 if bias is None else bias.offset,
    }
    lowering.dispatch(
        tile.template,
        buffers,
        macros=macros,
        params=params,
        specialize=lowering.fixed(params),
        grid=tile.grid(m, n, 1),
        subgroup_size=tile.subgroup,
        flops=2 * m * n * k,
    )


def _is_dense(operand: Operand) -> bool:
    aligned = isinstance(operand.offset, int) and operand.offset % 8 == 0
    return aligned and operand.layout.is_contiguous(operand.dims)


# The rows of `a` times the columns of `b`, both in the order of fragments: [rows, columns], or with
# `blocks` in the order of fragments too.
register(Operator(NAME, _shape, Kernel(_lower)))


def _norm_shape(
    x: TensorType,
    weight: TensorType | None,
    bias: TensorType | None,
    eps: float,
    rms: bool,
    plain: bool,
    epilogue: Expression | None = None,
    extras: Sequence[TensorType] = (),
) -> tuple[TensorType, ...]:
    made = x if epilogue is None else x.with_dtype(epilogue.dtypes[epilogue.outputs[0]])
    blocks = blocks_type(made.dtype, _dims.product(x.dims[:-1]), x.dims[-1])
    return (blocks, made) if plain else (blocks,)


def _norm_lower(lowering: Lowering, node: Node) -> None:
    blocks, plain = lowering.operand(node.results[0]), node.bool("plain")
    if plain:
        out = lowering.operand(node.results[1])
    else:
        dims = node.tensor("x").type.dims
        out = Operand(blocks.storage, Layout.dense(dims), TensorType(blocks.dtype, dims))
    lower_norm(lowering, node, 1, out, blocks, plain)


# `purevk.norm` of the last dim, in the order of fragments; with `plain` also as it is.
register(Operator(NORM, _norm_shape, Kernel(_norm_lower)))

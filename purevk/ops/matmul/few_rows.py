"""Matmuls of few rows, as in decoding, whose kernels do more than multiply: see `fused.py`.

They run `matmul_dot.comp` or `matmul_vec.comp`, or `matmul_dot_blocks.comp` if the weight is in the
order of fragments. With more rows, other templates are faster, and passes leave the parts alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, packed
from purevk.lower.gpu_kernels import Dot, DotBlocks, Problem, Vector
from purevk.lower.gpu_tiles import choose_dot_blocks, prefers_few_rows
from purevk.lower.gpu_tiles import choose_few_rows as choose
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4, gcd8
from purevk.ops.matmul.choice import Batches, both_half, vector_macros
from purevk.ops.matmul.fused import fusion_of
from purevk.ops.registry import ShapeError
from purevk.tuning import DeviceTraits

MOST_SAVED = (
    2  # dispatches that such a matmul takes over: a norm before it, and what reads its columns
)


def choose_few_rows(
    traits: DeviceTraits,
    a: TensorType,
    b: TensorType,
    paired: bool,
    transposed: bool,
    saved: int = 0,
) -> Vector | Dot | None:
    """The tile for a matmul of these types; None if another template is faster.

    Args:
        paired: each workgroup computes pairs of columns.
        transposed: B is dense along its columns.
        saved: how many dispatches before and after the matmul become part of it.
    """
    (m, k), n = a.dims, b.dims[1]
    if not traits.profile.has_fast_shared_memory or k % 4 or (paired and n % 8):
        return None
    half = both_half(a.dtype, b.dtype)
    sizes = (_dims.upper(m), _dims.upper(n), _dims.upper(k))
    wide = transposed and k % (8 if half else 4) == 0
    bfloat16 = half and a.dtype is DType.bfloat16
    problem = Problem(*sizes, half=half, transposed=transposed, wide=wide, bfloat16=bfloat16)
    if not prefers_few_rows(traits, problem, saved):
        return None
    if paired and not transposed:
        problem = replace(problem, n=sizes[1] // 2)
    return choose(traits, problem, saved)


def lower_few_rows(lowering: Lowering, node: Node) -> None:
    """Appends the dispatch of a matmul [M, K] by [K, N] of few rows."""
    a, b = lowering.operand(node.tensor("a")), lowering.operand(node.tensor("b"))
    transposed = b.strides[0] == 1 and b.strides[1] != 1  # one column is dense along both dims
    if not transposed and (b.strides[1] != 1 or not isinstance(b.offset, int)):
        b = dense(lowering, b)
    k, n = b.dims
    ldb = b.strides[1] if transposed else b.strides[0]
    # How many dispatches it saves has been weighed by the pass.
    paired = node.int("pair") > 0
    form = choose_few_rows(lowering.traits, a.type, b.type, paired, transposed, saved=MOST_SAVED)
    dot = isinstance(form, Dot)
    whole = gcd8 if dot and a.dtype.itemsize == 2 else gcd4
    if a.strides[1] != 1 or not isinstance(a.offset, int) or not whole(a.strides[0], a.offset):
        a = dense(lowering, a)
    if form is None or (dot and not whole(ldb, b.offset)):
        # Sizes and layout are those that the pass has seen.
        raise ShapeError(f"{node.op} of {a.type} and {b.type}")
    vectors = gcd4(k, a.strides[0], a.offset), gcd4(k if transposed else n, ldb, b.offset)
    macros = vector_macros(b, *vectors, vector_out=False, wide=dot)
    if not dot:
        macros["B_TRANSPOSED"] = 0
    _emit(lowering, node, form, a, b, (k, n), {"ldb": ldb, **Batches().params}, macros)


def lower_few_rows_of_blocks(lowering: Lowering, node: Node, matrix: TensorType) -> None:
    """The same for a `matrix` that is in the order of fragments, as a right operand."""
    a, b = lowering.operand(node.tensor("a")), lowering.operand(node.tensor("b"))
    if a.strides[1] != 1 or not gcd4(a.strides[0], a.offset):
        a = dense(lowering, a)
    if not b.layout.is_contiguous(b.dims) or not gcd8(b.offset):
        b = dense(lowering, b)
    k, n = matrix.dims
    pair, bfloat16 = node.int("pair"), a.dtype is DType.bfloat16
    sizes = (_dims.upper(a.dims[0]), _dims.upper(n // 2 if pair else n), _dims.upper(k))
    problem = Problem(*sizes, half=True, transposed=True, wide=True, bfloat16=bfloat16)
    form = choose_dot_blocks(lowering.traits, problem, pair)
    _emit(lowering, node, form, a, b, (k, n), {}, {"VEC4_A": 1, "VEC8_B": 1})


def _emit(
    lowering: Lowering,
    node: Node,
    form: Vector | Dot | DotBlocks,
    a: Operand,
    b: Operand,
    sizes: tuple[Size, Size],
    params: Mapping[str, Size],
    macros: Mapping[str, str | int],
) -> None:
    bias, fusion = packed(lowering, node.optional_tensor("bias")), fusion_of(lowering, node)
    m, (k, n) = a.dims[0], sizes
    lowering.dispatch(
        form.template,
        {"a": a, "b": b, "bias": bias, "out": fusion.out, "norm": fusion.norm},
        {"M": m, "N": n, "K": k, "lda": a.strides[0], **params, **fusion.params},
        {**macros, **fusion.macros},
        form=form,
        epilogue=fusion.epilogue,
        grid=form.grid(m, n // 2 if fusion.pair else n, 1),
        flops=2 * m * n * k,
    )

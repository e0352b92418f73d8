"""Matmuls: all of them become `purevk.matmul`, which has a bias and an epilogue."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, packed
from purevk.lower.epilogue import make_epilogue
from purevk.lower.expression import Expression, Step
from purevk.lower.gpu_kernels import Problem
from purevk.lower.gpu_tiles import choose_distance
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4, gcd8
from purevk.lower.operands import broadcast_strides
from purevk.ops.matmul.choice import (
    Batches,
    Choice,
    both_half,
    choose,
    emit,
    may_overlap,
    reads_extras_ahead,
    stored_vectors,
)
from purevk.ops.matmul.few_rows import lower_few_rows
from purevk.ops.matmul.fused import ToCache, is_fused, stored_type, takes_program
from purevk.ops.promotion import promote_types
from purevk.ops.registry import Kernel, ShapeError, define
from purevk.ops.shapes import broadcast
from purevk.tuning import DeviceTraits

NAME = "purevk.matmul"
Choose = Callable[
    [DeviceTraits, Size, Size, Size, Size, bool, bool, tuple[bool, bool], bool, bool, bool], Choice
]  # the parameters are those of `choose`


def check_kinds(*operands: TensorType | None) -> None:
    """Raises `ShapeError` if some operands are floating point numbers and others are not."""
    given = [operand for operand in operands if operand is not None]
    if len({each.dtype.is_float for each in given}) > 1:
        names = ", ".join(str(each) for each in given)
        raise ShapeError(f"cannot multiply {names}", why="floats and other dtypes do not mix")


PANEL = 8  # columns


def panels_type(b: TensorType) -> TensorType:
    """The type of a right operand [terms, columns] in panels of columns. CPUs read it faster with few
    rows: terms of neighbouring columns are in one page."""
    terms, columns = b.dims
    return b.with_dims((columns // PANEL, terms, PANEL))


def matmul_type(a: TensorType, b: TensorType) -> TensorType:
    if a.rank < 2 or b.rank < 2 or not _dims.assume(a.dims[-1], "==", b.dims[-2]):
        raise ShapeError(f"cannot multiply {a} by {b}")
    check_kinds(a, b)
    batch = broadcast(a.dims[:-2], b.dims[:-2])
    return TensorType(promote_types(a.dtype, b.dtype), (*batch, a.dims[-2], b.dims[-1]))


def is_of_columns(bias: TensorType, n: Size) -> bool:
    """Whether a bias is a vector of one number for each column, which kernels add."""
    return bias.rank == 1 and bias.dims[0] == n


def _matmul_shape(
    a: TensorType,
    b: TensorType,
    bias: TensorType | None = None,
    epilogue: Expression | ToCache | None = None,
    extras: tuple[TensorType, ...] = (),
    norm: TensorType | None = None,
    eps: float = 0.0,
    pair: int = 0,
    caches: tuple[TensorType, ...] = (),
    panels: bool = False,
) -> TensorType:
    """`a b + bias`; the other parameters are those of `fused.py`. `panels`: b is in panels of
    columns."""
    if panels:
        b = b.with_dims((b.dims[1], b.dims[0] * PANEL))
    result = matmul_type(a, b)
    check_kinds(a, bias)
    if bias is not None and not is_of_columns(bias, result.dims[-1]):
        raise ShapeError(f"cannot add {bias} to the columns of {result}")
    return stored_type(result, epilogue, pair, caches)


KERNEL_TYPES = (DType.float32, DType.float16, DType.bfloat16)


def supports_float(node: Node, traits: DeviceTraits) -> str | None:
    """Why a node is refused by kernels of floating point numbers alone; None if it is not."""
    for value in node.inputs:
        if value.type.dtype not in KERNEL_TYPES:
            return f"no kernel for {value.type.dtype.name}"
    return None


class _Matrix:
    """The last two dims of an operand as rows and columns, the rest as up to two batch dims."""

    def __init__(self, operand: Operand, sizes: Sequence[Size]) -> None:
        self.operand = operand
        lead = len(sizes) - (len(operand.dims) - 2)
        strides = operand.strides
        self.batch: list[Size] = [
            0 if d < lead or (operand.dims[d - lead] == 1 and size != 1) else strides[d - lead]
            for d, size in enumerate(sizes)
        ]
        self.row, self.column = strides[-2], strides[-1]

    @property
    def transposed(self) -> bool:
        """Whether the rows rather than the columns are dense."""
        return not _one(self.column, self.operand.dims[-1]) and _one(
            self.row, self.operand.dims[-2]
        )


def _one(stride: Size, size: Size) -> bool:
    return (isinstance(size, int) and size == 1) or (isinstance(stride, int) and stride == 1)


def batch_loops(
    sizes: Sequence[Size], operands: Sequence[Sequence[Size]]
) -> tuple[list[Size], list[list[Size]]] | None:
    """Batch dims joined to at most two (inner first): their sizes, and for each the strides of the
    operands; None if it takes more."""
    merged: list[Size] = []
    steps: list[list[Size]] = []
    for d in reversed(range(len(sizes))):
        if isinstance(sizes[d], int) and sizes[d] == 1:
            continue
        mine = [operand[d] for operand in operands]
        if merged and all(outer == merged[-1] * inner for outer, inner in zip(mine, steps[-1])):
            merged[-1] = merged[-1] * sizes[d]
        else:
            merged.append(sizes[d])
            steps.append(mine)
    if len(merged) > 2:
        return None
    while len(merged) < 2:
        merged.append(1)
        steps.append([0] * len(operands))
    return merged, steps


def _matmul_lower(lowering: Lowering, node: Node) -> None:
    if is_fused(node):
        lower_few_rows(lowering, node)
        return
    lower_matmul(
        lowering,
        node,
        node.tensor("a"),
        node.tensor("b"),
        node.optional_tensor("bias"),
        node.optional_attribute("epilogue", Expression),
        node.tensors("extras"),
        panels=node.bool("panels"),
    )


def lower_matmul(
    lowering: Lowering,
    node: Node,
    a_value: Value,
    b_value: Value,
    bias_value: Value | None,
    epilogue: Expression | None,
    extras: tuple[Value, ...],
    choose: Choose = choose,
    operations: int = 2,
    panels: bool = False,
) -> None:
    """Appends the dispatches of a matmul, by the kernel that `choose` returns. Each pair of elements
    takes `operations` operations. `panels`: B is in panels of columns."""
    out = lowering.operand(node.result)
    a, b = lowering.operand(a_value), lowering.operand(b_value)
    if panels:  # strides are those of the first panel
        type = b.type.with_dims((b.dims[1], b.dims[0] * PANEL))
        b = Operand(b.storage, Layout(b.offset, (PANEL, 1)), type)
    batch_sizes: tuple[Size, ...] = out.dims[:-2]
    m, n, k = out.dims[-2], out.dims[-1], a.dims[-1]
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    # A's rows are dense, or it is copied; B may be dense along either dim.
    if not _one(a.strides[-1], k) or not isinstance(a.offset, int):
        a = dense(lowering, a)
    if not (_one(b.strides[-1], n) or _one(b.strides[-2], k)) or not isinstance(b.offset, int):
        b = dense(lowering, b)
    # A matmul with one column is that of one row with the transposed matrix, which GPUs read at
    # copy bandwidth.
    column = (
        bias_value is None
        and _one(0, n)
        and not _one(0, m)
        and _one(out.strides[-2], m)
        and lowering.traits.profile.coalesces_accesses
    )
    if column:
        a, b, out = _turned(b), _turned(a), _turned(out)
        m, n = n, m
        if not _one(a.strides[-1], k):
            a = dense(lowering, a)
    # Many rows of the same B: batch dims of A join its rows.
    joined = _join_rows(a, b, out)
    if joined is not None:
        a, out = joined
        batch_sizes, m = (), out.dims[-2]
    loops = None
    while loops is None:
        left, right = _Matrix(a, batch_sizes), _Matrix(b, batch_sizes)
        result = _Matrix(out, batch_sizes)
        loops = batch_loops(batch_sizes, [left.batch, right.batch, result.batch])
        if loops is None:
            a, b = dense(lowering, a), dense(lowering, b)
            expanded = [x for x in (a, b) if len(x.dims) == len(out.dims)]
            if all(x.dims[:-2] == out.dims[:-2] for x in expanded):
                continue
            a, b = _broadcast(lowering, a, batch_sizes), _broadcast(lowering, b, batch_sizes)
    (inner, outer), ((batch_a, batch_b, batch_o), (outer_a, outer_b, outer_o)) = loops
    transposed = right.transposed
    batches = inner * outer
    vector_a = gcd4(k, left.row, batch_a, outer_a, a.offset)
    ldb = right.row if not transposed else right.column
    vector_b = gcd4(k if transposed else n, ldb, batch_b, outer_b, b.offset)
    vector_out = gcd4(n, result.row, batch_o, outer_o, out.offset)
    bias = packed(lowering, bias_value)
    half = both_half(a.dtype, b.dtype)
    aligned = gcd8(left.row, batch_a, outer_a, a.offset, ldb, batch_b, outer_b, b.offset)
    aligned = aligned and gcd8(n, result.row, batch_o, outer_o, out.offset)
    aligned = aligned and may_overlap(lowering, out, extras)
    wide = (gcd8 if half else gcd4)(
        k, left.row, batch_a, outer_a, a.offset, ldb, batch_b, outer_b, b.offset
    )
    wide = wide and vector_a and vector_b and (transposed or (gcd8 if half else gcd4)(n))
    choice = choose(
        lowering.traits,
        m,
        n,
        k,
        batches,
        half,
        transposed,
        (vector_a, vector_b),
        aligned,
        wide,
        half and a.dtype is DType.bfloat16,
    )
    vector_out = stored_vectors(choice, vector_out)
    last = len(node.result.type.dims) - 1
    made = make_epilogue(
        lowering,
        epilogue,
        extras,
        lowering.operand(node.result),
        "b, m, n",
        "(b * M + m) * N + n",
        (last - column, "n"),
        vector_out,
        (last - 1, "m") if not column and (joined is None or last == 1) else None,
        ahead=reads_extras_ahead(choice),
    )
    emit(
        choice,
        lowering,
        a=a,
        b=b,
        bias=bias,
        out=out,
        epilogue=made,
        sizes=(m, n, k),
        strides=(left.row, ldb, result.row),
        batches=Batches(batches, inner, batch_a, batch_b, batch_o, outer_a, outer_b, outer_o),
        transposed=transposed,
        vectors=(vector_a, vector_b, vector_out),
        flops=operations * m * n * k * batches,
        panels=panels,
    )


def _turned(operand: Operand) -> Operand:
    """A matrix transposed."""
    (*lead, row, column), (*batch, rows, columns) = operand.strides, operand.dims
    layout = Layout(operand.offset, (*lead, column, row))
    return Operand(operand.storage, layout, TensorType(operand.dtype, (*batch, columns, rows)))


def _join_rows(a: Operand, b: Operand, out: Operand) -> tuple[Operand, Operand] | None:
    """With one B for all batches and A's batches densely behind each other, A and the result are
    one matrix."""
    if len(out.dims) < 3 or len(a.dims) != len(out.dims):
        return None
    if any(not (isinstance(size, int) and size == 1) for size in b.dims[:-2]):
        return None

    def flatten(operand: Operand) -> Operand | None:
        rows, stride = operand.dims[-2], operand.strides[-2]
        for size, step in zip(reversed(operand.dims[:-2]), reversed(operand.strides[:-2])):
            if isinstance(size, int) and size == 1:
                continue
            if isinstance(rows, int) and rows == 1:
                rows, stride = size, step
            elif step == rows * stride:
                rows = rows * size
            else:
                return None
        type = TensorType(operand.dtype, (rows, operand.dims[-1]))
        return Operand(operand.storage, Layout(operand.offset, (stride, operand.strides[-1])), type)

    flat_a, flat_out = flatten(a), flatten(out)
    return None if flat_a is None or flat_out is None else (flat_a, flat_out)


def _broadcast(lowering: Lowering, operand: Operand, batch: Sequence[Size]) -> Operand:
    sizes = (*batch, *operand.dims[-2:])
    expanded = Operand(
        operand.storage,
        Layout(operand.offset, broadcast_strides(operand, sizes)),
        TensorType(operand.dtype, tuple(sizes)),
    )
    return dense(lowering, expanded)


define(
    NAME,
    _matmul_shape,
    Kernel(_matmul_lower, supports=supports_float, epilogue=takes_program),
    mutates=(8,),
)


# -- distances -----------------------------------------------------------------------------------
DISTANCES = "purevk.distances"
METRICS = {0.0: 0, 1.0: 1, 2.0: 2, math.inf: 3}  # exponents, and METRIC of `matmul_shared.glslh`
_SQUARE_ROOT = Expression((DType.float32,), (), (Step("sqrt($0)", (0,), DType.float32),), (1,))


def _distances_lower(lowering: Lowering, node: Node) -> None:
    p = node.float("p")

    def choose(
        traits: DeviceTraits,
        m: Size,
        n: Size,
        k: Size,
        batches: Size,
        half: bool,
        transposed: bool,
        vectors: tuple[bool, bool],
        *_: bool,
    ) -> Choice:
        m, n, k, batches = map(_dims.upper, (m, n, k, batches))
        problem = Problem(m, n, k, batches, False, transposed, vectors)
        return choose_distance(traits, METRICS[p], problem)

    a, b = node.tensor("a"), node.tensor("b")
    lower_matmul(lowering, node, a, b, None, _SQUARE_ROOT if p == 2.0 else None, (), choose, 3)


# Distances of exponent p between the rows of a [..., m, k] and the columns of b [..., k, n].
define(
    DISTANCES,
    lambda a, b, p: matmul_type(a, b),
    Kernel(_distances_lower, supports=supports_float, bfloat16=False),
)

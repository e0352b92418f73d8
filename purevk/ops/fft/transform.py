"""Discrete Fourier transforms along one dim of real tensors, whose complex numbers are pairs.

- A row that fits a workgroup is one pass of `fft/fft.comp`.
- A longer row is a matrix: a pass over its columns, with a factor for each element, and a pass over
  its rows (the four-step algorithm). If the rows of the matrix are too long, they are transformed in
  the same way.
- A length with a prime factor above 13 is a convolution with a chirp (Bluestein's algorithm), by
  transforms of a power of 2.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, power_of_two
from purevk.ops.builder import Builder
from purevk.ops.complex.algebra import Algebra, Z
from purevk.ops.complex.views import INTERLEAVE
from purevk.ops.fft.choice import Work, choose, split, stages_of
from purevk.ops.fft.tables import reals, table
from purevk.ops.image_layout import LayoutQuery
from purevk.ops.registry import Kernel, Order, define

NAME = "purevk.fft"
Source = Literal["complex", "real", "hermitian"]
Part = Literal["whole", "first", "second"]


@dataclass(frozen=True)
class Transform:
    """A transform along the last dim (that of the pairs not counted).

    Attributes:
        length: of the rows that a workgroup transforms.
        whole: of the whole row.
        out: elements of the whole row that are kept.
        source: what x holds: complex numbers, real ones, or the first half of a spectrum whose
            other half are its conjugates.
        real: only the real parts of the result are kept.
        inverse: exp(+...) instead of exp(-...).
        scale: what the result is multiplied by.
        part: the whole transform, or one of the two passes of a long row.
    """

    length: int
    whole: int
    out: int
    source: Source = "complex"
    real: bool = False
    inverse: bool = False
    scale: float = 1.0
    part: Part = "whole"


def _shape(x: TensorType, roots: TensorType | None, how: Transform) -> TensorType:
    """x is [matrices, rows, elements], or [matrices, 1, elements] for the first pass."""
    pairs = () if how.real and how.part != "first" else (2,)
    matrices, rows = x.dims[:2]
    if how.part == "first":
        return TensorType(x.dtype, (matrices, how.whole // how.length, how.length, 2))
    if how.part == "second":
        return TensorType(x.dtype, (matrices, 1, how.out, *pairs))
    return TensorType(x.dtype, (matrices, rows, how.out, *pairs))


def _columns(node: Node) -> bool:
    """Whether neighbouring rows of the result are neighbours in memory."""
    how = node.attribute("how", Transform)
    return how.part == "first" or (how.part == "whole" and node.result.type.dims[1] != 1)


def _layouts(node: Node, query: LayoutQuery) -> tuple[Order | None, ...]:
    rank = node.result.type.rank
    return ((0, 2, 1, 3)[:rank] if _columns(node) else None,)


def _elements(lowering: Lowering, operand: Operand, pairs: bool) -> Operand:
    """An operand whose offset and strides count elements: complex numbers if they are pairs."""
    if not pairs:
        return operand
    if not operand.aligned(2):
        operand = dense(lowering, operand)
    layout = Layout(operand.offset // 2, tuple(stride // 2 for stride in operand.strides[:-1]))
    return Operand(operand.storage, layout, operand.type.with_dims(operand.dims[:-1]))


_VECTORS = {DType.float32: "vec2", DType.float16: "f16vec2", DType.float64: "dvec2"}


def _lower(lowering: Lowering, node: Node) -> None:
    how = node.attribute("how", Transform)
    x_pairs, out_pairs = how.source != "real", node.result.type.rank == 4
    x = _elements(lowering, lowering.operand(node.tensor("x")), x_pairs)
    out = _elements(lowering, lowering.operand(node.result), out_pairs)
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    matrices, rows = x.dims[:2]
    x_matrix, x_row, x_element = x.strides
    out_matrix, out_row, out_element = out.strides
    if how.part == "first":
        rows, x_row = how.whole // how.length, x_element
    elif how.part == "second":
        out_row = out_element
    elif rows == 1:
        matrices, rows = 1, matrices
        x_row, out_row = x_matrix, out_matrix
    columns_in = (x_row == 1 and x_element != 1) or how.part == "first"
    columns_out = (out_row == 1 and out_element != 1) or how.part != "whole"
    dtype = node.result.type.dtype
    parts = DType.float64 if dtype is DType.float64 else DType.float32
    work = choose(
        lowering.traits, how.length, parts.itemsize, _dims.upper(rows), columns_in or columns_out
    )
    assert work is not None  # as `fourier` chooses the length
    groups = _dims.ceil_div(rows, work.rows)
    roots = node.optional_tensor("roots")
    params: dict[str, Size] = {
        "matrices": matrices,
        "rows": rows,
        "row_groups": groups,
        "x_matrix": x_matrix,
        "x_row": x_row,
        "x_element": x_element,
        "out_matrix": out_matrix,
        "out_row": out_row,
        "out_element": out_element,
        "whole": how.whole,
        "out_length": how.out if how.part != "first" else how.length,
    }
    if how.scale != 1.0:
        params |= _scale(how.scale, parts)
    twiddles = lowering.operand(roots) if roots is not None and len(work.radices) > 1 else None
    points = matrices * rows * how.length
    lowering.dispatch(
        "fft/fft.comp",
        {"x": x, "out": out, "twiddles": twiddles},
        params,
        _macros(work, how, parts)
        | {
            "T_X": _VECTORS[x.dtype] if x_pairs else x.dtype.glsl,
            "T_OUT": _VECTORS[out.dtype] if out_pairs else out.dtype.glsl,
            "REAL_OUT": int(not out_pairs),
            "COLUMNS_IN": int(columns_in),
            "COLUMNS_OUT": int(columns_out),
        },
        specialize=("whole",),
        grid=lowering.linear_grid(matrices * groups, 1),
        flops=5 * points * max(how.length.bit_length() - 1, 1),
        nbytes=sum(
            operand.type.numel * operand.dtype.itemsize * (2 if pairs else 1)
            for operand, pairs in ((x, x_pairs), (out, out_pairs))
        ),
    )


def _macros(work: Work, how: Transform, parts: DType) -> dict[str, str | int]:
    return {
        **reals(parts),
        "LENGTH": work.length,
        "ROWS": work.rows,
        "THREADS": work.threads,
        "VALUES": work.values,
        "STAGES": work.stages(),
        "EXCHANGES": int(len(work.radices) > 1),
        "HALVES": int(work.halves),
        "INVERSE": int(how.inverse),
        "REAL_IN": int(how.source == "real"),
        "HERMITIAN": int(how.source == "hermitian"),
        "FIRST_OF_TWO": int(how.part == "first"),
        "SECOND_OF_TWO": int(how.part == "second"),
        "SCALED": int(how.scale != 1.0),
    }


def _scale(scale: float, parts: DType) -> dict[str, Size]:
    """The bits of the scale."""
    if parts is not DType.float64:
        return {"scale_low": bits_of(scale), "scale_high": 0}
    low, high = struct.unpack("<ii", struct.pack("<d", scale))
    return {"scale_low": low, "scale_high": high}


define(NAME, _shape, Kernel(_lower, layouts=_layouts, bfloat16=False))


# -- along any dim, of any length -----------------------------------------------------------------
def fourier(
    builder: Builder,
    x: Value,
    dim: int,
    length: int,
    *,
    source: Source = "complex",
    real: bool = False,
    out: int | None = None,
    inverse: bool = False,
    scale: float = 1.0,
) -> Value:
    """A transform along a dim. Pairs are a last dim of size 2.

    Args:
        x: pairs, or real numbers if `source` is "real".
        length: elements along the dim; for the half of a spectrum, those of the whole one.
        out: elements of the result that are kept; None: all.
        The other arguments are attributes of `Transform`.
    """
    out = length if out is None else out
    how = Transform(length, length, out, source, real, inverse, scale)
    pairs = (2,) if source != "real" else ()
    rank = x.type.rank - len(pairs)
    sizes = x.type.dims[:rank]
    fits = choose(builder.traits, length, _itemsize(x), 1, False) is not None
    before, after = list(range(dim)), list(range(dim + 1, rank))
    order = (*before, *after, dim, *range(rank, x.type.rank))
    moved = builder.aten.permute(x, order)
    outer, inner = (_dims.product(sizes[d] for d in dims) for dims in (before, after))
    matrices = (outer, inner) if fits else (outer * inner, 1)
    rows = builder.aten.view(moved, (*matrices, sizes[dim], *pairs))
    if fits:
        made = builder.emit(NAME, rows, _roots(builder, length, x.type.dtype), how)
    else:
        made = _long(builder, rows, how)
    tail = () if real else (2,)
    shape = (*(sizes[d] for d in (*before, *after)), out, *tail)
    made = builder.aten.view(made, shape)
    back = (*before, rank - 1, *range(dim, rank - 1), *range(rank, len(shape)))
    return builder.aten.permute(made, back)


def _itemsize(x: Value) -> int:
    return 8 if x.type.dtype is DType.float64 else 4


def _roots(builder: Builder, length: int, dtype: DType) -> Value | None:
    """The twiddle factors of a transform, if it has more than one stage."""
    radices = stages_of(builder.traits, length)
    if radices is None or len(radices) == 1:
        return None
    return table(builder, "roots", length, length, _parts(dtype))


def _parts(dtype: DType) -> DType:
    return DType.float64 if dtype is DType.float64 else DType.float32


def _long(builder: Builder, rows: Value, how: Transform) -> Value:
    """A transform of rows [matrices, 1, elements] that do not fit a workgroup."""
    cut = None
    if stages_of(builder.traits, how.length) is not None:
        cut = split(builder.traits, how.length, _itemsize(rows))
    if cut is None:
        return _chirped(builder, rows, how)
    first, second = cut
    dtype, matrices = rows.type.dtype, rows.type.dims[0]
    opening = replace(how, length=first, part="first", scale=1.0, real=False, out=how.length)
    made = builder.emit(NAME, rows, _roots(builder, first, dtype), opening)
    made = builder.aten.permute(made, (0, 2, 1, 3))  # [matrices, first, second]
    closing = replace(how, length=second, source="complex")
    if choose(builder.traits, second, _itemsize(rows), 1 << 16, True) is not None:
        roots = _roots(builder, second, dtype)
        return builder.emit(NAME, made, roots, replace(closing, part="second"))
    inner = builder.aten.view(made, (matrices * first, 1, second, 2))
    made = _long(builder, inner, replace(closing, whole=second, out=second, real=False))
    made = builder.aten.view(made, (matrices, first, second, 2))
    made = builder.aten.permute(made, (0, 2, 1, 3))
    made = builder.aten.view(made, (matrices, 1, how.whole, 2))
    return _kept(builder, made, how)


def _kept(builder: Builder, pairs: Value, how: Transform) -> Value:
    """What a transform keeps of its result [matrices, 1, elements, 2]."""
    made = builder.aten.slice.Tensor(pairs, dim=2, start=0, end=how.out)
    return builder.aten.select.int(made, dim=3, index=0) if how.real else made


# -- lengths with large prime factors ------------------------------------------------------------
def _multiplied(
    builder: Builder,
    a: Value,
    b: Value,
    *,
    conjugate: tuple[bool, bool] = (False, False),
    scale: float = 1.0,
) -> Value:
    """The pairs of a product.

    Args:
        conjugate: whether a, and whether the result, is conjugated.
    """
    program = Algebra(builder, a.type.dims[:-1], _parts(a.type.dtype))
    left, right = (
        Z(
            *(
                program.tensor(builder.aten.select.int(pairs, pairs.type.rank - 1, number))
                for number in (0, 1)
            )
        )
        for pairs in (a, b)
    )
    made = program.mul(program.conj(left) if conjugate[0] else left, right)
    if conjugate[1]:
        made = program.conj(made)
    if scale != 1.0:
        made = program.scaled(made, program.real(scale))
    types = (program.dtype, a.type.dtype)
    return builder.emit(INTERLEAVE, *program.emit([(term, *types) for term in made]))


def _chirped(builder: Builder, rows: Value, how: Transform) -> Value:
    """A transform as a convolution with a chirp: j k = (j^2 + k^2 - (k - j)^2) / 2."""
    length, dtype = how.length, rows.type.dtype
    pairs = _spectrum(builder, rows, how)
    padded = power_of_two(2 * length - 1)
    chirp = table(builder, "chirp", length, length, _parts(dtype))
    response = fourier(builder, table(builder, "filter", length, padded, _parts(dtype)), 0, padded)
    made = _multiplied(builder, pairs, chirp, conjugate=(how.inverse, False))
    made = builder.aten.constant_pad_nd(made, (0, 0, 0, padded - length), value=0.0)
    made = fourier(builder, made, 2, padded)
    made = _multiplied(builder, made, response)
    made = fourier(builder, made, 2, padded, inverse=True, scale=1.0 / padded)
    made = builder.aten.slice.Tensor(made, dim=2, start=0, end=how.out)
    chirp = builder.aten.slice.Tensor(chirp, dim=0, start=0, end=how.out)
    made = _multiplied(builder, made, chirp, conjugate=(False, how.inverse), scale=how.scale)
    return _kept(builder, made, how)


def _spectrum(builder: Builder, rows: Value, how: Transform) -> Value:
    """The pairs of all elements of rows."""
    if how.source == "complex":
        return rows
    if how.source == "real":
        zeros = builder.aten.zeros_like(rows)
        return builder.emit(INTERLEAVE, rows, zeros)
    half = how.length // 2 + 1
    first = builder.aten.slice.Tensor(rows, dim=2, start=0, end=half)
    rest = builder.aten.slice.Tensor(rows, dim=2, start=1, end=how.length - half + 1)
    rest = builder.aten.flip(rest, (2,))
    real, imaginary = (builder.aten.select.int(rest, dim=3, index=number) for number in (0, 1))
    rest = builder.emit(INTERLEAVE, real, builder.aten.neg(imaginary))
    return builder.aten.cat((first, rest), dim=2)


def scale_of(norm: int, sizes: Sequence[int]) -> float:
    """What the result of a transform over dims of these sizes is multiplied by: torch's modes are
    0 (nothing), 1 (by the root of the number of elements) and 2 (by the number)."""
    count = float(math.prod(sizes))
    return 1.0 if norm == 0 else count**-0.5 if norm == 1 else 1.0 / count

"""The method of Jacobi: orthogonal columns of matrices.

It takes up to 512 columns on a GPU, and 128 on a software device. A sweep that rotates nothing ends all
later ones, without the host.
Eigenvectors of symmetric matrices are the right vectors of a matrix that is moved to have no negative
eigenvalue. Signs differ from LAPACK's, as do the vectors of equal values.
"""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense_operand
from purevk.lower.lowering import Lowering
from purevk.ops.builder import Builder
from purevk.ops.registry import Kernel, ShapeError, define
from purevk.tuning import DeviceTraits

ORTHOGONAL = "purevk.orthogonal_columns"
EPSILON = {DType.float32: 2.0**-23, DType.float64: 2.0**-52}
LARGEST = 512  # columns; the dispatches of a call grow with their number
LARGEST_ON_SOFTWARE = 128  # LAPACK is much faster there for more
_BLOCK = 16  # columns of a block, if a matrix has more than two blocks
_TOGETHER = 8  # vectors or pairs of them that a kernel works on at once


# -- orthogonal columns -------------------------------------------------------------------------
def _orthogonal_shape(x: TensorType, vectors: bool) -> TensorType:
    if x.rank != 3 or not isinstance(x.dims[1], int) or not isinstance(x.dims[2], int):
        raise ShapeError(f"{x} are no columns of matrices of known sizes")
    matrices, columns, rows = x.dims
    return x.with_dims((matrices, columns, rows + columns if vectors else rows))


def _local(traits: DeviceTraits, size: int) -> int:
    """Invocations of a workgroup, for vectors of `size` elements. Software devices run them one after
    another, to each barrier."""
    return 16 if size <= 32 or not traits.profile.has_fast_shared_memory else 64


def _blocks(columns: int) -> tuple[int, int]:
    """The number of blocks, an even one, and the columns of each."""
    if columns <= 2 * _BLOCK:
        return 2, max(-(-columns // 2), 1)
    return -(-columns // (2 * _BLOCK)) * 2, _BLOCK


def _sweeps(columns: int) -> int:
    """Sweeps in which every matrix is done, with some to spare. Convergence is quadratic; sweeps
    after the last rotation end at once."""
    return 8 + columns.bit_length() if columns > 1 else 0


def _macros(dtype: DType) -> dict[str, str | int]:
    macros: dict[str, str | int] = {"T": dtype.glsl, "EPSILON": repr(EPSILON[dtype])}
    if dtype is DType.float64:
        macros |= {"HAS_FLOAT64": 1, "EPSILON": f"{EPSILON[dtype]!r}lf"}
    return macros


def _lower_orthogonal(lowering: Lowering, node: Node) -> None:
    x, out = dense_operand(lowering, node.tensor("x")), lowering.operand(node.result)
    matrices = x.dims[0]
    columns, rows, width = (_dims.specialize(size) for size in (x.dims[1], x.dims[2], out.dims[2]))
    sweeps, (blocks, block) = _sweeps(columns), _blocks(columns)
    rotating = lowering.temporary(TensorType(DType.int32, (matrices, sweeps + 1)))
    # Software devices take long to compile what is unrolled.
    together = _TOGETHER if lowering.traits.profile.has_fast_shared_memory else 2
    macros = {**_macros(out.dtype), "LOCAL": _local(lowering.traits, width)}
    params: dict[str, Size] = {
        "rows": rows,
        "columns": columns,
        "width": width,
        "sweeps": sweeps,
        "matrices": matrices,
    }
    lowering.dispatch(
        "linalg/jacobi.comp",
        {"x": x, "out": out, "rotating": rotating},
        params,
        {**macros, "START": 1},
        grid=lowering.linear_grid(matrices, 1),
        specialize=(),
    )
    pairs, meetings = blocks // 2, blocks - 1
    lowering.dispatch(
        "linalg/jacobi.comp",
        {"out": out, "rotating": rotating},
        {**params, "blocks": blocks, "block": block, "iteration": 0},
        {**macros, "PAIRS": together},
        grid=lowering.linear_grid(matrices * pairs, 1),
        flops=matrices
        * pairs
        * block
        * (2 * block - 1)
        * (6 * rows + 6 * width)
        * sweeps
        * meetings,
        specialize=(),
        repeat=sweeps * meetings,
    )


def _supports(node: Node, traits: DeviceTraits) -> str | None:
    dtype = node.tensor("x").type.dtype
    return None if dtype in EPSILON else f"no kernel for {dtype.name}"


# x is [matrices, columns, rows]: columns of matrices, as rows. They are rotated until they are
# orthogonal. With `vectors`, the same columns of the product of the rotations follow each.
define(ORTHOGONAL, _orthogonal_shape, Kernel(_lower_orthogonal, supports=_supports, bfloat16=False))


def orthogonal_columns(builder: Builder, x: Value, vectors: bool) -> tuple[Value, Value | None]:
    """The columns of matrices [..., m, n] rotated until they are orthogonal, as rows [..., n, m];
    and with `vectors` those of the product of the rotations, as rows [..., n, n]."""
    *batch, rows, columns = x.type.dims
    turned = builder.aten.transpose.int(x, dim0=-1, dim1=-2)
    flat = builder.aten.view(turned, (_dims.product(batch), columns, rows))
    made = builder.emit(ORTHOGONAL, flat, vectors)
    if not vectors:
        return builder.aten.view(made, (*batch, columns, rows)), None
    left = builder.aten.slice.Tensor(made, dim=2, start=0, end=rows)
    right = builder.aten.slice.Tensor(made, dim=2, start=rows, end=rows + columns)
    return (
        builder.aten.view(left, (*batch, columns, rows)),
        builder.aten.view(right, (*batch, columns, columns)),
    )

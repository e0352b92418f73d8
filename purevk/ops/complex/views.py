"""Operators between complex tensors and real ones, with the same bytes."""

from __future__ import annotations

from purevk.ir import Layout, Node, TensorType, Value
from purevk.lower.copies import emit_copy
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.map import MapSpec, coordinates, emit_map
from purevk.ops.facts import Moves
from purevk.ops.registry import Kernel, ShapeError, View, define

AS_REAL, AS_COMPLEX = "aten.view_as_real.default", "aten.view_as_complex.default"
INTERLEAVE = "purevk.interleave"


def pair_type(type: TensorType) -> TensorType:
    """The type of the pairs (real part, imaginary part) of a complex tensor."""
    return TensorType(type.dtype.component, (*type.dims, 2))


def _as_real_shape(x: TensorType) -> TensorType:
    if not x.dtype.is_complex:
        raise ShapeError(f"view_as_real takes complex numbers, not {x}")
    return pair_type(x)


def _as_real_layout(
    layout: Layout, x: TensorType, results: tuple[TensorType, ...], value: Value
) -> tuple[Layout, ...]:
    return (Layout(2 * layout.offset, (*(2 * stride for stride in layout.strides), 1)),)


def _as_complex_shape(x: TensorType) -> TensorType:
    dtype = x.dtype.complex_dtype
    if dtype is None or not x.rank or x.dims[-1] != 2:
        raise ShapeError(f"view_as_complex takes floats with a last dim of size 2, not {x}")
    return TensorType(dtype, x.dims[:-1])


def _as_complex_layout(
    layout: Layout, x: TensorType, results: tuple[TensorType, ...], value: Value
) -> tuple[Layout, ...] | None:
    # Values of complex numbers are only what the host reads, so they are dense.
    if layout.offset != 0 or not layout.is_contiguous(x.dims):
        return None
    return (Layout.dense(results[0].dims),)


define(
    AS_REAL,
    _as_real_shape,
    View(_as_real_layout),
    names=("aten.view_as_real_copy.default",),
    moves=Moves.NO,
)
define(
    AS_COMPLEX,
    _as_complex_shape,
    View(_as_complex_layout),
    names=("aten.view_as_complex_copy.default",),
    moves=Moves.NO,
)


def _interleave_shape(real: TensorType, imaginary: TensorType) -> TensorType:
    if real != imaginary:
        raise ShapeError(f"cannot interleave {real} and {imaginary}")
    return TensorType(real.dtype, (*real.dims, 2))


def part_layout(layout: Layout, number: int) -> Layout:
    """The layout of the real (0) or imaginary (1) parts in that of the pairs."""
    return Layout(layout.offset + number * layout.strides[-1], layout.strides[:-1])


def _interleave_lower(lowering: Lowering, node: Node) -> None:
    """Copies the parts that `schedule.storage` has not placed in the result."""
    out = lowering.operand(node.result)
    parts = [lowering.operand(node.tensor(name)) for name in ("real", "imaginary")]
    if all(part.storage is out.storage for part in parts):
        return
    if lowering.traits.profile.coalesces_accesses:
        at = coordinates(len(out.dims) - 1)
        body = f"if (i{len(out.dims) - 1} == 0) r = RE({at}); else r = IM({at});"
        emit_map(lowering, MapSpec(body, ("RE", "IM")), parts, {}, [out])
        return
    for number, part in enumerate(parts):
        target = Operand(out.storage, part_layout(out.layout, number), part.type)
        emit_copy(lowering, part, target)


define(INTERLEAVE, _interleave_shape, Kernel(_interleave_lower))

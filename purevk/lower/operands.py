"""Views of operands: broadcast to other sizes, or a slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from purevk.errors import UnsupportedOperatorError
from purevk.ir import Layout, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.lowering import Lowering, Operand


def broadcast_strides(operand: Operand, sizes: Sequence[Size]) -> tuple[Size, ...]:
    """Strides of an operand along the dims of the result, 0 where it is broadcast."""
    lead = len(sizes) - len(operand.dims)
    return tuple(
        0 if d < lead or (operand.dims[d - lead] == 1 and size != 1) else operand.strides[d - lead]
        for d, size in enumerate(sizes)
    )


def slice_of(operand: Operand, dim: int, start: Size, length: Size) -> Operand:
    """Part of an operand along a dim."""
    layout = Layout(operand.offset + start * operand.strides[dim], operand.strides)
    sizes = (*operand.dims[:dim], length, *operand.dims[dim + 1 :])
    return Operand(operand.storage, layout, TensorType(operand.dtype, sizes))


_SLACK = 512  # bytes of a window before and after what is bound
_MOST = 4096  # parts, each of which is a dispatch


def bound_parts(
    lowering: Lowering, operands: Sequence[Operand], sizes: Sequence[Size]
) -> Iterator[tuple[tuple[int, ...], list[Operand]]]:
    """Operands of an iteration over `sizes`, to which they broadcast, in parts of it: a binding spans
    what each part reads and writes. With each, the index of its first element.

    Raises:
        UnsupportedOperatorError: it takes too many parts.
    """
    wide = [
        Operand(
            operand.storage,
            Layout(operand.offset, broadcast_strides(operand, sizes)),
            TensorType(operand.dtype, tuple(sizes)),
        )
        for operand in operands
    ]
    waiting, count = [((0,) * len(sizes), wide)], 0
    while waiting:
        first, part = waiting.pop()
        bound = [lowering.window(each) if lowering.is_large(each) else each for each in part]
        far = [each for each in bound if lowering.is_large(each)]
        count += 1
        if not far:
            yield first, bound
            continue
        at, length = _cut(far, lowering.traits.max_storage_range)
        size = part[0].dims[at]
        starts = range(0, _dims.upper(size), length)
        if length >= _dims.upper(size) or count + len(waiting) + len(starts) > _MOST:
            raise UnsupportedOperatorError(
                f"a tensor of {max(each.storage.type.nbytes for each in far)} bytes is larger than one"
                " binding of the device",
                where=lowering.node.source if lowering.node else "",
                why=f"its elements are read in an order for which bindings of"
                f" {lowering.traits.max_storage_range} bytes would be too many",
                next="copy it into that order part by part in the model",
            )
        for start in reversed(starts):
            rest = _dims.minimum(_dims.maximum(size - start, 0), length)
            begin = (*first[:at], first[at] + start, *first[at + 1 :])
            waiting.append((begin, [slice_of(each, at, start, rest) for each in part]))


def _cut(operands: Sequence[Operand], limit: int) -> tuple[int, int]:
    """The dim to cut, and how long its parts are: that along which the operand with the largest span
    reaches farthest."""
    best = (0, 0, 1)
    for operand in operands:
        item = operand.dtype.itemsize
        reach = [
            (_dims.upper(size) - 1) * abs(_dims.specialize(stride)) * item
            for size, stride in zip(operand.dims, operand.strides)
        ]
        at = max(range(len(reach)), key=reach.__getitem__)
        total = sum(reach)
        if total <= best[0]:
            continue
        step = abs(_dims.specialize(operand.strides[at])) * item
        fitting = max((limit - _SLACK - (total - reach[at])) // max(step, 1) + 1, 1)
        best = (total, at, fitting)
    _, at, length = best
    for multiple in (256, 64, 16, 4):
        if length >= 4 * multiple:
            return at, length - length % multiple
    return at, length

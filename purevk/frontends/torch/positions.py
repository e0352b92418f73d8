"""Positions along a dim that are sizes of a call or follow from data, such as `x[n.item():]`.

torch does not know the signs of the latter. For such a slice it makes new symbols: of its size, and
of the offset of the result in memory.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from purevk.frontends import numbers
from purevk.frontends.source_lines import path_of
from purevk.ir import Dim, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ir.relations import indicator

if TYPE_CHECKING:
    from purevk.frontends.torch.nodes import Call

NAMES = ("aten.select.int", "aten.slice.Tensor")
# Start, end and step of numbers in steps, from the arguments.
STEPS: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
    "aten.arange.default": lambda args: (0, args[0], 1),
    "aten.arange.start": lambda args: (*args[:2], 1),
    "aten.arange.start_step": lambda args: args[:3],
}
SPLITS = ("aten.split.Tensor", "aten.split_copy.Tensor", "aten.unsafe_split.Tensor")


def read_positions(call: Call) -> Any:
    """One of `NAMES`. Positions that follow from data count from the start, and bounds of slices are
    within the tensor."""
    tensor, dim, *bounds = call.args
    if not any(_follows_from_data(bound) for bound in bounds[:2]):
        return call.emit()
    importer, size_of = call.reader.importer, call.reader.known
    base, result = call.operands[0].meta["val"], call.examples
    at = dim % tensor.type.rank
    size = tensor.type.dims[at]
    if call.name == "aten.select.int":
        first = _counted(bounds[0], size)
        bounds = [first]
        importer.check(first, ">=", 0, "an index is below the first element")
        importer.check(first, "<=", size - 1, "an index is above the last element")
    else:
        start, end, step = bounds
        first = _within(0 if start is None else start, size)
        last = _within(size if end is None else end, size)
        count = _dims.ceil_div(_dims.maximum(last - first, 0), step)
        count = size_of(result.shape[at], count)
        bounds = [first, first + count * step, step]
    offset, stride = size_of(base.storage_offset()), size_of(base.stride(at))
    size_of(result.storage_offset(), offset + first * stride)
    return call.emit((tensor, dim, *bounds))


def _follows_from_data(position: Any) -> bool:
    return any(not symbol.is_size for symbol in _dims.symbols(position or 0))


def _counted(position: Size, size: Size) -> Size:
    """A position that may count from the end, as one that counts from the start."""
    return position + size * indicator(position, "<", 0)


def _within(position: Size, size: Size) -> Size:
    return _dims.minimum(_dims.maximum(_counted(position, size), 0), size)


def read_split(call: Call) -> Any:
    """One of `SPLITS`. By a size of the call, it is an operator that takes the lengths of its pieces.
    torch has traced how many there are."""
    tensor, step, *others = call.args
    if not isinstance(step, Dim):
        return call.emit()
    dim, count = operator.index(others[0]) if others else 0, len(call.examples)
    last = tensor.type.dims[dim] - step * (count - 1)
    lengths = (*(step,) * (count - 1), last)
    return call.emit((tensor, lengths, dim), "aten.split_with_sizes.default")


def read_steps(call: Call) -> Any:
    """One of `STEPS`, also of numbers on the device."""
    start, end, step = STEPS[call.name](call.args)
    reader, example = call.reader, call.examples
    kinds = (Value, float) if counts_real_steps(example.dtype) else Value
    if not any(isinstance(number, kinds) for number in (start, end, step)):
        return call.emit()
    source, (count,) = path_of(call.node), example.shape
    steps = functools.partial(numbers.steps, reader.importer, start, end, step, source)
    if not isinstance(count, int):
        count = reader.rounded("ceil", steps, count, source)
    type = TensorType(reader.dtype(example.dtype), (count,))
    return numbers.in_steps(reader.importer, start, step, type, source)


@functools.cache
def counts_real_steps(dtype: Any) -> bool:
    """Whether `torch.arange` of a dtype cuts off its elements, but counts the steps between real
    numbers. Before torch 2.14, that of int64 cut off the numbers first."""
    import torch

    return dtype is torch.int64 and torch.arange(-1.25, 7, 2, dtype=dtype).numel() == 5

"""Positions along a dim that are sizes of a call or follow from data, such as `x[n.item():]`.

torch does not know the signs of the latter. For such a slice it makes new symbols: of its size, and
of the offset of the result in memory.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from purevk.frontends.importer import Importer
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.ir.relations import indicator

NAMES = ("aten.select.int", "aten.slice.Tensor")
# Start, end and step of numbers in steps, from the arguments.
STEPS: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
    "aten.arange.default": lambda args: (0, args[0], 1),
    "aten.arange.start": lambda args: (*args[:2], 1),
    "aten.arange.start_step": lambda args: args[:3],
}
SPLITS = ("aten.split.Tensor", "aten.split_copy.Tensor", "aten.unsafe_split.Tensor")


def from_start(
    importer: Importer,
    size_of: Callable[..., Size],
    name: str,
    args: Sequence[Any],
    base: Any,
    result: Any,
) -> tuple[Any, ...]:
    """The arguments of one of `NAMES`. Positions that follow from data count from the start, and
    bounds of slices are within the tensor.

    Args:
        size_of: see `NodeReader.known`.
        base, result: what torch traced for the tensor and for the result.
    """
    tensor, dim, *bounds = args
    if not any(_follows_from_data(bound) for bound in bounds[:2]):
        return tuple(args)
    at = dim % tensor.type.rank
    size = tensor.type.dims[at]
    if name == "aten.select.int":
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
    return (tensor, dim, *bounds)


def _follows_from_data(position: Any) -> bool:
    return any(not symbol.is_size for symbol in _dims.symbols(position or 0))


def _counted(position: Size, size: Size) -> Size:
    """A position that may count from the end, as one that counts from the start."""
    return position + size * indicator(position, "<", 0)


def _within(position: Size, size: Size) -> Size:
    return _dims.minimum(_dims.maximum(_counted(position, size), 0), size)


def with_lengths(args: Sequence[Any], count: int) -> tuple[str, tuple[Any, ...]]:
    """One of `SPLITS` by a size of the call, as an operator that takes the lengths of its `count`
    pieces. torch has traced how many there are."""
    tensor, step, *others = args
    dim = operator.index(others[0]) if others else 0
    last = tensor.type.dims[dim] - step * (count - 1)
    return "aten.split_with_sizes.default", (tensor, (*(step,) * (count - 1), last), dim)


@functools.cache
def counts_real_steps(dtype: Any) -> bool:
    """Whether `torch.arange` of a dtype cuts off its elements, but counts the steps between real
    numbers. Before torch 2.14, that of int64 cut off the numbers first."""
    import torch

    return dtype is torch.int64 and torch.arange(-1.25, 7, 2, dtype=dtype).numel() == 5

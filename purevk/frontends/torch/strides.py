"""Tensors that a program reads by their strides. In the IR, every value is dense and row-major; torch
may keep it in another order of its dims, or as a part of a larger tensor."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from purevk.errors import UnsupportedProgramError
from purevk.frontends.result_types import OpenType
from purevk.frontends.source_lines import path_of
from purevk.ir import Value

if TYPE_CHECKING:
    from purevk.frontends.torch.nodes import Call


def read_stride(call: Call) -> Any:
    """A stride, or where a tensor starts in memory."""
    # torch 2.11 asserts that it is not negative, and no more.
    asserted = all(user.target is operator.ge and user.args[1] == 0 for user in call.node.users)
    return 0 if asserted else call.reader.known(call.examples)


STRIDED = tuple(f"aten.as_strided{kind}.default" for kind in ("", "_", "_copy", "_scatter"))


def read_strided(call: Call) -> Any:
    """One of `STRIDED`. It reads from the tensor with its dims in the order in which torch keeps them."""
    return call.emit((_in_memory_order(call), *call.args[1:]))


def _in_memory_order(call: Call) -> Value:
    """What `aten.as_strided` reads from.

    Raises:
        UnsupportedProgramError: torch keeps the tensor as a part of a larger one, or repeats elements.
    """
    from torch._prims_common import is_contiguous_or_false
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    node, reader = call.node, call.reader
    tensor: Value = call.args[0]
    source = node.args[0]
    example = source.meta.get("val")
    if example is None:
        return tensor
    whole = guard_or_false(example.storage_offset() == 0)
    if whole and is_contiguous_or_false(example):
        return tensor
    reads = not node.target._opname.startswith("as_strided_scatter")
    order = _order(example) if whole and reads else None
    if order is None:
        raise UnsupportedProgramError(
            f"{node.name} takes elements by the strides of a view",
            where=f"{reader.importer.where}, {node.name}",
            why=f"{source.name} has the strides {list(example.stride())} at offset"
            f" {example.storage_offset()}, and is no dense tensor to read; values on the device are"
            " dense and row-major",
            next="call contiguous() before as_strided, or index the tensor",
        )
    sizes = tuple(reader.recorded(example.shape[dim]) for dim in order)
    types = [OpenType(tensor.type.dtype, sizes)]
    (permuted,) = reader.importer.emit(
        "aten.permute.default", (tensor, order), types, [False], path_of(node), exact=True
    )
    return permuted


BAGS = ("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
_PADDING = 8  # of their arguments
_NO_ROW = 2**31 - 1


def read_bags(call: Call) -> Any:
    """One of `BAGS`. Torch's fast kernels take tables with dense rows and dense weights alone. Its
    others end the last bag otherwise, and return for each entry its bag. They run where a row is
    padding, too: with one that no index has, the definition does as they do."""
    args, traced = call.args, call.node.args
    operands = [(traced[0], 1), *((arg, 0) for arg in traced[6:7] if arg is not None)]
    if args[_PADDING] >= 0 or all(
        operand.meta["val"].stride(dim) == 1 for operand, dim in operands
    ):
        return call.emit()
    return call.emit((*args[:_PADDING], _NO_ROW))


def _order(example: Any) -> tuple[int, ...] | None:
    """The dims of a tensor from the outermost in memory on. None if there are gaps, or if torch does
    not know."""
    sizes, strides = example.shape, example.stride()
    if not all(isinstance(number, int) for number in (*sizes, *strides)):
        return None
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], sizes[dim] == 1, dim))
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step:
            return None
        step *= sizes[dim]
    return tuple(order)

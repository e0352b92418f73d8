"""Tensors that a program reads by their strides. In the IR, every value is dense and row-major; torch
may keep it in another order of its dims, or as a part of a larger tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from purevk.errors import UnsupportedProgramError
from purevk.frontends.importer import Importer
from purevk.frontends.result_types import OpenType
from purevk.ir import Value


def in_memory_order(
    importer: Importer, node: Any, tensor: Value, size_of: Callable[[Any], Any], path: str
) -> Value:
    """What `aten.as_strided` reads from: the tensor, with its dims in the order in which torch keeps
    them.

    Args:
        node: of `as_strided`. `path`: where it is in the module.
        tensor: its first argument.
        size_of: the size of a dim that torch traced.

    Raises:
        UnsupportedProgramError: torch keeps the tensor as a part of a larger one, or repeats elements.
    """
    from torch._prims_common import is_contiguous_or_false
    from torch.fx.experimental.symbolic_shapes import guard_or_false

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
            where=f"{importer.where}, {node.name}",
            why=f"{source.name} has the strides {list(example.stride())} at offset"
            f" {example.storage_offset()}, and is no dense tensor to read; values on the device are"
            " dense and row-major",
            next="call contiguous() before as_strided, or index the tensor",
        )
    open_type = OpenType(tensor.type.dtype, tuple(size_of(example.shape[dim]) for dim in order))
    return importer.emit(
        "aten.permute.default", (tensor, order), [open_type], [False], path, exact=True
    )[0]


BAGS = ("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
_PADDING = 8  # of their arguments
_NO_ROW = 2**31 - 1


def with_kernel_of_bags(node: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of bags of embeddings. Torch's fast kernels take tables with dense rows and dense
    weights alone. Its others end the last bag otherwise, and return for each entry its bag. They run
    where a row is padding, too: with one that no index has, the definition does as they do."""
    operands = [(node.args[0], 1), *((arg, 0) for arg in node.args[6:7] if arg is not None)]
    if args[_PADDING] >= 0 or all(
        operand.meta["val"].stride(dim) == 1 for operand, dim in operands
    ):
        return tuple(args)
    return (*args[:_PADDING], _NO_ROW)


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

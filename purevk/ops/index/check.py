"""Checks of indices on the device, and assertions of the model: the kernel `purevk.check_index`."""

from __future__ import annotations

from dataclasses import replace

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.lowering import Binding, IndexCheck, Lowering
from purevk.lower.rows import collapse
from purevk.ops.builder import Builder
from purevk.ops.registry import Kernel, ShapeError, define, rewrite
from purevk.ops.shapes import is_empty
from purevk.ops.signatures import signature

NAME = "purevk.check_index"
ASSERT = "aten._assert_async.msg"
_ITEMS = 8


@signature("index, lowest: Size, below: Size, op, source, given=False, message=''")
def _shape(index: TensorType) -> None:
    """No result: the host reads the note of the kernel. `given`: the index is an input of the call,
    which the host compares if it is there. `message`: see `IndexCheck`."""
    if index.dtype not in (DType.int32, DType.int64):
        raise ShapeError(f"an index of {index.dtype.name}")


def _lower(lowering: Lowering, node: Node) -> None:
    index = lowering.operand(node.tensor("index"))
    if is_empty(index.type):
        return
    loop, strides = _walk(index.dims, index.strides)
    if len(loop) > 4:
        index = dense(lowering, index)
        loop, strides = _walk(index.dims, index.strides)
    count = _dims.product(loop)
    given = node.bool("given")
    note = lowering.note(IndexCheck(node.str("op"), node.str("source"), node.str("message")))
    params: dict[str, Size] = {
        "count": count,
        "lowest": node.size("lowest"),
        "below": node.size("below"),
        "offset": index.offset,
        **{f"stride_{d}": stride for d, stride in enumerate(strides)},
        **{f"size_{d}": size for d, size in enumerate(loop[:-1])},
    }
    wide = index.dtype is DType.int64
    words = 2 if wide and lowering.traits.profile.prefers_word_access else 1
    local = min(64, lowering.traits.max_invocations)
    lowering.dispatch(
        "index/check.comp",
        {"index": index, "note": note, "flag": note if lowering.states else None},
        params,
        {
            "DIMS": len(loop),
            "T_INDEX": "int" if words > 1 else index.dtype.glsl,
            "INDEX_WORDS": words,
            **({"HAS_INT64": 1} if wide and words == 1 else {}),
            "ITEMS": _ITEMS,
        },
        local=local,
        grid=lowering.linear_grid(count, local * _ITEMS),
        nbytes=count * index.dtype.itemsize,
        external=given,
        specialize=(),
    )
    if lowering.states:
        made = lowering.dispatches[-1]
        bindings = (*made.bindings[:2], Binding(note.storage, True, "flag"))
        lowering.dispatches[-1] = replace(made, bindings=bindings)


def _walk(dims: tuple[Size, ...], strides: tuple[Size, ...]) -> tuple[list[Size], list[Size]]:
    """The dims to go over, innermost first, with their strides. Dims along which all elements are
    one are left out."""
    own = [d for d, stride in enumerate(strides) if not (isinstance(stride, int) and stride == 0)]
    loop, (steps,) = collapse([dims[d] for d in own], [strides[d] for d in own])
    return loop[::-1] or [1], steps[::-1] or [0]


define(NAME, _shape, Kernel(_lower))


def _assert_shape(
    x: TensorType, assert_msg: str = "Expected Tensor with single nonzero value, but got zero"
) -> None:
    """No result: the call raises if `x`, a tensor of one element, is zero."""
    if isinstance(x.numel, int) and x.numel != 1:
        raise ShapeError(f"an assertion of {x.numel} elements")


def check(
    builder: Builder, node: Node, x: Value, lowest: Size, below: Size, message: str, op: str = ""
) -> None:
    """Has calls raise `message` if an element of x, int32 or int64, is not within lowest .. below - 1.

    Args:
        op: the operator that takes the elements; "": the model asserts it.
    """
    builder.emit_all(NAME, x, lowest, below, op, node.source, False, message)


@rewrite(ASSERT, _assert_shape, "aten._assert_async.default")
def _assert(builder: Builder, node: Node, x: Value, assert_msg: str) -> None:
    fails = builder.aten.logical_not(x)
    fails = builder.aten._to_copy(fails, DType.int32)
    check(builder, node, fails, 0, 1, assert_msg)

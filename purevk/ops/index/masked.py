"""Writes of the elements of a tensor, in their order, where a mask is true."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.elements import acc_of, conversions
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import gcd4
from purevk.ops.builder import Builder
from purevk.ops.index.check import check
from purevk.ops.map import mapped
from purevk.ops.registry import Kernel, define, rewrite
from purevk.ops.shapes import broadcast, is_empty
from purevk.tuning import DeviceTraits

NAME = "purevk.masked_scatter"
_MOST_BLOCKS = 16384  # each adds up the counts of those before it


def _local(traits: DeviceTraits) -> int:
    return min(256, traits.max_invocations)


def _lower(lowering: Lowering, node: Node) -> None:
    x, mask, source = (lowering.operand(node.tensor(name)) for name in ("x", "mask", "source"))
    out, traits = lowering.operand(node.result), lowering.traits
    if is_empty(out.type):
        return
    x, mask, source = (
        each if each.layout.is_contiguous(each.dims) else dense(lowering, each)
        for each in (x, mask, source)
    )
    count, local = out.dims[0], _local(traits)
    subgroup = (
        traits.has("subgroup_arithmetic", "subgroup_basic") and local % traits.subgroup_size == 0
    )
    words = all(_dims.gcd_of(number) % 16 == 0 for number in (count, mask.offset))
    vector = out.dtype in (DType.float32, DType.float16, DType.int32) and gcd4(
        count, x.offset, out.offset
    )
    blocks = _dims.ceil_div(count, 16 * local)
    counts = lowering.temporary(TensorType(DType.int32, (blocks,)))
    macros: dict[str, str | int] = {
        **conversions(out.dtype, out.dtype, acc_of(out.dtype)),
        "LOCAL": local,
        "SUBGROUP": int(subgroup),
        "WORDS": int(words),
        "VEC4": int(vector),
    }
    grid = lowering.linear_grid(blocks, 1)
    offsets = {"x_offset": x.offset, "source_offset": source.offset, "out_offset": out.offset}
    for counting, tensors in ((1, {}), (0, {"x": x, "source": source, "out": out})):
        lowering.dispatch(
            "index/masked.comp",
            {"mask": mask, "counts": counts, **tensors},
            {**offsets, "elements": count, "source_length": source.dims[0]},
            {**macros, "COUNT": counting},
            local=local,
            grid=grid,
            flops=count,
            specialize=(),
        )


define(NAME, lambda x, mask, source: x, Kernel(_lower))


def check_count(
    builder: Builder, node: Node, mask: Value, least: Size, below: Size, message: str
) -> None:
    """Has calls raise `message` if `mask` (bool) has fewer true elements than `least`, or `below` and
    more."""
    count = builder.aten.sum.dim_IntList(mask, dim=None, keepdim=False, dtype=DType.int32)
    check(builder, node, count, least, below, message, node.op)


@rewrite(
    "aten.masked_scatter.default", lambda x, mask, source: x.with_dims(broadcast(x.dims, mask.dims))
)
def _masked_scatter(builder: Builder, node: Node, x: Value, mask: Value, source: Value) -> Value:
    sizes, values = broadcast(x.type.dims, mask.type.dims), source.type.numel
    if not (isinstance(values, int) and _dims.upper(_dims.product(sizes)) <= values):
        wide = builder.aten.expand(mask, sizes)
        wrong = "the mask has more true elements than the source has elements"
        check_count(builder, node, wide, 0, values + 1, wrong)
    return put_by_mask(builder, x, mask, source)


def put_by_mask(builder: Builder, x: Value, mask: Value, source: Value) -> Value:
    """x with the elements of `source`, in their order, where `mask` (bool) is true."""
    sizes = broadcast(x.type.dims, mask.type.dims)
    count = _dims.product(sizes)
    wide = builder.aten.expand(mask, sizes)
    flat = builder.aten.view(wide, (count,))
    picked = builder.aten.view(source, (source.type.numel,))
    whole = builder.aten.view(builder.aten.expand(x, sizes), (count,))
    traits = builder.traits
    most = _MOST_BLOCKS * 16 * _local(traits)
    if traits.profile.has_fast_shared_memory and _dims.upper(count) <= most:
        return builder.aten.view(builder.emit(NAME, whole, flat, picked), sizes)
    before = builder.aten.cumsum(flat, dim=0, dtype=DType.int32)
    body = "r = X(i0); if (MASK(i0) != 0) r = SOURCE(min(BEFORE(i0) - 1, source_size_0 - 1));"
    inputs = {"X": whole, "MASK": flat, "BEFORE": before, "SOURCE": picked}
    made = mapped(builder, body, inputs, TensorType(x.type.dtype, (count,)))
    return builder.aten.view(made, sizes)


MASKS = (DType.bool, DType.uint8)


def is_mask(index: Value | None) -> bool:
    """Whether an index chooses by truth rather than by number."""
    return index is not None and index.type.dtype in MASKS

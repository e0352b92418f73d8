"""Reading elements at indices: the kernel `purevk.gather`, index_select, gather, index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.map import MapSpec, emit_map
from purevk.lower.numbers import gcd4
from purevk.lower.rows import collapse
from purevk.ops.builder import Builder
from purevk.ops.facts import Moves
from purevk.ops.index.data_dependent import index_by_mask, masked_types
from purevk.ops.index.masked import MASKS, is_mask
from purevk.ops.registry import Kernel, ShapeError, UnknownSizes, define, rewrite_node
from purevk.ops.shapes import broadcast, is_empty, wrap
from purevk.tuning import DeviceProfile, DeviceTraits

NAME = "purevk.gather"
_MOST_PARTS = 32  # of a tensor, which each workgroup goes through


@dataclass(frozen=True)
class GatherDims:
    """Which dims a gather reads along.

    Attributes:
        x: for each dim of the result, the dim of x with the same coordinate, or None.
        index: for each dim of the result, the dim of the (broadcast) indices with the same
            coordinate, counted from the end, or None.
        selected: for each index tensor, the dim of x whose coordinate it gives.
    """

    x: tuple[int | None, ...]
    index: tuple[int | None, ...]
    selected: tuple[int, ...]


def _gather_shape(
    x: TensorType, indices: Sequence[TensorType], sizes: Sequence[Size], dims: GatherDims
) -> TensorType:
    return x.with_dims(sizes)


def _lower(lowering: Lowering, node: Node) -> None:
    x, out = lowering.operand(node.tensor("x")), lowering.operand(node.result)
    sizes, dims = node.sizes("sizes"), node.attribute("dims", GatherDims)
    if is_empty(out.type):
        return
    indices = [lowering.operand(value) for value in node.tensors("indices")]
    x_strides = [0 if d is None else x.strides[d] for d in dims.x]
    index_strides = [[_index_stride(index, d) for d in dims.index] for index in indices]
    loop, (mine, *theirs) = collapse(sizes, x_strides, *index_strides)
    large = any(map(lowering.is_large, (x, *indices, out)))
    if large or len(loop) > 4 or len(indices) > 4 or len({index.dtype for index in indices}) > 1:
        _gather_general(lowering, x, indices, out, dims)
        return
    if len(indices) == 1 and _gather_rows(
        lowering, x, indices[0], out, loop, mine, theirs[0], dims.selected[0]
    ):
        return
    loop, mine, theirs = (
        list(reversed(loop)) or [1],
        list(reversed(mine)) or [0],
        [list(reversed(t)) or [0] for t in theirs],
    )
    vector = (
        isinstance(mine[0], int)
        and mine[0] == 1
        and all(isinstance(t[0], int) and t[0] == 0 for t in theirs)
        and x.dtype in (DType.float32, DType.float16, DType.int32)
        and gcd4(loop[0], x.offset, out.offset, *mine[1:], *(x.strides[d] for d in dims.selected))
    )
    params: dict[str, Size] = {
        "outputs": out.type.numel,
        **{f"size_{d}": size for d, size in enumerate(loop[:-1])},
        **{f"x_stride_{d}": stride for d, stride in enumerate(mine)},
    }
    for k, (index, strides, dim) in enumerate(zip(indices, theirs, dims.selected)):
        params |= {
            f"offset_i{k}": index.offset,
            f"limit_i{k}": x.dims[dim],
            f"step_i{k}": x.strides[dim],
            **{f"stride_i{k}_{d}": stride for d, stride in enumerate(strides)},
        }
    count = out.type.numel
    work = _ceil4(count) if vector else count
    profile = lowering.traits.profile
    parts = 1 if vector else _parts(profile, x, loop, mine[0], count)
    items = lowering.items_per_thread(work, 32 if parts > 1 else 2 if vector else 8)
    parts = parts if items > 1 else 1
    local = 64 if items == 1 else min(256, lowering.traits.max_invocations)
    words = 2 if profile.prefers_word_access and indices[0].dtype is DType.int64 else 1
    lowering.dispatch(
        "index/gather.comp",
        {"x": x, **{f"index_{k}": index for k, index in enumerate(indices)}, "out": out},
        params,
        {
            "DIMS": max(len(loop), 1),
            "INDICES": len(indices),
            "T_INDEX": "int" if words > 1 else indices[0].dtype.glsl,
            "VEC4": int(vector),
            "ITEMS": items,
            "INDEX_WORDS": words,
            "PARTS": parts,
            "PART": (profile.cached_bytes // x.dtype.itemsize).bit_length() - 1,
        },
        local=local,
        # Push constants have too few words for the parameters of the fourth index.
        always=[name for name in params if "_i3" in name],
        grid=lowering.linear_grid(work, local * items),
        nbytes=2 * count * x.dtype.itemsize
        + sum((i.type.numel * i.dtype.itemsize for i in indices), 0),
    )


def _parts(
    profile: DeviceProfile, x: Operand, loop: Sequence[Size], stride: Size, count: Size
) -> int:
    """Into how many parts x is divided. A GPU picks elements from one part after the other. Picked
    from the whole of a large tensor, each element would move a sector of memory. The elements of a
    part are in a cache, because most workgroups read the same part at the same time."""
    nbytes = x.type.nbytes
    if len(loop) != 1 or not (isinstance(stride, int) and stride == 0 and isinstance(nbytes, int)):
        return 1
    parts = -(-nbytes // profile.cached_bytes)
    enough = _dims.hint(count) * profile.sector_bytes >= 2 * nbytes
    return parts if 4 <= parts <= _MOST_PARTS and enough else 1


def _gather_rows(
    lowering: Lowering,
    x: Operand,
    index: Operand,
    out: Operand,
    loop: list[Size],
    mine: list[Size],
    theirs: list[Size],
    selected: int,
) -> bool:
    """Appends `gather_rows.comp` if a GPU picks many elements from each of many short rows. Returns
    whether it does."""
    traits, length = lowering.traits, x.dims[selected]
    if (
        not traits.profile.has_fast_shared_memory
        or len(loop) != 2
        or x.dtype.itemsize != 4
        or not isinstance(length, int)
        or x.strides[selected] != 1
    ):
        return False
    padded = (length + 3) // 4 * 4
    if mine[1] != 0 or 4 * padded > traits.max_shared_memory or length < 32:
        return False
    if _dims.hint(loop[0]) < traits.processors or _dims.hint(loop[1]) < max(length // 2, 128):
        return False
    vector = gcd4(length, x.offset, mine[0])
    local = min(256, traits.max_invocations)
    params = {
        "rows": loop[0],
        "columns": length,
        "outputs": loop[1],
        "x_stride": mine[0],
        "index_row": theirs[0],
        "index_column": theirs[1],
    }
    lowering.dispatch(
        "index/gather_rows.comp",
        {"x": x, "index": index, "out": out},
        params,
        {
            "VEC4": int(vector),
            "COLUMNS": padded,
            **({"HAS_INT64": "1"} if index.dtype is DType.int64 else {}),
        },
        local=local,
        grid=lowering.linear_grid(loop[0], 1),
        nbytes=(loop[0] * length + out.type.numel) * 4 + index.type.numel * index.dtype.itemsize,
    )
    return True


def _gather_general(
    lowering: Lowering,
    x: Operand,
    indices: Sequence[Operand],
    out: Operand,
    dims: GatherDims,
) -> None:
    """Any number of dims and of indices."""
    at = {d: f"i{n}" for n, d in enumerate(dims.x) if d is not None}
    for k, (index, dim) in enumerate(zip(indices, dims.selected)):
        rank = len(index.dims)
        here = [
            next((f"i{n}" for n, d in enumerate(dims.index) if d == rank - m), "0")
            if index.dims[m] != 1
            else "0"
            for m in range(rank)
        ]
        at[dim] = f"pv_index(INDEX{k}({', '.join(here) or '0'}), x_size_{dim})"
    names = tuple(f"INDEX{k}" for k in range(len(indices)))
    body = f"r = X({', '.join(at[d] for d in range(len(x.dims))) or '0'});"
    emit_map(lowering, MapSpec(body, ("X", *names)), [x, *indices], {}, [out])


def _ceil4(count: Size) -> Size:
    return _dims.ceil_div(count, 4)


def _index_stride(index: Operand, d: int | None) -> Size:
    if d is None or d > len(index.dims):
        return 0
    size = index.dims[-d]
    return 0 if isinstance(size, int) and size == 1 else index.strides[-d]


define(NAME, _gather_shape, Kernel(_lower, windows=lambda node: True), moves=Moves.SOME)


def refuse_index(node: Node, traits: DeviceTraits) -> str | None:
    for value in node.inputs[1:]:
        if value.type.dtype not in (DType.int32, DType.int64):
            return f"no kernel for indices of {value.type.dtype.name}"
    return None


def _index_select_shape(x: TensorType, dim: int, index: TensorType) -> TensorType:
    at = wrap(dim, x.rank)
    if not x.rank:
        return x
    length = index.dims[0] if index.rank else 1
    return x.with_dims((*x.dims[:at], length, *x.dims[at + 1 :]))


@rewrite_node(
    "aten.index_select.default", _index_select_shape, supports=refuse_index, moves=Moves.SOME
)
def _expand_index_select(builder: Builder, node: Node) -> Value:
    x = node.tensor("x")
    rank = x.type.rank
    if not rank:
        return builder.aten.alias(x)
    at = wrap(node.int("dim"), rank)
    return _gathered(builder, node, at, tuple(1 if d == at else None for d in range(rank)))


def _gathered(builder: Builder, node: Node, at: int, dims: tuple[int | None, ...]) -> Value:
    """The elements of x whose coordinate along the dim `at` is that of an index, which has `dims`."""
    x, index = node.tensor("x"), node.tensor("index")
    kept = tuple(None if d == at else d for d in range(x.type.rank))
    return builder.emit(NAME, x, (index,), node.result.type.dims, GatherDims(kept, dims, (at,)))


def _gather_aten_shape(
    x: TensorType, dim: int, index: TensorType, sparse_grad: bool = False
) -> TensorType:
    wrap(dim, x.rank)
    return x.with_dims(index.dims)


@rewrite_node("aten.gather.default", _gather_aten_shape, supports=refuse_index, moves=Moves.SOME)
def _expand_gather(builder: Builder, node: Node) -> Value:
    x, index = node.tensor("x"), node.tensor("index")
    if not x.type.rank or not index.type.rank:
        flat = [builder.aten.view(value, (value.type.numel,)) for value in (x, index)]
        made = builder.aten.index_select(flat[0], dim=0, index=flat[1])
        return builder.aten.view(made, index.type.dims)
    rank = x.type.rank
    return _gathered(builder, node, wrap(node.int("dim"), rank), tuple(range(rank, 0, -1)))


class _Indexed(NamedTuple):
    """The sizes of `x[indices]`, and how a gather reads it."""

    sizes: tuple[Size, ...]
    dims: GatherDims


def _indexed(x: TensorType, indices: Sequence[TensorType | None]) -> _Indexed:
    """How the result of `x[indices]` relates to x. A dim whose index is None is kept."""
    given = [d for d, index in enumerate(indices) if index is not None]
    shape = broadcast(*(index.dims for index in indices if index is not None))
    adjacent = given == list(range(given[0], given[0] + len(given)))
    rest = [d for d in range(x.rank) if d not in given]
    if adjacent:
        before, after = [d for d in rest if d < given[0]], [d for d in rest if d > given[0]]
    else:
        before, after = [], rest
    dims = GatherDims(
        x=(*before, *([None] * len(shape)), *after),
        index=(*([None] * len(before)), *range(len(shape), 0, -1), *([None] * len(after))),
        selected=tuple(given),
    )
    return _Indexed((*(x.dims[d] for d in before), *shape, *(x.dims[d] for d in after)), dims)


def _index_shape(x: TensorType, indices: Sequence[TensorType | None]) -> TensorType:
    if len(indices) > x.rank:
        raise ShapeError(f"{len(indices)} indices for rank {x.rank}")
    if any(index is not None and index.dtype in MASKS for index in indices):
        raise UnknownSizes(
            "the sizes of a boolean index are known only at a call", masked_types(x, indices)
        )
    return x.with_dims(_indexed(x, indices).sizes)


def _refuse_index_tensor(node: Node, traits: DeviceTraits) -> str | None:
    given = [index for index in node.optional_tensors("indices") if index is not None]
    if not given:
        return "no index"
    if not any(is_mask(index) for index in given):
        return refuse_index(node, traits)
    return "no kernel for a boolean index among others" if len(given) > 1 else None


@rewrite_node("aten.index.Tensor", _index_shape, supports=_refuse_index_tensor, moves=Moves.SOME)
def _expand_index(builder: Builder, node: Node) -> Value | tuple[Value, ...]:
    x, indices = node.tensor("x"), node.optional_tensors("indices")
    if any(is_mask(index) for index in indices):
        return index_by_mask(builder, node, x, indices)
    chosen = [index for index in indices if index is not None]
    if len({index.type.dtype for index in chosen}) > 1:
        chosen = [builder.aten._to_copy(index, DType.int64) for index in chosen]
    types = [None if index is None else index.type for index in indices]
    sizes, dims = _indexed(x.type, types)
    return builder.emit(NAME, x, tuple(chosen), sizes, dims)

"""The first elements of rows, or those of a rank, without sorting the rows (`select.comp`)."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, emit_copy
from purevk.lower.declared import AUTO
from purevk.lower.elements import acc_of, conversions
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4, power_of_two
from purevk.lower.rows import by_dim, collapse
from purevk.ops.builder import Builder
from purevk.ops.registry import Kernel, define
from purevk.ops.shapes import is_empty
from purevk.tuning import DeviceTraits

NAME = "purevk.select"
RANKS = ("first", "kth", "median", "nanmedian")
# Elements that an invocation keeps if few are wanted. Then hardly any is read twice.
_ITEMS_OF_FEW = 32
_FEW = 64  # elements that are sorted by comparing all pairs


class _Work:
    """How many invocations take a row, and what they keep in shared memory. `fits`: whether there
    is enough shared memory."""

    def __init__(
        self, traits: DeviceTraits, length: int, count: int, wide: bool, rank: str = "first"
    ) -> None:
        profile = traits.profile
        smallest = max(32, traits.subgroup_size)
        largest = min(
            profile.max_select_workgroup,
            1024 if traits.max_shared_memory >= 32768 else 256,
            traits.max_invocations,
        )
        # With four times as many groups as wanted elements, hardly more elements than are wanted
        # are up to the bound that the groups give.
        groups = max(32, power_of_two(4 * count))
        few = groups <= 128 and not wide and profile.has_fast_shared_memory
        most = _ITEMS_OF_FEW if few else profile.max_select_items
        self.local = max(min(power_of_two(-(-length // most)), largest), min(smallest, largest))
        self.per = max(min(power_of_two(-(-length // self.local)), most), 4)
        self.cached = length <= self.local * self.per
        self.subgroup = (
            traits.has("subgroup_arithmetic", "subgroup_basic")
            and self.local % traits.subgroup_size == 0
        )
        self.limit = _FEW if self.local >= 128 else _FEW // 4
        self.bitonic = count > _FEW
        self.groups = groups if rank == "first" and few and groups <= self.local else 0
        self.bins = max(min(4 * self.local, 1024), self.local)
        self.list = (
            power_of_two(count + self.limit) if self.bitonic else count + self.limit + -count % 4
        )
        if self.bitonic:
            self.limit = self.list - count
        shared = 4 * (self.local + self.bins + self.groups) + self.list * (12 if wide else 8) + 64
        self.fits = shared <= traits.max_shared_memory


def can_select(traits: DeviceTraits, x: TensorType, dim: int, count: Size) -> bool:
    """Whether this kernel suits the `count` first elements along a dim."""
    length = _dims.upper(x.dims[dim])
    if (
        not isinstance(count, int)
        or count > 1024
        or length <= traits.profile.max_counted_row
        or 2 * count > length
    ):
        return False
    wide = x.dtype.acc == "int64_t"
    return _Work(traits, length, count, wide).fits and not reads_too_long(traits, length, wide)


def reads_too_long(traits: DeviceTraits, length: int, wide: bool) -> bool:
    """Whether a device may end the kernel before it has read rows of a length, up to 18 times."""
    work = _Work(traits, length, 1, wide)
    return (19 if wide else 15) * (length // (work.local * work.per) + 20) > traits.max_iterations


def emit_select(
    lowering: Lowering,
    x: Operand,
    values: Operand,
    indices: Operand,
    dim: int,
    descending: bool,
    count: Size,
    rank: str = "first",
) -> None:
    """The `count` first elements along a dim in their order, with their indices, or (another of
    `RANKS`) the one of a rank."""
    traits, length = lowering.traits, x.dims[dim]
    parts = _parts(traits, x, dim, count) if rank == "first" else 1
    if parts > 1:
        # The first elements of parts of the rows, and then the first of these. Both keep the order
        # of the indices.
        part = -(-length // parts)
        rows = _dims.product(size for d, size in enumerate(x.dims) if d != dim)
        rest = tuple(size for d, size in enumerate(x.dims) if d != dim)
        some = (
            lowering.temporary(TensorType(x.dtype, (*rest, parts * count))),
            lowering.temporary(TensorType(DType.int32, (*rest, parts * count))),
        )
        back = [*range(dim), len(rest), *range(dim, len(rest))]
        moved = [_permuted(each, back) for each in some]
        _emit(lowering, x, None, moved[0], moved[1], dim, descending, count, rank, parts, part)
        _emit(
            lowering,
            moved[0],
            Operand(
                some[1].storage, some[1].layout, TensorType(DType.int32, (rows, parts * count))
            ),
            values,
            indices,
            dim,
            descending,
            count,
            rank,
        )
        return
    _emit(lowering, x, None, values, indices, dim, descending, count, rank)


def _parts(traits: DeviceTraits, x: Operand, dim: int, count: Size) -> int:
    """Into how many parts rows are cut if they are long, and too few to keep the device busy."""
    length, numel = x.dims[dim], x.type.numel
    if (
        not traits.profile.needs_many_invocations
        or not isinstance(numel, int)
        or not isinstance(length, int)
        or not isinstance(count, int)
        or length < 4 * traits.profile.select_part_elements
    ):
        return 1
    rows = numel // length
    parts = min(
        length // max(traits.profile.select_part_elements, 4 * count),
        -(-2 * traits.processors // rows),
    )
    return parts if parts > 1 and length - (parts - 1) * -(-length // parts) >= count else 1


def _permuted(operand: Operand, order: list[int]) -> Operand:
    strides, sizes = operand.strides, operand.dims
    layout = Layout(operand.offset, tuple(strides[d] for d in order))
    return Operand(
        operand.storage, layout, TensorType(operand.dtype, tuple(sizes[d] for d in order))
    )


def _emit(
    lowering: Lowering,
    x: Operand,
    source_indices: Operand | None,
    values: Operand,
    indices: Operand,
    dim: int,
    descending: bool,
    count: Size,
    rank: str,
    parts: int = 1,
    part: Size | None = None,
) -> None:
    traits, dtype = lowering.traits, x.dtype
    rest = [d for d in range(len(x.dims)) if d != dim]
    loop, strides = collapse(
        [x.dims[d] for d in rest],
        *([each.strides[d] for d in rest] for each in (x, values, indices)),
    )
    if len(loop) > 4:
        x = dense(lowering, x)
        values_copy, indices_copy = (
            lowering.temporary(values.type),
            lowering.temporary(indices.type),
        )
        _emit(
            lowering,
            x,
            source_indices,
            values_copy,
            indices_copy,
            dim,
            descending,
            count,
            rank,
            parts,
            part,
        )
        for source, target in ((values_copy, values), (indices_copy, indices)):
            emit_copy(lowering, source, target)
        return
    length = x.dims[dim]
    part = length if part is None else part
    rows = _dims.product(loop)
    wide = acc_of(dtype) == "int64_t"
    wanted = _dims.upper(count) if rank == "first" else 1
    work = _Work(traits, _dims.upper(part), wanted, wide, rank)
    mine = list(reversed(strides[0]))
    step = x.strides[dim]
    vector = (
        dtype.itemsize < 8
        and isinstance(step, int)
        and step == 1
        and gcd4(length, part, x.offset, *mine)
    )
    # With subgroup operations, the kernel for a rank never ends on NVIDIA's driver 580 where the
    # loops over a row have no length that the compiler knows.
    subgroup = work.subgroup and (rank == "first" or isinstance(part, int))
    full = isinstance(part, int) and part % (work.local * work.per) == 0 and length == part * parts
    names = key_macros(dtype, indices.dtype)
    params: dict[str, Size] = {
        "rows": rows,
        "whole_length": length,
        "step": step,
        **by_dim("stride", mine, 4),
        **by_dim("size", reversed(loop), 3, fill=1),
        "keep": count,
        "parts": parts,
        "part_length": part,
    }
    for name, each, theirs in (("values", values, strides[1]), ("indices", indices, strides[2])):
        params |= {
            f"{name}_step": each.strides[dim],
            **by_dim(f"{name}_stride", reversed(theirs), 4),
            f"{name}_part": count * each.strides[dim],
        }
    groups = rows * parts
    # A workgroup takes several short rows, one after the other: starting more workgroups costs more.
    per_core = traits.profile.max_workgroups_per_core
    if work.local <= 64 and per_core:
        groups = _dims.minimum(groups, per_core * traits.processors)
    lowering.dispatch(
        "sort/select.comp",
        {"x": x, "from": source_indices, "keys": values, "indices": indices},
        {**params, "values_offset": values.offset},
        {
            **names,
            "TEXEL_X": AUTO,
            "VEC4": int(vector),
            "LOCAL": work.local,
            "BINS": work.bins,
            "PER": work.per,
            "CACHED": (1 if traits.profile.prefers_unrolled_code else 2) if work.cached else 0,
            "FULL": int(full),
            "DESCENDING": int(descending),
            "RANK": RANKS.index(rank),
            "LIST": work.list,
            "LIMIT": work.limit,
            "BITONIC": int(work.bitonic),
            "SUBGROUP": int(subgroup),
            "INDEXED": int(source_indices is not None),
            "WIDE_KEY": int(wide),
            "GROUPS": work.groups,
        },
        local=work.local,
        grid=lowering.linear_grid(groups, 1),
        flops=rows * length * 8,
    )


def element_macros(dtype: DType, index: DType) -> dict[str, str]:
    """Macros that name the types of elements and of their indices, and convert them."""
    names = conversions(dtype, dtype, acc_of(dtype))
    names["T_KEY"] = names.pop("T_OUT")
    if "TO_OUT(v)" in names:
        names["TO_KEY(v)"] = names.pop("TO_OUT(v)")
    if index is DType.int64:
        names["HAS_INT64"] = "1"
    return {**names, "T_INDEX": index.glsl}


def key_macros(dtype: DType, index: DType) -> dict[str, str]:
    """The same for kernels that compare unsigned keys of the elements."""
    names = element_macros(dtype, index)
    return {**names, "INTEGERS": "1"} if names["ACC"] == "int" else names


# -- one element of each row ---------------------------------------------------------------------
def _shape(
    x: TensorType, dim: int, rank: str, number: Size, index: DType = DType.int64
) -> tuple[TensorType, TensorType]:
    sizes = tuple(1 if d == dim else size for d, size in enumerate(x.dims))
    return x.with_dims(sizes), TensorType(index, sizes)


def _lower(lowering: Lowering, node: Node) -> None:
    values, indices = (lowering.operand(value) for value in node.results)
    if not is_empty(values.type):
        emit_select(
            lowering,
            lowering.operand(node.tensor("x")),
            values,
            indices,
            node.int("dim"),
            False,
            node.size("number"),
            node.str("rank"),
        )


define(NAME, _shape, Kernel(_lower))


def select(
    builder: Builder, x: Value, dim: int, rank: str, number: Size = 1
) -> tuple[Value, Value]:
    """The element of a rank in each row along a dim, which keeps size 1, and its index.

    Args:
        rank: "kth": the `number`-th element, from 1 on; "median": the lower median, or the first
            NaN; "nanmedian": the lower median of all but NaNs.
    """
    if rank != "kth" and not x.type.dtype.is_float:
        rank, number = "kth", (x.type.dims[dim] + 1) // 2
    index = DType.int64 if "int64" in builder.traits.features else DType.int32
    values, indices = builder.emit_all(NAME, x, dim, rank, number, index)
    return values, indices

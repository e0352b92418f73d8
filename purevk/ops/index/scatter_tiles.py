"""Scatters in one dispatch, on GPUs. A workgroup computes a part of the result, and looks for the
entries that belong there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.lower.elements import acc_of, conversions
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4, power_of_two
from purevk.lower.operands import broadcast_strides
from purevk.lower.rows import collapse

_EACH = 8  # rows per invocation, if whole rows are moved
_SPAN = 8  # entries that an invocation looks at per iteration
# What joining leaves unchanged. -0.0 + x is x, for 0.0 too.
_IDENTITY = {
    "add": {DType.float32: "-0.0", DType.int32: "0"},
    "prod": {DType.float32: "1.0", DType.int32: "1"},
    "amax": {DType.float32: "-PV_INF", DType.int32: "PV_INT_MIN"},
    "amin": {DType.float32: "PV_INF", DType.int32: "PV_INT_MAX"},
}
_MOST_JOINED = 64  # entries for the rows of one invocation, if entries are spread evenly
_MOST_PARTS = 8  # times that the indices may be read, if each entry has its own index


class _Loops(NamedTuple):
    """A scatter as three loops: (outer, n, inner) over x and the result, and (outer, entries,
    inner) over the indices and the source.

    Attributes:
        outer, n, inner: elements before the dim, along it, and after it.
        entries: indices along the dim.
        strides: of x, the result, the indices and the source, the strides along the three loops.
    """

    outer: int
    n: int
    inner: int
    entries: int
    strides: tuple[tuple[Size, Size, Size], ...]

    @classmethod
    def over(
        cls,
        x: Operand,
        out: Operand,
        index: Operand,
        source: Operand | None,
        dim: int,
        entries: Size,
        shared: bool,
    ) -> _Loops | None:
        """None if the dims cannot be joined to three loops, or a size is known only at a call."""
        before, after = x.dims[:dim], x.dims[dim + 1 :]
        entry = (*before, entries, *after)
        index_strides: Sequence[Size] = index.strides
        source_strides: Sequence[Size] = (0,) * len(entry)
        if shared:
            along = index.strides or (0,)
            index_strides = ((0,) * len(before)) + along + ((0,) * len(after))
        if source is not None:
            source_strides = broadcast_strides(source, entry) if shared else source.strides
        operands = (x.strides, out.strides, index_strides, source_strides)
        outer = _join(x.dims[:dim], [strides[:dim] for strides in operands])
        inner = _join(x.dims[dim + 1 :], [strides[dim + 1 :] for strides in operands])
        n = x.dims[dim]
        if outer is None or inner is None or not isinstance(n, int) or not isinstance(entries, int):
            return None
        strides = tuple(
            (first, each[dim], last)
            for first, each, last in zip(outer.strides, operands, inner.strides)
        )
        return cls(outer.size, n, inner.size, entries, strides)

    def params(self, offsets: Sequence[Size], dims: Sequence[str]) -> dict[str, Size]:
        """Parameters: the sizes, and of x, the result, the indices and the source the offset and
        the strides along `dims`."""
        made: dict[str, Size] = {
            "outer": self.outer,
            "n": self.n,
            "inner": self.inner,
            "m": self.entries,
        }
        for name, offset, strides in zip(("x", "out", "index", "source"), offsets, self.strides):
            made[f"{name}_offset"] = offset
            made |= {f"{name}_{dim}": stride for dim, stride in zip(dims, strides)}
        return made


class _Loop(NamedTuple):
    """Dims that are one loop: its size, and the stride of each operand."""

    size: int
    strides: Sequence[Size]


def _join(sizes: Sequence[Size], strides: Sequence[Sequence[Size]]) -> _Loop | None:
    """The dims as one loop; None if that is not possible, or its size is known only at a call."""
    loop, steps = collapse(sizes, *strides)
    if not loop:
        return _Loop(1, [0] * len(strides))
    size = loop[0]
    if len(loop) > 1 or not isinstance(size, int):
        return None
    return _Loop(size, [step[0] for step in steps])


def emit_tiles(
    lowering: Lowering,
    x: Operand,
    out: Operand,
    index: Operand,
    source: Operand | None,
    value: str,
    dim: int,
    entries: Size,
    shared: bool,
    mode: str,
    combine: str,
) -> bool:
    """Appends the dispatch of a scatter along a dim, if this kernel suits it. Returns whether it
    does.

    Args:
        source: the entries; None: all are `value` (GLSL).
        entries: how many indices there are along the dim.
        shared: the index is one tensor of rank 1 or 0, and the same for all other dims.
    """
    traits, dtype = lowering.traits, out.dtype
    if (
        not traits.profile.has_fast_shared_memory
        or index.dtype.itemsize < 4
        or (mode != "set" and dtype not in (DType.float32, DType.int32))
    ):
        return False
    loops = _Loops.over(x, out, index, source, dim, entries, shared)
    if loops is None:
        return False
    outer, n, inner, entries = loops.outer, loops.n, loops.inner, loops.entries
    offsets = [operand.offset if operand is not None else 0 for operand in (x, out, index, source)]
    vector = (
        shared
        and mode in ("set", "add", "prod")
        and dtype in (DType.float32, DType.float16, DType.int32)
        and all(
            strides[2] == 1
            for k, strides in enumerate(loops.strides)
            if k < 2 or (k == 3 and source is not None)
        )
        and all(gcd4(inner, offsets[k], *loops.strides[k][:2]) for k in (0, 1, 3))
    )
    columns = inner // 4 if vector else inner
    local = min(256, traits.max_invocations)
    sector = traits.profile.sector_bytes // 4  # columns of 4 bytes that are read together
    rows = shared and columns >= sector
    if rows:
        width = min(power_of_two(columns), local)
        reach = local // width * _EACH
        parts, blocks = -(-n // reach), -(-columns // width)
        # Every workgroup reads all indices. That must not be more than what it moves.
        if entries * 2 > reach * width * (4 if vector else 1) and entries > 1024:
            return False
        # An invocation joins its entries one after the other. They must not be many.
        if mode != "set" and entries > _MOST_JOINED * parts * (local // width):
            return False
    else:
        space = min(traits.max_shared_memory, 49152) // 4
        width = (
            1
            if inner == 1
            else max(
                min(power_of_two(inner), sector, 32),
                min(power_of_two(space // 2 // n), 32, power_of_two(inner)),
            )
        )
        parts = -(-n * width // space)
        reach = -(-n // parts)
        blocks = -(-inner // width)
        if reach * width > 4096:
            local = min(512, traits.max_invocations)
        if parts > 1 and mode != "set" and source is not None:
            if _emit_columns(lowering, x, out, index, source, loops, offsets, mode, combine, parts):
                return True
        few = outer * parts * blocks < traits.processors
        if parts > _MOST_PARTS or (few and entries * width > 65536):
            return False
    acc = acc_of(dtype)
    names = conversions(dtype, dtype, acc)
    if acc == "int":
        names["INTEGERS"] = "1"
    params = {
        **loops.params(offsets, ("outer", "along", "inner")),
        "parts": parts,
        "blocks": blocks,
    }
    groups = outer * parts * blocks
    moved = 2 * out.type.nbytes + entries * index.dtype.itemsize * (1 if shared else outer * inner)
    lowering.dispatch(
        "index/scatter.comp",
        {"x": x, "index": index, "source": source, "out": out},
        params,
        {
            **names,
            "INDEX_WORDS": index.dtype.itemsize // 4,
            "SPAN": _SPAN,
            "LOCAL": local,
            "ROWS": int(rows),
            "WIDTH": width,
            "SET": int(mode == "set"),
            "COMBINE(a, b)": combine,
            "ADD": int(mode == "add"),
            "REACH": reach,
            "VEC4": int(vector and rows),
            **({} if source is not None else {"VALUE": value}),
        },
        local=local,
        grid=lowering.linear_grid(groups, 1),
        flops=outer * inner * entries,
        nbytes=moved + (outer * inner * entries * dtype.itemsize if source is not None else 0),
    )
    return True


def _emit_columns(
    lowering: Lowering,
    x: Operand,
    out: Operand,
    index: Operand,
    source: Operand,
    loops: _Loops,
    offsets: Sequence[Size],
    mode: str,
    combine: str,
    tiles: int,
) -> bool:
    """Appends `scatter_columns.comp` if it reads the entries much less often than `tiles` times.
    Returns whether it does."""
    traits, outer, n, inner = lowering.traits, loops.outer, loops.n, loops.inner
    numbers = (inner, *offsets, *(stride for strides in loops.strides for stride in strides[:2]))
    if any(strides[2] != 1 for strides in loops.strides) or any(
        _dims.gcd_of(number) % 2 for number in numbers
    ):
        return False
    local, blocks = 1024, -(-inner // 8)
    each = min(16, traits.max_shared_memory // (2 * local) // 4 * 4)
    parts = -(-n * 4 // (each * local))
    shuffles = traits.has("subgroup_shuffle", "subgroup_basic") and traits.subgroup_size >= 4
    if (
        not shuffles
        or traits.max_invocations < local
        or tiles < 3 * parts
        or 2 * outer * parts * blocks < traits.processors
    ):
        return False
    each = min((-(-n * 4 // (parts * local)) + 3) // 4 * 4, each)
    params = {**loops.params(offsets, ("outer", "along")), "parts": parts, "blocks": blocks}
    count = outer * loops.entries * inner
    lowering.dispatch(
        "index/scatter_columns.comp",
        {"x": x, "index": index, "source": source, "out": out},
        params,
        {
            "LOCAL": local,
            "EACH": each,
            "INDEX_WORDS": index.dtype.itemsize // 4,
            "COMBINE(a, b)": combine,
            "IDENTITY": _IDENTITY[mode][out.dtype],
            **({"INTEGERS": 1} if out.dtype is DType.int32 else {}),
        },
        local=local,
        grid=lowering.linear_grid(outer * parts * blocks, 1),
        flops=count,
        nbytes=2 * out.type.nbytes + count * (index.dtype.itemsize + out.dtype.itemsize),
    )
    return True

"""Sorting long rows: blocks of them in shared memory, and then sorted runs two and two.

On a GPU, `rank.comp` sorts a few rows, with many workgroups for each; `sort_rows.comp` sorts rows, or
blocks of them, that fit into shared memory; otherwise `sort.comp` sorts smaller blocks. `merge.comp`
makes one sorted run of two, until a run is the row. For the few first elements of a row, only those of
each block go on to the next round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Layout, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, emit_copy
from purevk.lower.elements import acc_of, conversions
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import power_of_two
from purevk.lower.rows import by_dim, collapse
from purevk.ops.sort.selection import element_macros, key_macros

_BLOCK = 1024  # of `sort.comp`
_TILE = 2048  # elements that a workgroup merges, at most
_COMPARISONS = 1 << 17  # of a core that are faster than the steps of one workgroup for each row
_COUNTERS = 32  # invocations of `rank.comp` that count for one element


class _Sorted(NamedTuple):
    """Elements in their order and their indices, both with the dims of x."""

    values: Operand
    indices: Operand


def emit_sort(
    lowering: Lowering,
    x: Operand,
    values: Operand,
    indices: Operand,
    dim: int,
    descending: bool,
    count: Size,
) -> None:
    """Emits the dispatches that store the `count` first elements along a dim in their order, and
    their indices. Equal elements keep their order."""
    _Sorter(lowering, x, _Sorted(values, indices), dim, descending, count).run()


class _Sorter:
    def __init__(
        self,
        lowering: Lowering,
        x: Operand,
        results: _Sorted,
        dim: int,
        descending: bool,
        count: Size,
    ) -> None:
        self.lowering, self.traits = lowering, lowering.traits
        self.results, self.dim, self.descending, self.count = results, dim, descending, count
        self.rest = [d for d in range(len(x.dims)) if d != dim]
        self.x = x if self._collapses(x) else dense(lowering, x)
        self.acc = acc_of(x.dtype)
        self.rows, self.length = _dims.product(x.dims[d] for d in self.rest), x.dims[dim]

    def run(self) -> None:
        upper, traits = _dims.upper(self.length), self.traits
        wide = self.acc == "int64_t"
        block = _BLOCK if traits.max_shared_memory >= _BLOCK * (12 if wide else 8) else _BLOCK // 2
        whole = self._shared_block()
        if self._is_ranked() and self._collapses(self.x, *self.results):
            self._rank()
            return
        if upper <= whole and self._collapses(self.x, *self.results):
            self._sort_rows(self.results, max(power_of_two(upper), 256), self.count)
            return
        if isinstance(self.count, int) and self.count <= block // 2:
            self._store(self._first(block))
            return
        made = self._scratch(self.length)
        if whole:
            block = whole
            self._sort_rows(made, block, block)
        else:
            self._sort_blocks(None, block, self.length, block, made)
        self._merge_all(made, block)

    # -- operands --------------------------------------------------------------------------------
    def _collapses(self, *operands: Operand) -> bool:
        """Whether kernels can walk the outer dims of these together."""
        return len(self._outer(*operands)[0]) <= 4

    def _outer(self, *operands: Operand) -> tuple[list[Size], list[list[Size]]]:
        """The sizes of the outer dims, and their strides in each operand, the innermost first."""
        sizes, strides = collapse(
            [operands[0].dims[d] for d in self.rest],
            *([operand.strides[d] for d in self.rest] for operand in operands),
        )
        return list(reversed(sizes)), [list(reversed(stride)) for stride in strides]

    def _places(self, to: _Sorted, strides: list[list[Size]]) -> dict[str, Size]:
        """Parameters that say where results are stored; `strides` of their outer dims."""
        params: dict[str, Size] = {}
        for name, each, steps in zip(("values", "indices"), to, strides, strict=True):
            params |= {
                f"{name}_offset": each.offset,
                f"{name}_step": each.strides[self.dim],
                **by_dim(f"{name}_stride", steps, 4),
            }
        return params

    def _scratch(self, width: Size) -> _Sorted:
        """Temporaries whose rows are dense."""

        def made(dtype: DType) -> Operand:
            held = self.lowering.temporary(TensorType(dtype, (self.rows, width)))
            return self._in_order(held, width)

        return _Sorted(made(self.x.dtype), made(DType.int32))

    def _in_order(self, rows: Operand, width: Size) -> Operand:
        """Dense rows as a tensor with the dims of x."""
        sizes = (*(self.x.dims[d] for d in self.rest), width)
        strides = Layout.dense(sizes).strides
        last = len(self.rest)
        order = [*range(self.dim), last, *range(self.dim, last)]
        layout = Layout(rows.offset, tuple(strides[d] for d in order))
        return Operand(rows.storage, layout, rows.type.with_dims(tuple(sizes[d] for d in order)))

    def _store(self, made: _Sorted) -> None:
        for source, target in zip(made, self.results, strict=True):
            held = Operand(source.storage, source.layout, source.type.with_dims(target.dims))
            emit_copy(self.lowering, held, target)

    # -- blocks ----------------------------------------------------------------------------------
    def _shared_block(self) -> int:
        """The longest rows that `sort_rows.comp` takes, a power of two; 0 if it takes none."""
        if not self.traits.profile.has_fast_shared_memory or self.acc not in ("float", "int"):
            return 0
        upper = max(power_of_two(_dims.upper(self.length)), 256)
        while upper >= 256:
            local, shared = self._shared_work(upper)
            if local <= self.traits.max_invocations and shared <= self.traits.max_shared_memory:
                return upper
            upper //= 2
        return 0

    def _is_ranked(self) -> bool:
        """Whether rows are so few that each element may be compared with all others of its row."""
        upper, traits = _dims.upper(self.length), self.traits
        size = power_of_two(upper) * (8 if self.acc == "int64_t" else 4)
        return (
            traits.profile.has_fast_shared_memory
            and _dims.upper(self.rows) * upper**2 <= _COMPARISONS * traits.processors
            and size + 1024 <= traits.max_shared_memory
        )

    def _rank(self) -> None:
        """Sorts rows by the number of elements before each; x and the results collapse together."""
        local = min(256, self.traits.max_invocations)
        self._dispatch_rows(
            "sort/rank.comp",
            self.results,
            {"keep": self.count},
            {
                **element_macros(self.x.dtype, self.results.indices.dtype),
                "WIDE": int(self.acc == "int64_t"),
                "ROOM": power_of_two(_dims.upper(self.length)),
                "COUNTERS": _COUNTERS,
            },
            local,
            (_dims.ceil_div(self.length * _COUNTERS, local), self.rows, 1),
            self.length * self.length,
        )

    def _dispatch_rows(
        self,
        template: str,
        to: _Sorted,
        params: Mapping[str, Size],
        macros: Mapping[str, str | int],
        local: int,
        grid: tuple[Size, Size, Size],
        flops: Size,
    ) -> None:
        """Appends a kernel that reads rows of x, which collapse together with `to`; `flops` are those
        of a row."""
        x = self.x
        sizes, strides = self._outer(x, *to)
        self.lowering.dispatch(
            template,
            {"x": x, "keys": to.values, "indices": to.indices},
            {
                "row_length": self.length,
                "step": x.strides[self.dim],
                **by_dim("stride", strides[0], 4),
                **by_dim("size", sizes, 3, fill=1),
                **self._places(to, strides[1:]),
                **params,
            },
            {**macros, "LOCAL": local, "DESCENDING": int(self.descending)},
            local=local,
            grid=grid,
            flops=self.rows * flops,
        )

    def _shared_work(self, block: int) -> tuple[int, int]:
        """Invocations and bytes of shared memory of `sort_rows.comp`."""
        local = block >> self._levels(block)
        return local, 8 * (block + local) + 2 * block + 4 * (local + 8)

    def _levels(self, block: int) -> int:
        return 3 if block >> 3 <= self.traits.max_invocations else 4

    def _sort_rows(self, to: _Sorted, block: int, keep: Size) -> None:
        """Sorts blocks of rows; x and `to` collapse together."""
        traits, blocks = self.traits, _dims.ceil_div(self.length, block)
        local, _ = self._shared_work(block)
        whole = local % traits.subgroup_size == 0
        self._dispatch_rows(
            "sort/sort_rows.comp",
            to,
            {"rows": self.rows, "keep": keep, "blocks": blocks},
            {
                **key_macros(self.x.dtype, to.indices.dtype),
                "LEVELS": self._levels(block),
                "BINS": block,
                "SUBGROUP": int(whole and traits.has("subgroup_arithmetic", "subgroup_basic")),
            },
            local,
            self.lowering.linear_grid(self.rows * blocks, 1),
            blocks * block,
        )

    def _first(self, block: int) -> _Sorted:
        """The `count` first of each row: those of its blocks, then those of the blocks of these,
        until one is left."""
        length, source = self.length, None
        while True:
            blocks = _dims.ceil_div(length, block)
            one = _dims.upper(blocks) == 1
            width = self.count if one else self.count * blocks
            made = self._scratch(width)
            self._sort_blocks(source, block, length, self.count, made)
            if one:
                return made
            length, source = width, made

    def _sort_blocks(
        self, source: _Sorted | None, block: int, length: Size, keep: Size, made: _Sorted
    ) -> None:
        """Sorts blocks of rows of x, or of `source`, and stores `keep` elements of each."""
        x, dtype = self.x, self.x.dtype
        if source is None:
            sizes, (strides,) = self._outer(x)
            step = x.strides[self.dim]
        else:
            x, sizes, strides, step = source.values, [self.rows], [length], 1
        names = conversions(dtype, dtype, self.acc)
        names["T_KEY"] = names.pop("T_OUT")
        if "TO_OUT(v)" in names:
            names["TO_KEY(v)"] = names.pop("TO_OUT(v)")
        local = min(self.traits.profile.max_sort_workgroup, self.traits.max_invocations, block // 2)
        blocks = _dims.ceil_div(length, block)
        params: dict[str, Size] = {
            "rows": self.rows,
            "row_length": length,
            "step": step,
            **by_dim("stride", strides, 4),
            **by_dim("size", sizes, 3, fill=1),
            "blocks": blocks,
            "keep": keep,
            "key_offset": made.values.offset,
            "out_length": made.values.dims[self.dim],
        }
        groups = self.rows * blocks
        self.lowering.dispatch(
            "sort/sort.comp",
            {
                "x": x,
                "from": source.indices if source is not None else None,
                "keys": made.values,
                "indices": made.indices,
            },
            params,
            {
                **names,
                "BLOCK": block,
                "DESCENDING": int(self.descending),
                "INDEXED": int(source is not None),
            },
            local=local,
            grid=self.lowering.linear_grid(groups, 1),
            flops=groups * block,
            specialize=(),
        )

    # -- runs ------------------------------------------------------------------------------------
    def _merge_all(self, made: _Sorted, run: int) -> None:
        """Makes one run of sorted runs of `made`, and stores it."""
        upper = _dims.upper(self.length)
        spare, direct = None, self._collapses(*self.results)
        while run < upper:
            last = 2 * run >= upper
            if last and direct:
                self._merge(made, self.results, run, self.count)
                return
            spare = spare or self._scratch(self.length)
            self._merge(made, spare, run, self.count if last else self.length)
            made, spare = spare, made
            run *= 2
        self._store(made)

    def _merge(self, source: _Sorted, to: _Sorted, run: int, keep: Size) -> None:
        lowering, traits, dtype = self.lowering, self.traits, self.x.dtype
        size = 8 if self.acc == "int64_t" else 4
        local = min(traits.profile.max_sort_workgroup, traits.max_invocations)
        local = 1 << local.bit_length() - 1
        tile = min(_TILE, 2 * run)
        while tile * (size + 4) + tile // 2 + 16 > traits.max_shared_memory:
            tile //= 2
        local = min(local, tile // 4)
        tiles = _dims.ceil_div(self.length, tile)
        sizes, strides = self._outer(*to)
        params: dict[str, Size] = {
            "rows": self.rows,
            "row_length": self.length,
            "tiles": tiles,
            "run": run,
            "keep": keep,
            **by_dim("size", sizes, 3, fill=1),
        }
        params |= self._places(to, strides)
        lowering.dispatch(
            "sort/merge.comp",
            {"x": source.values, "from": source.indices, "keys": to.values, "indices": to.indices},
            params,
            {
                **element_macros(dtype, to.indices.dtype),
                "LOCAL": local,
                "EACH": tile // local,
                "DESCENDING": int(self.descending),
            },
            local=local,
            # All merges but the last are of one kernel.
            never=("run",),
            grid=lowering.linear_grid(self.rows * tiles, 1),
            flops=self.rows * self.length,
        )

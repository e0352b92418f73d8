"""Sorting along a dim, and what follows from it: topk, median, kthvalue.

If few elements of a row are wanted, they are selected without sorting it (`selection.py`). In short
rows, each element counts the elements before it. Longer rows that fit into a GPU's shared memory are
sorted there (`sort_rows.comp`). Otherwise blocks are sorted in shared memory (`sort.comp`) and
merged by a bitonic network. For the first k of a row, only the first k of each block go on to the
next round.
"""

from __future__ import annotations

from collections.abc import Callable

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, emit_copy
from purevk.lower.elements import conversions
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.map import MapSpec, acc_of, coordinates, emit_map
from purevk.lower.numbers import power_of_two
from purevk.lower.rows import by_dim, collapse
from purevk.ops.builder import Builder
from purevk.ops.registry import Kernel, Operator, ShapeError, register, rewrite
from purevk.ops.shapes import is_empty, reduced, wrap
from purevk.ops.sort.selection import can_select, element_macros, emit_select, select

NAME = "purevk.sort"
SHORT = 128  # up to this length every element counts those before it
BLOCK = 1024


def _shape(
    x: TensorType, dim: int, descending: bool, count: Size, index: DType = DType.int64
) -> tuple[TensorType, TensorType]:
    sizes = tuple(count if d == dim else size for d, size in enumerate(x.dims))
    return x.with_dims(sizes), TensorType(index, sizes)


def _lower(lowering: Lowering, node: Node) -> None:
    x = lowering.operand(node.tensor("x"))
    dim, descending, count = node.int("dim"), node.bool("descending"), node.size("count")
    values, indices = (lowering.operand(value) for value in node.results)
    if is_empty(values.type):
        return
    if can_select(lowering.traits, x.type, dim, count):
        emit_select(lowering, x, values, indices, dim, descending, count)
    elif _dims.upper(x.dims[dim]) <= SHORT:
        _count_before(lowering, x, values, indices, dim, descending)
    elif not _sort_rows(lowering, x, values, indices, dim, descending, count):
        _Sorter(lowering, x, values, indices, dim, descending, count).run()


def _count_before(
    lowering: Lowering, x: Operand, values: Operand, indices: Operand, dim: int, descending: bool
) -> None:
    rank = len(x.dims)
    mine, other, to = (
        coordinates(rank, **{f"d{dim}": name}) for name in (f"i{dim}", "j", "before")
    )
    flag = "true" if descending else "false"
    body = (
        f"{acc_of(x.dtype)} v = X({mine}); int before = 0;"
        f" for (int j = 0; j < x_size_{dim}; j++) if (pv_before(X({other}), j, v, i{dim}, {flag})) before++;"
        f" if (before < r_size_{dim}) {{ R_PUT({to}, v); R1_PUT({to}, i{dim}); }}"
    )
    emit_map(lowering, MapSpec(body, ("X",), stores=False), [x], {}, [values, indices], x.dims)


def _sort_rows(
    lowering: Lowering,
    x: Operand,
    values: Operand,
    indices: Operand,
    dim: int,
    descending: bool,
    count: Size,
) -> bool:
    """Emits the one dispatch that sorts rows which fit into shared memory, on a GPU; returns
    whether it does."""
    traits, acc = lowering.traits, acc_of(x.dtype)
    rest = [d for d in range(len(x.dims)) if d != dim]
    loop, strides = collapse(
        [x.dims[d] for d in rest],
        *([each.strides[d] for d in rest] for each in (x, values, indices)),
    )
    block = max(power_of_two(_dims.upper(x.dims[dim])), 256)
    levels = 3 if block >> 3 <= traits.max_invocations else 4
    local = block >> levels
    shared = 8 * (block + local) + 2 * block + 4 * (local + 8)
    if (
        not traits.profile.has_fast_shared_memory
        or acc not in ("float", "int")
        or len(loop) > 4
        or local > traits.max_invocations
        or shared > traits.max_shared_memory
    ):
        return False
    names = element_macros(x.dtype, indices.dtype)
    rows = _dims.product(loop)
    params: dict[str, Size] = {
        "x_offset": x.offset,
        "rows": rows,
        "row_length": x.dims[dim],
        "step": x.strides[dim],
        **by_dim("stride", reversed(strides[0]), 4),
        **by_dim("size", reversed(loop), 3, fill=1),
        "keep": count,
    }
    for name, each, steps in (("values", values, strides[1]), ("indices", indices, strides[2])):
        params |= {
            f"{name}_offset": each.offset,
            f"{name}_step": each.strides[dim],
            **by_dim(f"{name}_stride", reversed(steps), 4),
        }
    lowering.dispatch(
        "sort/sort_rows.comp",
        {"x": (x, "r"), "keys": (values, "w"), "indices": (indices, "w")},
        macros={
            **names,
            "LEVELS": levels,
            "LOCAL": local,
            "BINS": block,
            "DESCENDING": int(descending),
            "SUBGROUP": int(
                traits.has("subgroup_arithmetic", "subgroup_basic")
                and local % traits.subgroup_size == 0
            ),
        },
        params=params,
        constants={"local_size_x": local},
        specialize=lowering.fixed(params),
        grid=lowering.linear_grid(rows, 1),
        flops=rows * block,
    )
    return True


class _Sorter:
    """Emits the dispatches that sort long rows."""

    def __init__(
        self,
        lowering: Lowering,
        x: Operand,
        values: Operand,
        indices: Operand,
        dim: int,
        descending: bool,
        count: Size,
    ) -> None:
        self.lowering, self.values, self.indices, self.dim, self.count = (
            lowering,
            values,
            indices,
            dim,
            count,
        )
        self.descending = descending
        rest = [d for d in range(len(x.dims)) if d != dim]
        loop, (steps,) = collapse([x.dims[d] for d in rest], [x.strides[d] for d in rest])
        if len(loop) > 4:
            x = dense(lowering, x)
            loop, (steps,) = collapse([x.dims[d] for d in rest], [x.strides[d] for d in rest])
        self.x, self.sizes, self.steps = x, list(reversed(loop)), list(reversed(steps))
        self.rows, self.length = _dims.product(x.dims[d] for d in rest), x.dims[dim]
        wide = x.dtype.acc == "int64_t"
        self.block = (
            BLOCK
            if lowering.traits.max_shared_memory >= BLOCK * (12 if wide else 8)
            else BLOCK // 2
        )

    def run(self) -> None:
        few = isinstance(self.count, int) and self.count <= self.block // 2
        keys, indices = self._first(few) if few else self._all()
        # Back to the order of the results' dims.
        rest = [size for d, size in enumerate(self.values.dims) if d != self.dim]
        for source, target in ((keys, self.values), (indices, self.indices)):
            width = source.dims[1]
            sizes = (*rest, self.count)
            inner = Layout.dense((*rest, width)).strides
            order = [*range(self.dim), len(rest), *range(self.dim, len(rest))]
            layout = Layout(source.offset, tuple(inner[d] for d in order))
            emit_copy(
                self.lowering,
                Operand(
                    source.storage, layout, TensorType(source.dtype, tuple(sizes[d] for d in order))
                ),
                target,
            )

    def _scratch(self, width: Size) -> tuple[Operand, Operand]:
        return (
            self.lowering.temporary(TensorType(self.x.dtype, (self.rows, width))),
            self.lowering.temporary(TensorType(DType.int32, (self.rows, width))),
        )

    def _first(self, few: bool) -> tuple[Operand, Operand]:
        """The `count` first of each row: those of its blocks, then those of the blocks of these,
        until one is left."""
        length, source = self.length, None
        while True:
            blocks = _dims.ceil_div(length, self.block)
            one = _dims.upper(blocks) == 1
            kept = self.count
            made = self._scratch(kept if one else kept * blocks)
            self._blocks(source, length, blocks, kept, made)
            if one:
                return made
            length, source = kept * blocks, made

    def _all(self) -> tuple[Operand, Operand]:
        blocks = _dims.ceil_div(self.length, self.block)
        made = self._scratch(self.length)
        self._blocks(None, self.length, blocks, self.block, made)
        span = 2 * self.block
        whole = self.block * power_of_two(_dims.upper(blocks))
        while span <= whole:
            step = span
            while step > self.block:
                self._exchange(made, step, step == span, whole)
                step //= 2
            self._blocks(made, self.length, blocks, self.block, made, merge=True)
            span *= 2
        return made

    def _blocks(
        self,
        source: tuple[Operand, Operand] | None,
        length: Size,
        blocks: Size,
        keep: Size,
        made: tuple[Operand, Operand],
        merge: bool = False,
    ) -> None:
        x, dtype = self.x, self.x.dtype
        sizes, steps, step = self.sizes, self.steps, x.strides[self.dim]
        buffers: dict[str, tuple[Operand, str]] = {"x": (x, "r")}
        if source is not None:
            x, sizes, steps, step = source[0], [self.rows], [length], 1
            buffers = {"x": (x, "r"), "from": (source[1], "r")}
        acc = acc_of(dtype)
        names = conversions(dtype, dtype, acc)
        names["T_KEY"] = names.pop("T_OUT")
        if "TO_OUT(v)" in names:
            names["TO_KEY(v)"] = names.pop("TO_OUT(v)")
        local = min(
            self.lowering.traits.profile.max_sort_workgroup,
            self.lowering.traits.max_invocations,
            self.block // 2,
        )
        params: dict[str, Size] = {
            "x_offset": x.offset,
            "rows": self.rows,
            "row_length": length,
            "step": step,
            **by_dim("stride", steps, 4),
            **by_dim("size", sizes, 3, fill=1),
            "blocks": blocks,
            "keep": keep,
            "key_offset": made[0].offset,
            "out_length": made[0].dims[1],
        }
        groups = self.rows * blocks
        self.lowering.dispatch(
            "sort/sort.comp",
            {**buffers, "keys": (made[0], "rw"), "indices": (made[1], "rw")},
            macros={
                **names,
                "BLOCK": self.block,
                "DESCENDING": int(self.descending),
                "INDEXED": int(source is not None),
                "MERGE": int(merge),
            },
            params=params,
            constants={"local_size_x": local},
            grid=self.lowering.linear_grid(groups, 1),
            flops=groups * self.block,
        )

    def _exchange(
        self, made: tuple[Operand, Operand], span: int, mirrored: bool, whole: int
    ) -> None:
        acc = acc_of(self.x.dtype)
        flag = "true" if self.descending else "false"
        body = (
            "int part = span / 2, group = i1 / part, at = i1 - group * part, low = group * span + at;"
            " int high = mirrored != 0 ? group * span + span - 1 - at : low + part;"
            f" if (high < r_size_1) {{ {acc} a = R(i0, low), b = R(i0, high); int p = R1(i0, low), q = R1(i0, high);"
            f" if (pv_before(b, q, a, p, {flag})) {{ R_PUT(i0, low, b); R_PUT(i0, high, a); R1_PUT(i0, low, q);"
            " R1_PUT(i0, high, p); } }"
        )
        numbers: dict[str, Size] = {"span": span, "mirrored": int(mirrored)}
        names = tuple(numbers)
        spec = MapSpec(body, (), names, stores=False, pushed=names)
        emit_map(self.lowering, spec, [], numbers, list(made), (self.rows, whole // 2))


register(Operator(NAME, _shape, Kernel(_lower)))


# -- operators -----------------------------------------------------------------------------------
def sort(
    builder: Builder, x: Value, dim: int, descending: bool, count: Size | None = None
) -> tuple[Value, Value]:
    """The `count` first elements along a dim (None: all) in their order, and their indices; equal
    ones keep their order."""
    if not x.type.rank:
        made = sort(builder, builder.emit("aten.view.default", x, (1,)), 0, descending)
        values, indices = (builder.emit("aten.view.default", value, ()) for value in made)
        return values, indices
    at = wrap(dim, x.type.rank)
    index = DType.int64 if "int64" in builder.traits.features else DType.int32
    count = x.type.dims[at] if count is None else count
    values, indices = builder.emit_all(NAME, x, at, bool(descending), count, index)
    return values, indices


def _sort_shape(
    x: TensorType, dim: int = -1, descending: bool = False
) -> tuple[TensorType, TensorType]:
    wrap(dim, x.rank)
    return x, x.with_dtype(DType.int64)


rewrite(
    "aten.sort.default",
    _sort_shape,
    lambda builder, node, x, dim, descending: sort(builder, x, dim, descending),
)
rewrite(
    "aten.sort.stable",
    lambda x, stable=None, dim=-1, descending=False: _sort_shape(x, dim, descending),
    lambda builder, node, x, stable, dim, descending: sort(builder, x, dim, descending),
)
rewrite(
    "aten.argsort.default",
    lambda x, dim=-1, descending=False: _sort_shape(x, dim, descending)[1],
    lambda builder, node, x, dim, descending: sort(builder, x, dim, descending)[1],
)
rewrite(
    "aten.argsort.stable",
    lambda x, stable, dim=-1, descending=False: _sort_shape(x, dim, descending)[1],
    lambda builder, node, x, stable, dim, descending: sort(builder, x, dim, descending)[1],
)
rewrite("aten.msort.default", lambda x: x, lambda builder, node, x: sort(builder, x, 0, False)[0])


def _topk_shape(
    x: TensorType, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[TensorType, TensorType]:
    if not x.rank:
        return x, x.with_dtype(DType.int64)
    at = wrap(dim, x.rank)
    if isinstance(k, int) and k > _dims.upper(x.dims[at]):
        raise ShapeError(f"topk takes {k} of {x.dims[at]} elements")
    return _shape(x, at, largest, k)


rewrite(
    "aten.topk.default",
    _topk_shape,
    lambda builder, node, x, k, dim, largest, _: sort(
        builder, x, dim, largest, k if x.type.rank else None
    ),
)


def _pick(
    builder: Builder, x: Value, dim: int, keepdim: bool, rank: str, number: Size = 1
) -> tuple[Value, Value]:
    """The element of a rank along a dim, and its index; see `select`."""
    if not x.type.rank:
        return sort(builder, x, 0, False)
    at = wrap(dim, x.type.rank)
    made = select(builder, x, at, rank, number)
    if keepdim:
        return made
    values, indices = (builder.emit("aten.squeeze.dims", value, (at,)) for value in made)
    return values, indices


def _rank_shape(
    x: TensorType, dim: int = -1, keepdim: bool = False
) -> tuple[TensorType, TensorType]:
    made = x.with_dims(reduced(x.dims, (wrap(dim, x.rank),), keepdim) if x.rank else ())
    return made, made.with_dtype(DType.int64)


rewrite(
    "aten.kthvalue.default",
    lambda x, k, dim=-1, keepdim=False: _rank_shape(x, dim, keepdim),
    lambda builder, node, x, k, dim, keepdim: _pick(builder, x, dim, keepdim, "kth", k),
)


def _median_of_all(name: str) -> Callable[..., Value]:
    def expand(builder: Builder, node: Node, x: Value) -> Value:
        if is_empty(x.type):
            return builder.emit("aten.full.default", (), float("nan"), x.type.dtype)
        return _pick(
            builder, builder.emit("aten.view.default", x, (x.type.numel,)), 0, False, name
        )[0]

    return expand


for _name in ("median", "nanmedian"):
    rewrite(
        f"aten.{_name}.dim",
        _rank_shape,
        lambda builder, node, x, dim, keepdim, name=_name: _pick(builder, x, dim, keepdim, name),
    )
    rewrite(f"aten.{_name}.default", lambda x: x.with_dims(()), _median_of_all(_name))

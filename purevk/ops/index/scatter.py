"""Writing elements at indices: the kernel `purevk.scatter`.

A row is the elements that share the coordinates of all dims without an index. One invocation takes
the entries of a row in their order. So the result is the same at every call, and of several entries
for one element the last one wins, as on torch's CPU.

If there are many entries for few rows, each entry has its own invocation. Sums and the like then use
atomic operations. For writes, a first pass finds the last entry of each element. On a GPU, most
scatters along one dim are one dispatch (`scatter_tiles.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import emit_copy
from purevk.lower.elements import acc_of
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.map import MapSpec, emit_map
from purevk.ops.index.scatter_tiles import emit_tiles
from purevk.ops.movement.rearrange import glsl_number
from purevk.ops.registry import Kernel, ShapeError, define
from purevk.ops.shapes import broadcast, is_empty
from purevk.ops.signatures import signature

NAME = "purevk.scatter"
# The new value of an element `a`, for an entry `b`.
_COMBINE = {
    "set": "b", "add": "a + b", "prod": "a * b", "amax": "pv_max(a, b)", "amin": "pv_min(a, b)", "mean": "a + b",
}  # fmt: skip


# The least and the largest number of the types that are computed in a wider one.
_RANGES = {
    DType.bool: (0, 1),
    DType.uint8: (0, 255),
    DType.int8: (-128, 127),
    DType.int16: (-32768, 32767),
}


def _parallel(dtype: DType) -> tuple[str, ...]:
    """The modes for which several invocations can write to an element of a dtype at once."""
    if dtype in (DType.float32, DType.int32):
        return ("set", "add", "prod", "amax", "amin")
    return ("set", "add") if dtype is DType.int64 else ("set",)


@signature("x, indices, source, along: int | None, given, mode, include_self=True")
def _shape(x: TensorType) -> TensorType:
    return x


class _Entries:
    """The entries of a scatter, as loops and as GLSL of their coordinates.

    If `along` is given, the index has the rank of x, and gives the coordinate along this dim.
    Otherwise the (broadcast) indices give the coordinates of the dims `given` of x, and the source
    has the shape of `x[indices]`.

    Attributes:
        rows: sizes of the dims that address a row.
        sizes: sizes of the dims of the entries of a row.
        target: coordinates in x: `i0`, ... of the row, and `p0`, ... that the indices give.
        index_at: coordinates in each index: those of the row, and `s0`, ... of the entry.
        source_at: coordinates in the source.
        chosen: for each index, the dim of x whose coordinate it gives.
    """

    def __init__(
        self,
        x: Operand,
        indices: Sequence[Operand],
        source: Operand | None,
        along: int | None,
        given: Sequence[int],
    ) -> None:
        rank = len(x.dims)
        if along is not None:
            index = indices[0]
            self.rows: tuple[Size, ...] = tuple(
                1 if d == along else size for d, size in enumerate(index.dims)
            )
            self.sizes: tuple[Size, ...] = (index.dims[along],)
            at = ["s0" if d == along else f"i{d}" for d in range(rank)]
            self.index_at = [", ".join(at)]
            self.target = ["p0" if d == along else f"i{d}" for d in range(rank)]
            self.source_at = ", ".join(at)
            self.chosen: tuple[int, ...] = (along,)
            return
        shape = broadcast(*(index.dims for index in indices))
        rest = [d for d in range(rank) if d not in given]
        self.rows = tuple(x.dims[d] for d in rest) or (1,)
        self.sizes = shape or (1,)
        row = {d: f"i{n}" for n, d in enumerate(rest)}
        self.target = [row.get(d, f"p{given.index(d)}" if d in given else "0") for d in range(rank)]
        steps = [f"s{n}" for n in range(len(shape))]
        self.index_at = [_aligned(index.dims, steps, shape) for index in indices]
        together = list(given) == list(range(given[0], given[0] + len(given)))
        before = [d for d in rest if together and d < given[0]]
        full = [row[d] for d in before] + steps + [row[d] for d in rest if d not in before]
        sizes = (
            [x.dims[d] for d in before] + list(shape) + [x.dims[d] for d in rest if d not in before]
        )
        self.source_at = "" if source is None else _aligned(source.dims, full, sizes)
        self.chosen = tuple(given)

    @property
    def count(self) -> Size:
        return _dims.product(self.sizes)

    def decode(self, number: str) -> str:
        """Statements that declare s0, s1, ... of an entry, and p0, p1, ..., the coordinates that
        its indices give."""
        out = [f"int left = {number};"]
        for n in reversed(range(len(self.sizes))):
            out.append(
                f"int s{n} = left % entries_{n}; left /= entries_{n};" if n else "int s0 = left;"
            )
        for n, (at, d) in enumerate(zip(self.index_at, self.chosen)):
            out.append(f"int p{n} = pv_index(INDEX{n}({at}), x_size_{d});")
        return " ".join(out)


def _aligned(dims: Sequence[Size], names: Sequence[str], sizes: Sequence[Size]) -> str:
    """Coordinates of a tensor that is broadcast to `sizes`."""
    lead = len(sizes) - len(dims)
    if lead < 0:
        raise ShapeError(f"cannot broadcast {list(dims)} to {list(sizes)}")
    return (
        ", ".join(
            "0" if dims[n] == 1 and sizes[lead + n] != 1 else names[lead + n]
            for n in range(len(dims))
        )
        or "0"
    )


def _lower(lowering: Lowering, node: Node) -> None:
    x, out = lowering.operand(node.tensor("x")), lowering.operand(node.result)
    if is_empty(out.type):
        return
    along, given = node.optional_int("along"), node.ints("given")
    mode, include_self = node.str("mode"), node.bool("include_self")
    indices = [lowering.operand(value) for value in node.tensors("indices")]
    fill = node.tensor_or_scalar("source")
    source = lowering.operand(fill) if isinstance(fill, Value) else None
    entries = _Entries(out, indices, source, along, given)
    if any(isinstance(size, int) and size == 0 for size in (*entries.sizes, *entries.rows)):
        emit_copy(lowering, x, out)
        return
    inputs = {f"INDEX{n}": index for n, index in enumerate(indices)}
    if source is not None:
        inputs["SOURCE"] = source
    entry = (
        f"SOURCE({entries.source_at})" if isinstance(fill, Value) else glsl_number(fill, out.dtype)
    )
    if (
        include_self
        and mode != "mean"
        and _in_tiles(lowering, x, out, indices, source, entry, along, given, mode)
    ):
        return
    emit_copy(lowering, x, out)
    kernel = _Emitter(lowering, out, entries, inputs, entry)
    if mode == "mean":
        kernel.mean(include_self)
    elif include_self and _many_for_few(lowering, entries) and mode in _parallel(out.dtype):
        kernel.at_once(mode)
    else:
        if not include_self:
            kernel.each(_identity(mode, out.dtype), "set")
        kernel.each("b = " + entry, mode)


def _in_tiles(
    lowering: Lowering,
    x: Operand,
    out: Operand,
    indices: Sequence[Operand],
    source: Operand | None,
    value: str,
    along: int | None,
    given: Sequence[int],
    mode: str,
) -> bool:
    """Emits a scatter along one dim as one dispatch, if that is the faster way. Returns whether it
    does."""
    index = indices[0]
    if along is not None:
        others = [d for d in range(len(out.dims)) if d != along]
        if not all(_dims.same(index.dims[d], out.dims[d]) for d in others):
            return False
        return emit_tiles(
            lowering,
            x,
            out,
            index,
            source,
            value,
            along,
            index.dims[along],
            False,
            mode,
            _COMBINE[mode],
        )
    if len(given) != 1 or len(index.dims) > 1:
        return False
    entries = index.dims[0] if index.dims else 1
    return emit_tiles(
        lowering, x, out, index, source, value, given[0], entries, True, mode, _COMBINE[mode]
    )


def _many_for_few(lowering: Lowering, entries: _Entries) -> bool:
    """Whether rows are too few to keep the device busy."""
    count, rows = _dims.upper(entries.count), _dims.upper(_dims.product(entries.rows))
    profile = lowering.traits.profile
    return count >= profile.min_atomic_entries and rows <= profile.busy_invocations


def _identity(mode: str, dtype: DType) -> str:
    acc = acc_of(dtype)
    if dtype in _RANGES:
        low, high = _RANGES[dtype]
        return "b = " + {"add": "0", "prod": "1", "amax": str(low), "amin": str(high)}[mode]
    lowest = {
        "float": "-PV_INF",
        "int": "PV_INT_MIN",
        "int64_t": "PV_INT64_MIN",
        "double": "double(-PV_INF)",
    }[acc]
    highest = {
        "float": "PV_INF",
        "int": "PV_INT_MAX",
        "int64_t": "PV_INT64_MAX",
        "double": "double(PV_INF)",
    }[acc]
    return "b = " + {"add": f"{acc}(0)", "prod": f"{acc}(1)", "amax": lowest, "amin": highest}[mode]


class _Emitter:
    """Emits the dispatches of one scatter."""

    def __init__(
        self,
        lowering: Lowering,
        out: Operand,
        entries: _Entries,
        inputs: dict[str, Operand],
        entry: str,
    ) -> None:
        self.lowering, self.out, self.entries, self.inputs, self.entry = (
            lowering,
            out,
            entries,
            inputs,
            entry,
        )
        self.acc = acc_of(out.dtype)
        self.target = ", ".join(entries.target) or "0"
        self.numbers: dict[str, Size] = {
            f"entries_{n}": size for n, size in enumerate(entries.sizes)
        }
        self.numbers.update({f"x_size_{d}": out.dims[d] for d in entries.chosen})

    def _emit(
        self,
        body: str,
        outputs: Sequence[Operand],
        over: Sequence[Size],
        more: dict[str, Size],
        atomic: bool = False,
        inputs: dict[str, Operand] | None = None,
        combine: str = "",
        walk: tuple[int, ...] = (),
    ) -> None:
        named = {**self.numbers, **more}
        used = {**self.inputs, **(inputs or {})}
        used = {name: operand for name, operand in used.items() if f"{name}(" in body}
        helpers = (("COMBINE(a, b)", combine),) if combine else ()
        spec = MapSpec(
            body, tuple(used), tuple(named), helpers=helpers, stores=False, atomic=atomic, walk=walk
        )
        emit_map(self.lowering, spec, list(used.values()), named, outputs, over)

    def each(self, made: str, mode: str) -> None:
        """Every row's entries in their order; `made` sets `b`."""
        entries = self.entries
        before = "" if mode == "set" else f"{self.acc} a = R({self.target});"
        body = (
            f"LOOPS(loop(last - first))"
            f" for (int m = first; m < last; m++) {{ {entries.decode('m')} {before} {self.acc} {made};"
            f" R_PUT({self.target}, {_COMBINE[mode]}); }}"
        )
        count = entries.count
        step = max(self.lowering.traits.max_iterations // 2, 1)
        for first in range(0, max(_dims.upper(count), 1), step):
            last = (
                count if first + step >= _dims.upper(count) else _dims.minimum(count, first + step)
            )
            self._emit(body, [self.out], entries.rows, {"first": first, "last": last})

    def at_once(self, mode: str) -> None:
        """All entries of all rows at once."""
        entries = self.entries
        decode = entries.decode(f"i{len(entries.rows)}")
        over = (*entries.rows, entries.count)
        # Neighbouring invocations have neighbouring columns, if there are some.
        last = len(entries.rows)
        walk = (
            ()
            if not self.lowering.traits.profile.coalesces_accesses
            or _dims.upper(entries.rows[-1]) < 8
            else (last, *range(last))
        )
        if mode != "set":
            join = "R_ADD" if mode == "add" else "R_JOIN"
            self._emit(
                f"{decode} {join}({self.target}, {self.entry});",
                [self.out],
                over,
                {},
                atomic=True,
                combine=_COMBINE[mode],
                walk=walk,
            )
            return
        winner = self.lowering.temporary(TensorType(DType.int32, self.out.dims))
        nothing = MapSpec("r = 0;", ())
        emit_map(self.lowering, nothing, [], {}, [winner])
        number = f"i{len(entries.rows)} + 1"
        self._emit(
            f"{decode} R_MAX({self.target}, {number});", [winner], over, {}, atomic=True, walk=walk
        )
        body = (
            f"{decode} if (WINNER({self.target}) == {number}) R_PUT({self.target}, {self.entry});"
        )
        self._emit(body, [self.out], over, {}, inputs={"WINNER": winner}, walk=walk)

    def mean(self, include_self: bool) -> None:
        """The mean of the entries, and with `include_self` of the element too."""
        counts = self.lowering.temporary(TensorType(DType.int32, self.out.dims))
        emit_map(self.lowering, MapSpec(f"r = {int(include_self)};", ()), [], {}, [counts])
        if not include_self:
            self.each(f"b = {self.acc}(0)", "set")
        self.each("b = " + self.entry, "add")
        kept = self.out
        self.out, self.acc, text = counts, "int", "b = 1"
        self.each(text, "add")
        self.out, self.acc = kept, acc_of(kept.dtype)
        at = ", ".join(f"i{d}" for d in range(len(kept.dims))) or "0"
        divide = (
            f"a / {self.acc}(n)" if kept.dtype.is_float else f"pv_floor_divide(a, {self.acc}(n))"
        )
        body = f"int n = COUNT({at}); {self.acc} a = R({at}); if (n > 0) R_PUT({at}, {divide});"
        emit_map(
            self.lowering, MapSpec(body, ("COUNT",), stores=False), [counts], {}, [kept], kept.dims
        )


define(NAME, _shape, Kernel(_lower))

"""Scans along a dim: cumsum, cumprod, logcumsumexp, cummax, cummin."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.elements import ACC_TYPES, conversions, extreme
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.map import MapSpec, emit_map
from purevk.lower.numbers import gcd4
from purevk.lower.rows import RowLoops, by_dim, column_team
from purevk.ops.builder import Builder
from purevk.ops.promotion import float_type
from purevk.ops.registry import Kernel, ShapeError, define, rewrite
from purevk.ops.shapes import is_empty, wrap
from purevk.tuning import DeviceTraits

NAME = "purevk.scan"


class Scan(NamedTuple):
    """How a running value is computed, as GLSL.

    Attributes:
        start: the initial value (LOWEST and HIGHEST are the extremes of the computing type).
        combine: joins the running value a and the element b.
        beats: whether b replaces a, for scans that give the index too.
        logarithm: the kernel keeps sums of exponentials instead of their logarithms.
        wide: float32 is computed in double precision where the device can, as torch does.
    """

    start: str = "ACC(0)"
    combine: str = "((a) + (b))"
    beats: str = ""
    logarithm: bool = False
    wide: bool = False


_KINDS = {
    "sum": Scan(wide=True),
    "prod": Scan("ACC(1)", "((a) * (b))", wide=True),
    "logsumexp": Scan("-PV_INF", "pv_logaddexp(a, b)", logarithm=True),
    "max": Scan("LOWEST", beats="((b) >= (a))"),
    "min": Scan("HIGHEST", beats="((b) <= (a))"),
}


def _shape(
    x: TensorType, kind: str, dim: int, dtype: DType, index: DType | None = None
) -> TensorType | tuple[TensorType, TensorType]:
    """`index`: the dtype of the second result, the indices of the extremes."""
    made = x.with_dtype(dtype)
    return (made, made.with_dtype(index)) if index else made


def _lower(lowering: Lowering, node: Node) -> None:
    x, outs = lowering.operand(node.tensor("x")), [lowering.operand(v) for v in node.results]
    if is_empty(x.type):
        return
    at = wrap(node.int("dim"), len(x.dims))
    loops = RowLoops.of(x, outs[0], at)
    if len(loops.sizes) > 4:
        x = dense(lowering, x)
        loops = RowLoops.of(x, outs[0], at)
    emit_scan(lowering, _KINDS[node.str("kind")], x, outs, loops)


def longest_row(traits: DeviceTraits) -> int:
    """How long a row may be that the kernel takes whole. It joins the lanes for each of its items."""
    return 24 * traits.max_iterations


def emit_scan(
    lowering: Lowering,
    how: Scan,
    x: Operand,
    outs: list[Operand],
    loops: RowLoops,
) -> None:
    """Appends the dispatches of a scan along rows that at most 4 dims address."""
    traits, profile, out = lowering.traits, lowering.traits.profile, outs[0]
    rows, length = loops.count, loops.length
    x_strides, out_strides = loops.x_strides, loops.out_strides
    step, out_step = loops.x_step, loops.out_step
    acc = (
        "int64_t"
        if DType.int64 in (x.dtype, out.dtype) and not out.dtype.is_float
        else out.dtype.acc
        if out.dtype.is_float
        else "int"
    )
    if how.wide and out.dtype is DType.float32 and traits.has("float64"):
        acc = "double"
    many, long = _dims.upper(rows), _dims.upper(length)
    contiguous, adjacent = (
        _is_one(step) and _is_one(out_step),
        bool(x_strides) and _is_one(x_strides[0]) and _is_one(out_strides[0]) and not _is_one(step),
    )
    if profile.needs_many_invocations:
        alone = not adjacent and (long <= 64 or (many >= 2**16 and long <= 4096))
    else:
        alone = long + 4 <= traits.max_iterations and many >= 8
    part = profile.scan_part_elements
    cut = not alone and not how.beats and long >= 4 * part
    cut = cut and (many < 64 or long > longest_row(traits))
    # Adjacent columns are scanned together.
    columns = adjacent and profile.has_fast_shared_memory and not (alone or cut)
    shuffles = traits.has("subgroup_arithmetic", "subgroup_basic")
    subgroup = (
        contiguous
        and shuffles
        and profile.needs_many_invocations
        and long >= traits.subgroup_size
        and many >= 16 * traits.processors
    )
    if subgroup:
        alone = cut = False
    others = [
        x.offset,
        *(each.offset for each in outs),
        *x_strides[columns:],
        *out_strides[columns:],
    ]
    others += [loops.sizes[0], step, out_step] if columns else [length]
    vector = (
        profile.overlaps_loads
        and not alone
        and not cut
        and (contiguous or columns)
        and gcd4(*others)
        and _reads_vectors(x, out)
    )
    macros: dict[str, str | int] = {
        **conversions(x.dtype, out.dtype, acc),
        "INIT": extreme(how.start, acc),
        "COMBINE(a, b)": how.combine,
        "VEC4": int(vector),
    }
    if how.beats:
        macros.update({"ARG": 1, "BEATS(b, a)": how.beats})
        macros["INDEX_PAIRS"] = int(vector and outs[1].dtype is DType.int64)
    macros["LOGARITHM"] = int(how.logarithm)
    if acc == "int64_t" or outs[-1].dtype is DType.int64:
        macros["HAS_INT64"] = "1"
    parts = _dims.ceil_div(length, part) if cut else 1
    totals = lowering.temporary(TensorType(ACC_TYPES[acc], (rows, parts))) if cut else None
    local, width = min(profile.workgroup_size, traits.max_invocations), 1
    if alone:
        macros["ROW_PER_INVOCATION"] = 1
        width = local
    elif subgroup:
        local = min(128, traits.max_invocations) // traits.subgroup_size * traits.subgroup_size
        width = local // traits.subgroup_size
        macros.update({"ROW_PER_SUBGROUP": 1, "ITEMS": 4})
    elif columns:
        # Joining lanes costs exponentials. With more items there are fewer lanes.
        items = macros["ITEMS"] = 16 if how.logarithm else 8
        costly = bool(how.beats or how.logarithm or acc in ("int64_t", "double"))
        local, width = _columns(
            traits, x.dtype.itemsize, many, long, items, 4 if vector else 1, costly
        )
        macros.update({"WIDTH": width, "COLUMN": 1})
    elif vector:
        macros["ITEMS"] = 16
    macros["LOCAL"] = local
    params: dict[str, Size] = {
        "rows": rows,
        "row_length": length,
        "x_step": step,
        "out_step": out_step,
        **by_dim("x", x_strides, 4),
        **by_dim("out", out_strides, 4),
        **by_dim("size", loops.sizes, 3, fill=1),
    }
    if cut:
        params |= {"part": part, "parts": parts}
    tasks = _dims.ceil_div(rows, 4) if columns and vector else rows * parts
    lowering.dispatch(
        "reduce/scan.comp",
        {"x": x, **dict(zip(("out", "index"), outs)), "totals": totals},
        params,
        macros,
        local=local,
        grid=lowering.linear_grid(tasks, width),
        flops=rows * length,
    )
    if totals is not None:
        _carry(lowering, how, out, totals, loops)


def _reads_vectors(*operands: Operand) -> bool:
    allowed = (DType.float32, DType.float16, DType.int32)
    return all(operand.dtype in allowed for operand in operands)


def _columns(
    traits: DeviceTraits,
    itemsize: int,
    count: int,
    length: int,
    items: int,
    each: int,
    costly: bool,
) -> tuple[int, int]:
    """The invocations of a workgroup, and how many neighbouring columns it takes at once: those of
    one memory transaction, or more if they are short. If steps are costly, it takes half a
    transaction, so that a multiprocessor has several workgroups, and one computes while others
    read and write.

    Args:
        itemsize: bytes of an element.
        count, length: how many columns there are, and the elements of one.
        items: elements that an invocation takes per iteration.
        each: columns of one vector.
        costly: whether the running value is large, and joining two of them is costly.
    """
    state = (16 if costly else 4) * each
    most = min(256 if costly else 1024, traits.max_invocations, traits.max_shared_memory // state)
    most = 1 << most.bit_length() - 1
    nbytes = itemsize * each
    width = max(min(traits.profile.transaction_bytes // (2 if costly else 1) // nbytes, 32), 1)
    width, lanes = column_team(width, most, -(-count // each), (2 * length - 1) // items)
    return width * lanes, width


def _is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def _carry(
    lowering: Lowering,
    how: Scan,
    out: Operand,
    totals: Operand,
    loops: RowLoops,
) -> None:
    """Joins to the elements of each part the total of the parts before it. `totals`: that of each
    part of each row."""
    sums = lowering.temporary(totals.type)
    rows, parts = totals.dims
    emit_scan(lowering, how, totals, [sums], RowLoops([rows], [parts], [parts], parts, 1, 1))
    # The outer dims and the row as one operand.
    dims = (*reversed(loops.sizes), loops.length)
    layout = Layout(out.offset, (*reversed(loops.out_strides), loops.out_step))
    target = Operand(out.storage, layout, TensorType(out.dtype, dims))
    rank = len(dims)
    at = ", ".join(f"i{d}" for d in range(rank))
    number = "0"
    for d in range(rank - 1):
        number = f"({number} * size_{d} + i{d})"
    size = lowering.traits.profile.scan_part_elements
    body = (
        f"int part = i{rank - 1} / {size};"
        f" if (part > 0) R_PUT({at}, COMBINE(SUMS({number}, part - 1), R({at})));"
    )
    spec = MapSpec(body, ("SUMS",), helpers=(("COMBINE(a, b)", how.combine),), stores=False)
    emit_map(lowering, spec, [sums], {}, [target], dims)


define(NAME, _shape, Kernel(_lower))


# -- operators -----------------------------------------------------------------------------------
def _scan(
    builder: Builder, x: Value, kind: str, dim: int, dtype: DType, index: DType | None = None
) -> tuple[Value, ...]:
    """Emits `purevk.scan`. A 0-d tensor counts as one of one element."""
    if x.type.rank:
        return builder.emit_all(NAME, x, kind, dim, dtype, index)
    scanned = builder.emit_all(NAME, builder.aten.view(x, (1,)), kind, 0, dtype, index)
    return tuple(builder.aten.view(value, ()) for value in scanned)


def _cumulative_shape(x: TensorType, dim: int, dtype: DType | None = None) -> TensorType:
    wrap(dim, x.rank)
    return x.with_dtype(
        dtype or (x.dtype if x.dtype.is_float or x.dtype.is_complex else DType.int64)
    )


def _cumulative(kind: str) -> Callable[..., tuple[Value, ...]]:
    def expand(
        builder: Builder, node: Node, x: Value, dim: int, dtype: DType | None
    ) -> tuple[Value, ...]:
        made = node.result.type.dtype
        if x.type.dtype is not made and (x.type.dtype.is_float or made.is_float):
            x = builder.aten._to_copy(x, made)
        return _scan(builder, x, kind, dim, made)

    return expand


rewrite("aten.cumsum.default", _cumulative_shape)(_cumulative("sum"))
rewrite("aten.cumprod.default", _cumulative_shape)(_cumulative("prod"))


@rewrite("aten.logcumsumexp.default", lambda x, dim: x.with_dtype(float_type(x.dtype)))
def _logcumsumexp(builder: Builder, node: Node, x: Value, dim: int) -> tuple[Value, ...]:
    if not x.type.dtype.is_float:
        raise ShapeError("logcumsumexp of integers")
    return _scan(builder, x, "logsumexp", dim, x.type.dtype)


for _name in ("max", "min"):
    rewrite(f"aten.cum{_name}.default", lambda x, dim: (x, x.with_dtype(DType.int64)))(
        lambda builder, node, x, dim, kind=_name: _scan(
            builder, x, kind, dim, x.type.dtype, node.results[1].type.dtype
        )
    )

"""Running sums, products and extremes along a dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.lowering import Lowering, Operand
from purevk.ops.map_kernel import MapSpec, emit_map
from purevk.ops.matmul import dense
from purevk.ops.promotion import float_type
from purevk.ops.rearrange import is_empty, row
from purevk.ops.reduction import conversions
from purevk.ops.registry import Kernel, Operator, ShapeError, register
from purevk.ops.rows import collapse
from purevk.ops.shapes import wrap

NAME = "purevk.scan"
PART = 4096  # elements of a row that one workgroup takes, where rows are long and few


@dataclass(frozen=True)
class Scan:
    """Start and step; `beats`: when b replaces a, where the index is wanted too."""

    start: str = "ACC(0)"
    combine: str = "((a) + (b))"
    beats: str = ""


_KINDS = {
    "sum": Scan(),
    "prod": Scan("ACC(1)", "((a) * (b))"),
    "logsumexp": Scan("-PV_INF", "pv_logaddexp(a, b)"),
    "max": Scan(beats="((b) >= (a))"),
    "min": Scan(beats="((b) <= (a))"),
}


def _shape(x: TensorType, kind: str, dim: int, dtype: DType, index: DType | None = None) -> Any:
    """`index`: the dtype of the second result, the places of the extremes."""
    made = x.with_dtype(dtype)
    return (made, made.with_dtype(index)) if index else made


def _lower(lowering: Lowering, node: Node) -> None:
    x_value, kind, dim, _, _ = node.args
    x, outs = lowering.operand(x_value), [lowering.operand(value) for value in node.results]
    if is_empty(x.type):
        return
    at = wrap(dim, len(x.dims))
    loops = _loops(x, outs[0], at)
    if loops is None:
        x = dense(lowering, x)
        loops = _loops(x, outs[0], at)
    sizes, (mine, theirs) = loops
    rows, length = _dims.product(sizes), x.dims[at]
    emit_scan(lowering, _KINDS[kind], x, outs, sizes, mine, theirs, rows, length, x.strides[at], outs[0].strides[at])


def _loops(x: Operand, out: Operand, at: int) -> tuple | None:
    rest = [d for d in range(len(x.dims)) if d != at]
    loop, steps = collapse([x.dims[d] for d in rest], [x.strides[d] for d in rest], [out.strides[d] for d in rest])
    if len(loop) > 4:
        return None
    return list(reversed(loop)), [list(reversed(each)) for each in steps]


def emit_scan(
    lowering: Lowering, how: Scan, x: Operand, outs: list[Operand], sizes: list[Size], mine: list[Size], theirs: list[Size],
    rows: Size, length: Size, step: Size, out_step: Size,
) -> None:  # fmt: skip
    """Appends the dispatches of a scan along rows that up to 4 outer dims (`sizes`, innermost first) address."""
    traits, out = lowering.traits, outs[0]
    acc = "int64_t" if DType.int64 in (x.dtype, out.dtype) and not out.dtype.is_float else out.dtype.acc if out.dtype.is_float else "int"
    many, long = _dims.upper(rows), _dims.upper(length)
    if traits.is_cpu:
        alone = long <= traits.max_iterations and many >= 8
    else:
        alone = long <= 64 or many >= 2**16 and long <= 4096
    cut = not alone and not how.beats and long >= 4 * PART and many < 64
    local = 64 if traits.is_cpu else min(256, traits.max_invocations)
    # Columns beside one another are walked together.
    columns = not (alone or cut or traits.is_cpu) and bool(mine) and not _is_one(step) and _is_one(mine[0])
    macros: dict[str, Any] = {**conversions(x.dtype, out.dtype, acc), "INIT": how.start, "COMBINE(a, b)": how.combine, "LOCAL": local}
    buffers: list[tuple[Operand, str]] = [(x, "r"), *((each, "w") for each in outs)]
    if how.beats:
        macros.update({"ARG": 1, "BEATS(b, a)": how.beats, "T_INDEX": outs[1].dtype.glsl})
    if acc == "int64_t" or outs[-1].dtype is DType.int64:
        macros["HAS_INT64"] = "1"
    parts = _dims.ceil_div(length, PART) if cut else 1
    if cut:
        totals = lowering.temporary(TensorType(_ACC_TYPES[acc], (rows, parts)))
        buffers.append((totals, "w"))
        macros["TOTALS"] = 1
    if alone:
        macros["ROW_PER_INVOCATION"] = 1
    if columns:
        macros.update({"WIDTH": 32, "ITEMS": 16})
    pad = lambda items, count, fill: [*items, *([fill] * count)][:count]  # noqa: E731
    params = [
        x.offset, out.offset, rows, length, step, out_step, *pad(mine, 4, 0), *pad(theirs, 4, 0), *pad(sizes, 3, 1), PART, parts,
        outs[-1].offset,
    ]  # fmt: skip
    groups = rows * parts
    lowering.dispatch(
        "scan.comp", buffers, macros=macros, params=params, constants={100: local},
        grid=lowering.linear_grid(groups, local if alone else 32 if columns else 1), flops=rows * length,
    )  # fmt: skip
    if cut:
        _carry(lowering, how, out, totals, sizes, theirs, rows, length, out_step, parts)


def _is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


_ACC_TYPES = {"float": DType.float32, "int": DType.int32, "int64_t": DType.int64, "double": DType.float64}


def _carry(
    lowering: Lowering, how: Scan, out: Operand, totals: Operand, sizes: list[Size], theirs: list[Size], rows: Size,
    length: Size, out_step: Size, parts: Size,
) -> None:  # fmt: skip
    """Joins what came before a part to its elements."""
    sums = lowering.temporary(totals.type)
    emit_scan(lowering, how, totals, [sums], [rows], [parts], [parts], rows, parts, 1, 1)
    # The outer dims and the row as one operand; `i` is a place in it.
    dims = (*reversed(sizes), length)
    layout = Layout(out.offset, (*reversed(theirs), out_step))
    target = Operand(out.storage, layout, TensorType(out.dtype, dims))
    rank = len(dims)
    at = ", ".join(f"i{d}" for d in range(rank))
    number = "0"
    for d in range(rank - 1):
        number = f"({number} * size_{d} + i{d})"
    body = f"int part = i{rank - 1} / {PART}; if (part > 0) R_PUT({at}, COMBINE(SUMS({number}, part - 1), R({at})));"
    spec = MapSpec(body, ("SUMS",), macros=(("COMBINE(a, b)", how.combine),), stores=False)
    emit_map(lowering, spec, [sums], [], [target], dims)


register(Operator(NAME, _shape, Kernel(_lower)))


# -- operators ---------------------------------------------------------------------------------------------------------
def _scan(builder: Any, x: Value, kind: str, dim: int, dtype: DType, index: DType | None = None) -> Any:
    if not x.type.rank:
        made = builder.emit(NAME, builder.emit("aten.view.default", x, (1,)), kind, 0, dtype, index)
        made = made if isinstance(made, tuple) else (made,)
        flat = tuple(builder.emit("aten.view.default", each, ()) for each in made)
        return flat if len(flat) > 1 else flat[0]
    return builder.emit(NAME, x, kind, dim, dtype, index)


def _cumulative_shape(x: TensorType, dim: int, dtype: DType | None = None) -> TensorType:
    wrap(dim, x.rank)
    return x.with_dtype(dtype or (x.dtype if x.dtype.is_float else DType.int64))


def _cumulative(kind: str) -> Any:
    def expand(builder: Any, node: Node, x: Value, dim: int, dtype: Any) -> Value:
        made = node.result.type.dtype
        if x.type.dtype is not made and (x.type.dtype.is_float or made.is_float):
            x = builder.emit("aten._to_copy.default", x, made)
        return _scan(builder, x, kind, dim, made)

    return expand


def _refuse(node: Node, traits: Any) -> str | None:
    wide = DType.float64 in (node.args[0].type.dtype, node.results[0].type.dtype)
    return "no kernel for float64" if wide else None


row("aten.cumsum.default", _cumulative_shape, _cumulative("sum"))
row("aten.cumprod.default", _cumulative_shape, _cumulative("prod"))


def _logcumsumexp(builder: Any, node: Node, x: Value, dim: int) -> Value:
    if not x.type.dtype.is_float:
        raise ShapeError("logcumsumexp of integers")
    return _scan(builder, x, "logsumexp", dim, x.type.dtype)


row("aten.logcumsumexp.default", lambda x, dim: x.with_dtype(float_type(x.dtype)), _logcumsumexp, supports=_refuse)
for _name in ("max", "min"):
    row(f"aten.cum{_name}.default", lambda x, dim: (x, x.with_dtype(DType.int64)),
        lambda builder, node, x, dim, kind=_name: _scan(builder, x, kind, dim, x.type.dtype, node.results[1].type.dtype))  # fmt: skip

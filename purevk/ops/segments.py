"""How often values occur, and reductions of parts of a dim."""

from __future__ import annotations

from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, TensorType, Value
from purevk.ops.creation import constant
from purevk.ops.map_kernel import acc_of, coordinates, mapped
from purevk.ops.promotion import wide_type
from purevk.ops.rearrange import row
from purevk.ops.registry import ShapeError
from purevk.ops.shapes import reduced, wrap
from purevk.ops.sort import NAME as SORT


# -- the most frequent value -------------------------------------------------------------------------------------------
def _mode_shape(x: TensorType, dim: int = -1, keepdim: bool = False) -> tuple[TensorType, TensorType]:
    at = wrap(dim, x.rank)
    if x.rank and isinstance(x.dims[at], int) and x.dims[at] == 0:
        raise ShapeError(f"the most frequent of no elements of {x}")
    values = x.with_dims(reduced(x.dims, (at,), keepdim))
    return values, values.with_dtype(DType.int64)


def _mode(builder: Any, node: Node, x: Value, dim: int, keepdim: bool) -> tuple[Value, Value]:
    if not x.type.rank:
        return x, constant(builder, 0, (), DType.int64)
    at = wrap(dim, x.type.rank)
    values, places = builder.emit(SORT, x, at, False, x.type.dims[at], DType.int64)
    # How many equal elements end here: the elements of a run lie between its first place, found by halves, and its last.
    here = coordinates(x.type.rank, **{f"d{at}": "m"})
    body = (
        f"{acc_of(x.type.dtype)} v = V({coordinates(x.type.rank)}); int low = 0, high = i{at};"
        f" for (; low < high;) {{ int m = (low + high) / 2; if (V({here}) != v) low = m + 1; else high = m; }} r = i{at} - low + 1;"
    )
    runs = mapped(builder, body, {"V": values}, x.type.with_dtype(DType.int32))
    best = builder.emit("aten.argmax.default", runs, at, True)
    made = [builder.emit("aten.gather.default", each, at, best) for each in (values, places)]
    return tuple(builder.emit("aten.view.default", each, result.type.dims) for each, result in zip(made, node.results))


row("aten.mode.default", _mode_shape, _mode)


# -- histograms --------------------------------------------------------------------------------------------------------
def _histogram(builder: Any, node: Node, x: Value, bins: int, low: Any, high: Any) -> Value:
    """Counts in `bins` parts of [low, high]; of the whole range of x if both are 0."""
    dtype, wide = node.result.type.dtype, wide_type(x.type.dtype)
    counts = constant(builder, 0.0, (bins,), wide)
    x = builder.emit("aten._to_copy.default", builder.emit("aten.view.default", x, (x.type.numel,)), wide)
    if low == high == 0:
        low, high = (builder.emit(f"aten.{name}.default", x, (), False) for name in ("amin", "amax"))
        same = builder.emit("aten.eq.Tensor", low, high)
        low, high = (
            builder.emit("aten.where.self", same, builder.emit("aten.add.Tensor", each, step, 1), each)
            for each, step in ((low, -1.0), (high, 1.0))
        )
        width = builder.emit("aten.sub.Tensor", high, low, 1)
    else:
        low, high = (float(low) - 1, float(high) + 1) if low == high else (float(low), float(high))
        width = high - low
    above, below = builder.emit("aten.ge.Tensor", x, low), builder.emit("aten.le.Tensor", x, high)
    inside = builder.emit("aten._to_copy.default", builder.emit("aten.logical_and.default", above, below), wide)
    place = builder.emit("aten.mul.Tensor", builder.emit("aten.sub.Tensor", x, low, 1), float(bins))
    place = builder.emit("aten.clamp.default", builder.emit("aten.div.Tensor", place, width), 0, bins - 1)
    place = builder.emit("aten._to_copy.default", place, DType.int32)
    made = builder.emit("aten.index_put.default", counts, (place,), inside, True)
    return builder.emit("aten._to_copy.default", made, dtype)


row("aten.histc.default", lambda x, bins=100, min=0, max=0: x.with_dims((bins,)), _histogram)


# -- segments ----------------------------------------------------------------------------------------------------------
def _segment_shape(
    data: TensorType, reduce: str, lengths: TensorType | None = None, indices: Any = None, offsets: TensorType | None = None,
    axis: int = 0, unsafe: bool = False, initial: Any = None,
) -> TensorType:  # fmt: skip
    given = lengths if lengths is not None else offsets
    if given is None:
        raise ShapeError("segments need lengths or offsets")
    count = given.dims[-1] if lengths is not None else given.dims[-1] - 1
    return data.with_dims((*given.dims[:-1], count, *data.dims[given.rank :]))


_SEGMENT = {
    "sum": ("0.0", "r += v;"), "mean": ("0.0", "r += v;"), "prod": ("1.0", "r *= v;"),
    "max": ("-PV_INF", "r = pv_max(r, v);"), "min": ("PV_INF", "r = pv_min(r, v);"),
}  # fmt: skip


def _segment(
    builder: Any, node: Node, data: Value, kind: str, lengths: Any, indices: Any, offsets: Any, axis: int, unsafe: bool,
    initial: float | None,
) -> Value:  # fmt: skip
    given = lengths if lengths is not None else offsets
    lead = given.type.rank - 1
    if lengths is not None:
        end = builder.emit("aten.cumsum.default", given, lead, DType.int64)
        start = builder.emit("aten.sub.Tensor", end, given, 1)
    else:
        count = given.type.dims[-1]
        start = builder.emit("aten.slice.Tensor", given, lead, 0, count - 1, 1)
        end = builder.emit("aten.slice.Tensor", given, lead, 1, count, 1)
    first, step = _SEGMENT[kind]
    first = first if initial is None else repr(float(initial))
    place = ", ".join(f"i{d}" for d in range(lead + 1))
    here = coordinates(data.type.rank, **{f"d{lead}": "k"})
    finish = ""
    if kind == "mean":
        finish = " if (to > from) r /= float(to - from);" + ("" if initial is not None else " else r = PV_NAN;")
    body = (
        f"int from = max(int(START({place})), 0), to = min(int(END({place})), x_size_{lead}); r = {first};"
        f" for (int k = from; k < to; k++) {{ float v = X({here}); {step} }}{finish}"
    )
    return mapped(builder, body, {"X": data, "START": start, "END": end}, node.result.type)


def _refuse_long(node: Node, traits: Any) -> str | None:
    given = node.args[2] if node.args[2] is not None else node.args[4]
    return traits.too_long(node.args[0].type.dims[given.type.rank - 1])


row("aten.segment_reduce.default", _segment_shape, _segment, supports=_refuse_long)

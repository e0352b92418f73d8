"""Reductions of segments of a dim, whose lengths or offsets a tensor gives."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, TensorType, Value
from purevk.lower.map import coordinates
from purevk.ops.builder import Builder
from purevk.ops.fold import Fold, Loop, folded
from purevk.ops.registry import ShapeError, rewrite
from purevk.ops.signatures import signature


@signature(
    "data, reduce, lengths=None, indices=None, offsets=None, axis: int = 0, unsafe=False, "
    "initial=None"
)
def _segment_shape(
    data: TensorType, lengths: TensorType | None, offsets: TensorType | None
) -> TensorType:
    given = lengths if lengths is not None else offsets
    if given is None:
        raise ShapeError("segments need lengths or offsets")
    count = given.dims[-1] if lengths is not None else given.dims[-1] - 1
    return data.with_dims((*given.dims[:-1], count, *data.dims[given.rank :]))


_SEGMENT = {
    "sum": ("0.0", "r += v;"), "mean": ("0.0", "r += v;"), "prod": ("1.0", "r *= v;"),
    "max": ("-PV_INF", "r = pv_max(r, v);"), "min": ("PV_INF", "r = pv_min(r, v);"),
}  # fmt: skip


def _given(lengths: Value | None, offsets: Value | None) -> Value:
    given = lengths if lengths is not None else offsets
    if given is None:
        raise ShapeError("segments need lengths or offsets")
    return given


@rewrite("aten.segment_reduce.default", _segment_shape)
def _segment(
    builder: Builder,
    node: Node,
    data: Value,
    kind: str,
    lengths: Value | None,
    indices: Value | None,
    offsets: Value | None,
    axis: int,
    unsafe: bool,
    initial: float | None,
) -> Value:
    given = _given(lengths, offsets)
    lead = given.type.rank - 1
    if lengths is not None:
        end = builder.aten.cumsum(lengths, lead, DType.int64)
        start = builder.aten.sub.Tensor(end, lengths)
    else:
        count = given.type.dims[-1]
        start = builder.aten.slice.Tensor(given, lead, start=0, end=count - 1)
        end = builder.aten.slice.Tensor(given, lead, start=1, end=count)
    first, step = _SEGMENT[kind]
    segment = ", ".join(f"i{d}" for d in range(lead + 1))
    here = coordinates(data.type.rank, **{f"d{lead}": "k"})
    finish = ""
    if kind == "mean":
        finish = "if (to > from) r /= float(to - from);" + (
            "" if initial is not None else " else r = PV_NAN;"
        )
    size = f"x_size_{lead}"
    fold = Fold(
        (Loop("k", "from", "to", data.type.dims[lead], size),),
        f"T_COORD v = X({here}); {step}",
        join=step,
        start=f"r = {first if initial is None else repr(float(initial))};",
        empty=f"r = {first};",
        before=f"int from = max(int(START({segment})), 0), to = min(int(END({segment})), {size});",
        finish=finish,
    )
    inputs = {"X": data, "START": start, "END": end}
    return folded(builder, fold, inputs, node.result.type)[0]

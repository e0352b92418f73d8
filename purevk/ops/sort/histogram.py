"""How often values occur: mode and histograms."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.elements import acc_of
from purevk.lower.map import coordinates
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import constant
from purevk.ops.map import mapped
from purevk.ops.promotion import wide_type
from purevk.ops.registry import ShapeError, rewrite
from purevk.ops.shapes import is_empty, reduced, wrap
from purevk.ops.sort.sort import NAME as SORT
from purevk.tuning import DeviceTraits


# -- the most frequent value ---------------------------------------------------------------------
def _mode_shape(
    x: TensorType, dim: int = -1, keepdim: bool = False
) -> tuple[TensorType, TensorType]:
    at = wrap(dim, x.rank)
    if x.rank and isinstance(x.dims[at], int) and x.dims[at] == 0:
        raise ShapeError(f"the most frequent of no elements of {x}")
    values = x.with_dims(reduced(x.dims, (at,), keepdim))
    return values, values.with_dtype(DType.int64)


@rewrite("aten.mode.default", _mode_shape)
def _mode(builder: Builder, node: Node, x: Value, dim: int, keepdim: bool) -> tuple[Value, Value]:
    if not x.type.rank:
        return x, constant(builder, 0, (), DType.int64)
    at = wrap(dim, x.type.rank)
    values, order = builder.emit_all(SORT, x, at, False, x.type.dims[at], DType.int64)
    # How many equal elements end here: bisection finds the first element of the run.
    here = coordinates(x.type.rank, **{f"d{at}": "m"})
    body = (
        f"LOOPS(loop(32)) {acc_of(x.type.dtype)} v = V({coordinates(x.type.rank)});"
        f" BISECT(i{at}, V({here}) != v) r = i{at} - low + 1;"
    )
    runs = mapped(builder, body, {"V": values}, x.type.with_dtype(DType.int32))
    best = builder.aten.argmax(runs, at, keepdim=True)
    made = [builder.aten.gather(each, at, best) for each in (values, order)]
    values, indices = (
        builder.aten.view(each, result.type.dims) for each, result in zip(made, node.results)
    )
    return values, indices


# -- histograms ----------------------------------------------------------------------------------
@rewrite("aten.histc.default", lambda x, bins=100, min=0, max=0: x.with_dims((bins,)))
def _histogram(builder: Builder, node: Node, x: Value, bins: int, low: float, high: float) -> Value:
    """Counts in `bins` parts of [low, high]; of the whole range of x if both are 0."""
    dtype, wide = node.result.type.dtype, wide_type(x.type.dtype)
    # Integers join in shared memory at once, floats by exchanges that many entries of a bin repeat.
    counts = constant(builder, 0, (bins,), DType.int32)
    x = builder.aten._to_copy(builder.aten.view(x, (x.type.numel,)), wide)
    first: Value | float
    last: Value | float
    width: Value | float
    if low == high == 0:
        ends = [builder.emit(f"aten.{name}.default", x, (), False) for name in ("amin", "amax")]
        same = builder.aten.eq.Tensor(*ends)
        first, last = (
            builder.aten.where.self(same, builder.aten.add.Tensor(end, step), end)
            for end, step in zip(ends, (-1.0, 1.0))
        )
        width = builder.aten.sub.Tensor(last, first)
    else:
        margin = 1.0 if low == high else 0.0
        first, last = float(low) - margin, float(high) + margin
        width = last - first
    above, below = builder.aten.ge.Tensor(x, first), builder.aten.le.Tensor(x, last)
    inside = builder.aten._to_copy(builder.aten.logical_and(above, below), DType.int32)
    bin = builder.aten.mul.Tensor(builder.aten.sub.Tensor(x, first), float(bins))
    bin = builder.aten.clamp(builder.aten.div.Tensor(bin, width), min=0, max=bins - 1)
    bin = builder.aten._to_copy(bin, DType.int32)
    made = builder.aten.index_put(counts, (bin,), inside, accumulate=True)
    return builder.aten._to_copy(made, dtype)


_HISTOGRAMS = (DType.float32, DType.float64)


def _refuse_histogram(node: Node, traits: DeviceTraits) -> str | None:
    x = node.tensor("x").type
    return None if x.dtype in _HISTOGRAMS else f"no kernel for {x.dtype.name}"


def _edges(builder: Builder, x: Value, bins: int, ends: Sequence[float] | None) -> Value:
    """The bounds of equal bins from the least to the largest element, or between two numbers. If
    these are equal, the bins span 1."""
    if ends is None and is_empty(x.type):
        ends = (0, 1)
    if ends is None:
        inputs = {
            name: builder.emit(f"aten.{kind}.default", x, (0,), True)
            for name, kind in (("LOW", "amin"), ("HIGH", "amax"))
        }
        text = "float low = LOW(0), high = HIGH(0);"
    else:
        inputs, text = {}, f"float low = {float(ends[0])!r}, high = {float(ends[1])!r};"
    body = f"{text} EDGES(low, high, (r_size_0 - 1))"
    return mapped(builder, body, inputs, x.type.with_dims((bins + 1,)))


def _binned(
    builder: Builder, x: Value, edges: Sequence[Value], weight: Value | None, density: bool
) -> Value:
    """How many rows of x (or how much of their weight) are between the edges of each column. The last
    edge is included."""
    bins = [edge.type.dims[0] - 1 for edge in edges]
    total = _dims.product(bins)
    dtype = x.type.dtype if weight is not None else DType.int32
    made = constant(builder, 0.0 if weight is not None else 0, (total + 1,), dtype)
    if not is_empty(x.type):
        made = _filled(builder, made, x, edges, weight)
    made = builder.aten._to_copy(made, x.type.dtype)
    made = builder.aten.view(
        builder.aten.slice.Tensor(made, dim=0, start=0, end=total), tuple(bins)
    )
    if density:
        made = builder.aten.div.Tensor(made, builder.aten.sum(made))
        for d, each in enumerate(edges):
            ends = [
                builder.aten.slice.Tensor(each, dim=0, start=first, end=bins[d] + first)
                for first in (1, 0)
            ]
            lengths = builder.aten.sub.Tensor(*ends, 1)
            lengths = builder.aten.view(lengths, (bins[d], *([1] * (len(bins) - d - 1))))
            made = builder.aten.div.Tensor(made, lengths)
    return made


def _filled(
    builder: Builder, zeros: Value, x: Value, edges: Sequence[Value], weight: Value | None
) -> Value:
    """The counts of the bins, and last that of the rows outside of all bins."""
    count, total = x.type.dims[0], zeros.type.dims[0] - 1
    body = "int bin = 0; bool inside = true;"
    for d in range(len(edges)):
        body += f" LOOPS(loop(32)) ADD_BIN(X(i0, {d}), EDGE{d}, edge{d}_size_0)"
    inputs = {"X": x} | {f"EDGE{d}": each for d, each in enumerate(edges)}
    type = TensorType(DType.int32, (count,))
    bin = mapped(
        builder, body + " r = inside ? bin : total;", inputs, type, numbers={"total": total}
    )
    given = (
        builder.aten.view(weight, (count,))
        if weight is not None
        else constant(builder, 1, (count,), DType.int32)
    )
    return builder.aten.index_put(zeros, (bin,), given, accumulate=True)


def _rows(builder: Builder, x: Value, width: Size) -> Value:
    return builder.aten.view(x, (x.type.numel // width, width))


def _all_edges(
    builder: Builder, x: Value, bins: Sequence[int], ends: Sequence[float] | None
) -> list[Value]:
    columns = [builder.aten.select.int(x, dim=1, index=d) for d in range(len(bins))]
    pairs = [None if ends is None else tuple(ends[2 * d : 2 * d + 2]) for d in range(len(bins))]
    return [_edges(builder, *each) for each in zip(columns, bins, pairs)]


def _of_counts(
    builder: Builder,
    x: Value,
    bins: Sequence[int],
    ends: Sequence[float] | None,
    weight: Value | None,
    density: bool,
) -> tuple[Value, Value]:
    x = _rows(builder, x, len(bins))
    edges = _all_edges(builder, x, bins, ends)
    return _binned(builder, x, edges, weight, density), edges[0]


rewrite(
    "aten.histogram.bin_ct",
    lambda x, bins=100, range=None, weight=None, density=False: (
        x.with_dims((bins,)),
        x.with_dims((bins + 1,)),
    ),
    supports=_refuse_histogram,
)(lambda builder, node, x, bins, *rest: _of_counts(builder, x, (bins,), *rest))
rewrite(
    "aten.histogram.bins_tensor",
    lambda x, bins, weight=None, density=False: (x.with_dims((bins.dims[0] - 1,)), bins),
    supports=_refuse_histogram,
)(
    lambda builder, node, x, bins, *rest: (
        _binned(builder, _rows(builder, x, 1), [bins], *rest),
        builder.aten.alias(bins),
    )
)
rewrite(
    "aten._histogramdd_bin_edges.default",
    lambda x, bins, range=None, weight=None, density=False: tuple(
        x.with_dims((count + 1,)) for count in bins
    ),
    supports=_refuse_histogram,
)(
    lambda builder, node, x, bins, ends, *_: _all_edges(
        builder, _rows(builder, x, len(bins)), bins, ends
    )
)
rewrite(
    "aten._histogramdd_from_bin_cts.default",
    lambda x, bins, range=None, weight=None, density=False: x.with_dims(tuple(bins)),
    supports=_refuse_histogram,
)(lambda builder, node, x, *rest: _of_counts(builder, x, *rest)[0])
rewrite(
    "aten._histogramdd_from_bin_tensors.default",
    lambda x, bins, weight=None, density=False: x.with_dims(
        tuple(each.dims[0] - 1 for each in bins)
    ),
    supports=_refuse_histogram,
)(lambda builder, node, x, bins, *rest: _binned(builder, _rows(builder, x, len(bins)), bins, *rest))

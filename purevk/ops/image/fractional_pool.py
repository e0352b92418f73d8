"""Fractional max pooling: windows of one size, at positions that random samples give."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.errors import ShapeError
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.expression import ROUND
from purevk.lower.numbers import rounded
from purevk.ops.builder import Builder
from purevk.ops.fold import Fold, Loop, folded
from purevk.ops.registry import rewrite
from purevk.tuning import DeviceTraits


def _shape(
    x: TensorType, kernel_size: Sequence[int], output_size: Sequence[Size], samples: TensorType
) -> tuple[TensorType, TensorType]:
    rank = len(kernel_size)
    if x.rank not in (rank + 1, rank + 2) or samples.rank != 3:
        raise ShapeError(f"fractional max pooling of {x} with samples {samples}")
    for size, window, made in zip(x.dims[-rank:], kernel_size, output_size):
        if not made + window - 1 <= size:
            raise ShapeError(f"{made} windows of {window} elements in {size}")
    out = x.with_dims((*x.dims[:-rank], *output_size))
    return out, out.with_dtype(DType.int64)


def _refuse(node: Node, traits: DeviceTraits) -> str | None:
    if node.tensor("samples").type.dtype is DType.float64:
        return "no kernel for samples of float64"
    return None


def _expand(
    builder: Builder,
    node: Node,
    x: Value,
    kernel: Sequence[int],
    output: Sequence[Size],
    samples: Value,
) -> tuple[Value, ...]:
    rank = len(kernel)
    lead = x.type.rank - rank
    plane = f"{'i0' if lead == 2 else '0'}, i{lead - 1}"
    # torch computes the positions in the dtype of the samples.
    around = ROUND.get(samples.type.dtype, "($0)")
    text, inside, index = [], [f"i{d}" for d in range(lead)], "0"
    for d, (window, count) in enumerate(zip(kernel, output)):
        size, count = (_dims.specialize(each) for each in (x.type.dims[lead + d], count))
        # In two dims, the last one has the first sample.
        sample = d if rank == 3 else 1 - d
        step = rounded(size - window, DType.float32) / rounded(max(count - 1, 1), DType.float32)
        step = rounded(step, samples.type.dtype)
        shifted = around.replace("$0", f"float(i{lead + d}) + s{d}")
        text.append(
            f"float s{d} = S({plane}, {sample}); int a{d} = {size - window};"
            f" if (i{lead + d} < {count - 1}) a{d} ="
            f" int({around.replace('$0', f'{shifted} * {step!r}')})"
            f" - int({around.replace('$0', f's{d} * {step!r}')});"
        )
        inside.append(f"a{d} + j{d}")
        index = f"({index} * {size} + a{d} + j{d})"
    first = index
    for d in range(rank):
        first = first.replace(f" + j{d}", "")
    fold = Fold(
        tuple(Loop(f"j{d}", "0", str(size), size, str(size)) for d, size in enumerate(kernel)),
        f"KEEP_LARGEST(T_R, X({', '.join(inside)}), {index})",
        join="if (v > r || pv_isnan(v)) { r = v; r1 = v1; }",
        start=f"r = -PV_INF; r1 = {first};",
        before=" ".join(text),
    )
    type, indices = (value.type for value in node.results)
    inputs = {"X": x, "S": samples}
    values, found = folded(builder, fold, inputs, type, indices.with_dtype(DType.int32))
    return values, builder.aten._to_copy(found, indices.dtype)


for _name in ("aten.fractional_max_pool2d.default", "aten.fractional_max_pool3d.default"):
    rewrite(_name, _shape, supports=_refuse)(_expand)

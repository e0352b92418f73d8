"""Fractional max pooling: windows of one size, at positions that random samples give."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.errors import ShapeError
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.map import mapped_all
from purevk.ops.registry import rewrite
from purevk.tuning import DeviceTraits

# torch computes the positions in the dtype of the samples.
_ROUND = {DType.float16: "pv_round_float16", DType.bfloat16: "pv_round_bfloat16"}


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
    around = _ROUND.get(samples.type.dtype, "")
    text, inside, index = [], [f"i{d}" for d in range(lead)], "0"
    for d, (window, count) in enumerate(zip(kernel, output)):
        size, count = (_dims.specialize(each) for each in (x.type.dims[lead + d], count))
        # In two dims, the last one has the first sample.
        sample = d if rank == 3 else 1 - d
        step = _single(size - window) / _single(max(count - 1, 1))
        step = _rounded(step, samples.type.dtype)
        text.append(
            f"float s{d} = S({plane}, {sample}); int a{d} = {size - window};"
            f" if (i{lead + d} < {count - 1}) a{d} ="
            f" int({around}({around}(float(i{lead + d}) + s{d}) * {step!r}))"
            f" - int({around}(s{d} * {step!r}));"
        )
        inside.append(f"a{d} + j{d}")
        index = f"({index} * {size} + a{d} + j{d})"
    loops = "".join(f"for (int j{d} = 0; j{d} < {kernel[d]}; j{d}++) " for d in range(rank))
    nested = "0"
    for size in reversed(kernel):
        nested = f"loop({size}, {nested})"
    wide = node.results[1].type.dtype is DType.int64
    first = index
    for d in range(rank):
        first = first.replace(f" + j{d}", "")
    body = (
        f"{' '.join(text)} r = -PV_INF; int at = {first};"
        f" LOOPS({nested})"
        f" {loops}{{ T_R v = X({', '.join(inside)}); if (v > r || pv_isnan(v)) {{ r = v; at = {index}; }} }}"
        f" r1 = {'pv_int64(at)' if wide else 'at'};"
    )
    types = [value.type for value in node.results]
    return mapped_all(builder, body, {"X": x, "S": samples}, *types)


def _single(number: float) -> float:
    """The nearest float32."""
    found: float = struct.unpack("f", struct.pack("f", number))[0]
    return found


def _rounded(number: float, dtype: DType) -> float:
    if dtype is DType.float16:
        found: float = struct.unpack("e", struct.pack("e", number))[0]
        return found
    number = _single(number)
    if dtype is DType.bfloat16:
        bits = struct.unpack("I", struct.pack("f", number))[0]
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        number = struct.unpack("f", struct.pack("I", bits))[0]
    return number


for _name in ("aten.fractional_max_pool2d.default", "aten.fractional_max_pool3d.default"):
    rewrite(_name, _shape, _expand, supports=_refuse)

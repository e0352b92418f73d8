"""Resampling of planes (NCHW) by strips: an invocation makes several rows of a column, of several channels, that share
places, weights and what they read."""

from __future__ import annotations

import math
from typing import Any, Sequence

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.lowering import DeviceTraits, Lowering, Operand
from purevk.ops.map_kernel import MapSpec, emit_map, same_order
from purevk.ops.planes import as_planes
from purevk.ops.registry import Kernel, Operator, register

NAME = "purevk.strips"
_ENOUGH = 1024  # invocations a processor, at least


def _shape(plain: MapSpec, strips: MapSpec, over: tuple, inputs: tuple, type: TensorType) -> tuple[TensorType, ...]:
    return (type,)


def _lower(lowering: Lowering, node: Node) -> None:
    plain, strips, over, values, _ = node.args
    inputs, out = [lowering.operand(value) for value in values], lowering.operand(node.result)
    if as_planes(inputs[0]) and as_planes(out) and _follow(inputs[0]):
        emit_map(lowering, strips, inputs, (), [out], over)
    else:
        emit_map(lowering, plain, inputs, (), [out])


def _follow(x: Operand) -> bool:
    """Whether the planes of one image follow those of another, so that they are one dim."""
    batches, channels = x.dims[:2]
    return isinstance(batches, int) and batches == 1 or x.strides[0] == channels * x.strides[1]


def _orders(node: Node, layout_of: Any) -> tuple:
    value = node.args[3][0]
    return (same_order(value, layout_of(value)),)


register(Operator(NAME, _shape, Kernel(_lower, layouts=_orders)))


def _known(*sizes: Size) -> bool:
    return all(isinstance(size, int) and size > 0 for size in sizes)


def resized(
    builder: Any, x: Value, type: TensorType, plain: MapSpec, taps: int, scales: Sequence[float | None], align: bool
) -> Value | None:  # fmt: skip
    """The resizing of images that `plain` says, so that planes are made by strips where that is faster; None where it is not.

    Args:
        taps: elements along each dim that make one of the result: 2, or 4 by cubic weights.
        scales: how far apart neighbours of the result are in the input, along y and x; None: unknown.
    """
    down, across = scales
    if not _known(*x.type.dims, *type.dims) or down is None or across is None or not 0 < down <= 1:
        return None
    images, (height, width) = x.type.dims[0] * x.type.dims[1], type.dims[2:]
    traits: DeviceTraits = builder.traits
    sizes = next(
        (
            (rows, planes) for rows, planes in ((4, 4), (4, 2), (4, 1), (2, 1))
            if images % planes == 0 and height >= rows
            and images // planes * -(-height // rows) * width >= _ENOUGH * traits.processors
        ), None,
    )  # fmt: skip
    if traits.is_cpu or sizes is None or type.dtype is DType.float64:
        return None
    rows, planes = sizes
    over = (images // planes, -(-height // rows), width)
    spec = MapSpec(_resize(taps, rows, planes, down, across, align), ("X",), stores=False, flops=plain.flops * rows * planes)
    return builder.emit(NAME, plain, spec, over, (x,), type)


def _resize(taps: int, rows: int, planes: int, down: float, across: float, align: bool) -> str:
    flag, before = "true" if align else "false", taps // 2 - 1
    weights = "pv_cubic_weights({})" if taps == 4 else "pv_linear_weights({})"
    vector = f"vec{taps}"
    # Rows of the input from the first one on; the places of neighbours differ by `down`, rounded down or up.
    low = [math.floor(row * down) for row in range(rows)]
    span = low[-1] + 1 + taps if rows > 1 else taps
    out = [
        f"int top = i1 * {rows}; float p3 = pv_source(i2, ({across!r}), {flag}), f3 = floor(p3); {vector} w3 = {weights.format('p3 - f3')};",
        *(f"int q{k} = clamp(int(f3) + {k - before}, 0, x_size_3 - 1);" for k in range(taps)),
        f"int a = int(floor(pv_source(top, ({down!r}), {flag})));",
        *(f"int y{t} = clamp(a + {t - before}, 0, x_size_2 - 1);" for t in range(span)),
    ]
    for row in range(rows):
        place = f"pv_source(top + {row}, ({down!r}), {flag})"
        # A place between two rows by rounding alone counts for the one that it is meant for.
        out.append(
            f"float p{row}_ = {place}; bool up{row} = {'false' if row == 0 else f'int(floor(p{row}_)) - a > {low[row]}'};"
            f" {vector} w{row}_ = {weights.format(f'p{row}_ - float(a + {low[row]} + (up{row} ? 1 : 0))')};"
        )
    loop = [
        f"float line{t} = " + " + ".join(f"X(0, plane, y{t}, q{k}) * w3[{k}]" for k in range(taps)) + ";" for t in range(span)
    ]
    for row in range(rows):
        one = lambda k, row=row: f"line{low[row] + k}"  # noqa: E731
        picked = [one(k) if row == 0 else f"(up{row} ? {one(k + 1)} : {one(k)})" for k in range(taps)]
        total = " + ".join(f"{text} * w{row}_[{k}]" for k, text in enumerate(picked))
        loop.append(f"if (top + {row} < r_size_2) R_PUT(0, plane, top + {row}, i2, {total});")
    return f"{' '.join(out)} for (int k = 0; k < {planes}; k++) {{ int plane = i0 * {planes} + k; {' '.join(loop)} }}"


def sampled(
    builder: Any, x: Value, grid: Value, type: TensorType, plain: MapSpec, places: str
) -> Value | None:  # fmt: skip
    """The bilinear sampling of images at places of a grid that `plain` says, so that the places serve several planes; None
    where that is not faster.

    Args:
        places: statements that declare p2 and p3, the place along y and x, at i0, i2, i3.
    """
    if not _known(*x.type.dims, *type.dims) or type.dtype is DType.float64:
        return None
    batches, channels, height, width = type.dims
    traits: DeviceTraits = builder.traits
    planes = next(
        (
            count for count in (4, 2)
            if channels % count == 0 and _dims.product(type.dims) // count >= _ENOUGH * traits.processors
        ), None,
    )  # fmt: skip
    if traits.is_cpu or planes is None:
        return None
    corners = [(up, across) for up in (0, 1) for across in (0, 1)]
    out = [places]
    for d in (2, 3):
        out.append(f"float f{d} = floor(p{d}), w{d} = p{d} - f{d}; int a{d} = int(f{d});")
        for step in (0, 1):
            out.append(f"int q{d}{step} = clamp(a{d} + {step}, 0, x_size_{d} - 1); bool in{d}{step} = q{d}{step} == a{d} + {step};")
    for n, (up, across) in enumerate(corners):
        vertical, horizontal = ("w2" if up else "(1.0 - w2)"), ("w3" if across else "(1.0 - w3)")
        out.append(f"bool in{n} = in2{up} && in3{across}; float u{n} = {vertical} * {horizontal};")
    terms = " + ".join(f"(in{n} ? X(i0, c, q2{up}, q3{across}) : 0.0) * u{n}" for n, (up, across) in enumerate(corners))
    out.append(
        f"UNROLL for (int k = 0; k < {planes}; k++) {{ int c = i1 * {planes} + k; R_PUT(i0, c, i2, i3, {terms}); }}"
    )
    # Places may be anywhere: the more of them a workgroup has, the more of what it brings to its processor serves several.
    spec = MapSpec(" ".join(out), ("X", "GRID"), stores=False, flops=plain.flops * planes, local=1024)
    return builder.emit(NAME, plain, spec, (batches, channels // planes, height, width), (x, grid), type)

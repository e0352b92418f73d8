"""Resizing of uint8 images by integer arithmetic, as torch does it on the CPU: first along the rows,
then along the columns, with weights of 16 bits, and rounding to uint8 in between."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from purevk.dtypes import DType
from purevk.ir import TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.fold import Fold, Loop, folded
from purevk.ops.shapes import piece_count

_MOST_BITS = 22  # of a weight's fraction
_MOST_ROWS = 1 << 20  # of an image: the host makes a table with weights for each


class _Weights(NamedTuple):
    """How one dim is resized.

    Attributes:
        first: the first input of each output.
        weights: integers for the inputs from there on, [outputs, inputs of an output].
        bits: how many of their bits are the fraction.
    """

    first: np.ndarray
    weights: np.ndarray
    bits: int


def _triangle(x: float) -> float:
    return max(1.0 - abs(x), 0.0)


def _cubic(a: float) -> Callable[[float], float]:
    """Keys's cubic convolution."""

    def weigh(x: float) -> float:
        x = abs(x)
        if x < 1.0:
            return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
        return (((x - 5.0) * x + 8.0) * x - 4.0) * a if x < 2.0 else 0.0

    return weigh


def _scale(size: int, out: int, factor: float | None, align: bool) -> float:
    if align:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return 1.0 / factor if factor else size / out


def _averaged(size: int, out: int, scale: float, cubic: bool) -> list[tuple[int, list[float]]]:
    """The first input of each output and the weights, of a filter that covers all inputs."""
    weigh = _cubic(-0.5) if cubic else _triangle
    stretch = max(scale, 1.0)
    reach = (2.0 if cubic else 1.0) * stretch
    found = []
    for i in range(out):
        center = scale * (i + 0.5)
        first = max(int(center - reach + 0.5), 0)
        count = min(int(center + reach + 0.5), size) - first
        weights = [weigh((j + first - center + 0.5) * (1.0 / stretch)) for j in range(count)]
        total = 0.0
        for weight in weights:
            total += weight
        found.append((first, [weight / total for weight in weights] if total else weights))
    return found


def _interpolated(
    size: int, out: int, scale: float, cubic: bool, align: bool
) -> list[tuple[int, list[float]]]:
    """The same for the 2 or 4 inputs around the position of an output. Those beyond an end stand
    for the last one."""
    weigh = _cubic(-0.75) if cubic else _triangle
    reach = 2 if cubic else 1
    found = []
    for i in range(out):
        position = scale * i if align else scale * (i + 0.5) - 0.5
        position = position if align or cubic else max(position, 0.0)
        at = min(math.floor(position), size - 1)
        rest = min(max(position - at, 0.0), 1.0)
        first, end = max(at - reach + 1, 0), min(at + reach + 1, size)
        weights = [0.0] * (end - first)
        for j in range(2 * reach):
            inside = min(max(at - reach + 1 + j, first), end - 1) - first
            weights[inside] += weigh(j + 1 - reach - rest)
        found.append((first, weights))
    return found


def _as_integers(found: list[tuple[int, list[float]]]) -> _Weights:
    """The weights with as many bits as 16 bits hold."""
    most = max(max(weights) for _, weights in found)
    bits = 0
    while bits < _MOST_BITS - 1 and int(0.5 + most * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    table = np.zeros((len(found), max(len(weights) for _, weights in found)), np.int32)
    for row, (_, weights) in zip(table, found):
        row[: len(weights)] = [
            int(weight * (1 << bits) + math.copysign(0.5, weight)) for weight in weights
        ]
    return _Weights(np.array([first for first, _ in found], np.int32), table, bits)


def resize_bytes(
    builder: Builder,
    x: Value,
    type: TensorType,
    kind: str,
    align: bool,
    factors: tuple[float | None, ...],
) -> Value:
    """The images [batch, channels, rows, columns] in the sizes of `type`. Each combination of sizes
    needs a lowering of its own.

    Args:
        kind: "linear" or "cubic"; with "aa" behind, antialiased.
        factors: given for rows and columns, or None.
    """
    cubic, averages = kind.startswith("cubic"), kind.endswith("aa")
    for d in (3, 2):
        size, out = (piece_count(dims[d], _MOST_ROWS) for dims in (x.type.dims, type.dims))
        if size == out:
            continue
        scale = _scale(size, out, factors[d - 2], align)
        found = (
            _averaged(size, out, scale, cubic)
            if averages
            else _interpolated(size, out, scale, cubic, align)
        )
        x = _along(builder, x, d, _as_integers(found))
    return x


def _along(builder: Builder, x: Value, dim: int, weights: _Weights) -> Value:
    index = [f"i{d}" for d in range(4)]
    index[dim] = f"min(first + k, x_size_{dim} - 1)"  # the weights beyond the end are 0
    half = 1 << (weights.bits - 1) if weights.bits else 0
    width = len(weights.weights[0])
    fold = Fold(
        (Loop("k", "0", "w_size_1", width, "w_size_1"),),
        f"r += W(i{dim}, k) * X({', '.join(index)});",
        before=f"int first = F(i{dim});",
        finish=f"r = clamp((r + {half}) >> {weights.bits}, 0, 255);",
    )
    dims = list(x.type.dims)
    dims[dim] = len(weights.first)
    inputs = {
        "X": x,
        "F": builder.constant(weights.first, DType.int32),
        "W": builder.constant(weights.weights, DType.int32),
    }
    return folded(builder, fold, inputs, x.type.with_dims(dims), order=0)[0]

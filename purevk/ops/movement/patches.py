"""Patches of images: pixel and channel shuffles, im2col, col2im."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from purevk.ir import Node, Size, TensorType, Value
from purevk.lower.map import coordinates
from purevk.ops.builder import Builder
from purevk.ops.map import mapped, others
from purevk.ops.registry import ShapeError, rewrite
from purevk.ops.shapes import pair
from purevk.ops.signatures import signature


# -- shuffles ------------------------------------------------------------------------------------
def _shuffle_shape(x: TensorType, upscale_factor: int) -> TensorType:
    *lead, channels, height, width = x.dims
    factor = upscale_factor
    if channels % (factor * factor) != 0:
        raise ShapeError(f"pixel_shuffle by {factor} of {channels} channels")
    return x.with_dims((*lead, channels // (factor * factor), height * factor, width * factor))


@rewrite("aten.pixel_shuffle.default", _shuffle_shape)
def _shuffle(builder: Builder, node: Node, x: Value, factor: int) -> Value:
    rank = x.type.rank
    c, h, w = rank - 3, rank - 2, rank - 1
    source = {
        f"d{c}": f"(i{c} * factor + i{h} % factor) * factor + i{w} % factor",
        f"d{h}": f"i{h} / factor",
        f"d{w}": f"i{w} / factor",
    }
    return _read_from(builder, node, x, factor, source)


def _read_from(
    builder: Builder, node: Node, x: Value, factor: int, source: Mapping[str, str]
) -> Value:
    """A result whose elements are those of x at other coordinates."""
    at = coordinates(x.type.rank, **source)
    return mapped(
        builder, f"r = X({at});", {"X": x}, node.result.type, numbers={"factor": factor}, order=0
    )


def _unshuffle_shape(x: TensorType, downscale_factor: int) -> TensorType:
    *lead, channels, height, width = x.dims
    factor = downscale_factor
    if height % factor != 0 or width % factor != 0:
        raise ShapeError(f"pixel_unshuffle by {factor} of {height} x {width}")
    return x.with_dims((*lead, channels * factor * factor, height // factor, width // factor))


@rewrite("aten.pixel_unshuffle.default", _unshuffle_shape)
def _unshuffle(builder: Builder, node: Node, x: Value, factor: int) -> Value:
    rank = x.type.rank
    c, h, w = rank - 3, rank - 2, rank - 1
    source = {
        f"d{c}": f"i{c} / (factor * factor)",
        f"d{h}": f"i{h} * factor + i{c} / factor % factor",
        f"d{w}": f"i{w} * factor + i{c} % factor",
    }
    return _read_from(builder, node, x, factor, source)


@rewrite("aten.channel_shuffle.default", lambda x, groups: x, "aten.native_channel_shuffle.default")
def _channel_shuffle(builder: Builder, node: Node, x: Value, groups: int) -> Value:
    rank = x.type.rank
    at = coordinates(rank, d1="i1 % groups * (x_size_1 / groups) + i1 / groups")
    return mapped(
        builder,
        f"r = X({at});",
        {"X": x},
        x.type,
        numbers={"groups": groups},
        order=0,
        lanes=others((1,), rank),
    )


# -- im2col and col2im ---------------------------------------------------------------------------
Pair = int | Sequence[int]  # one number, or one for the height and one for the width


class _Window(NamedTuple):
    """The window that slides over an image: heights, then widths."""

    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, kernel: Pair, dilation: Pair, padding: Pair, stride: Pair) -> _Window:
        return cls(pair(kernel), pair(dilation), pair(padding), pair(stride))

    def counts(self, sizes: Sequence[Size]) -> list[Size]:
        """How many windows there are along the height and the width of an image."""
        return [
            (size + (2 * padding - dilation * (kernel - 1) - 1)) // stride + 1
            for size, kernel, dilation, padding, stride in zip(
                sizes, self.kernel, self.dilation, self.padding, self.stride
            )
        ]

    @property
    def numbers(self) -> dict[str, int]:
        named = {
            "kernel": self.kernel,
            "dilation": self.dilation,
            "pad": self.padding,
            "stride": self.stride,
        }
        return {
            f"{name}_{axis}": value
            for name, values in named.items()
            for axis, value in zip("hw", values)
        }


def _im2col_shape(
    x: TensorType, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair
) -> TensorType:
    window = _Window.of(kernel_size, dilation, padding, stride)
    down, across = window.counts(x.dims[-2:])
    height, width = window.kernel
    return x.with_dims((*x.dims[:-3], x.dims[-3] * height * width, down * across))


@rewrite("aten.im2col.default", _im2col_shape)
def _im2col(
    builder: Builder,
    node: Node,
    x: Value,
    kernel_size: Pair,
    dilation: Pair,
    padding: Pair,
    stride: Pair,
) -> Value:
    window = _Window.of(kernel_size, dilation, padding, stride)
    batched = x.type.rank == 4
    _, across = window.counts(x.type.dims[-2:])
    row_of, column = ("i1", "i2") if batched else ("i0", "i1")
    size = (2, 3) if batched else (1, 2)
    body = (
        f"IMAGE_OF_COLUMN({row_of}, {column}) r = T_R(0);"
        f" if (y >= 0 && y < x_size_{size[0]} && x >= 0 && x < x_size_{size[1]})"
        f" r = X({'i0, ' if batched else ''}c, y, x);"
    )
    numbers = {"across": across, **window.numbers}
    return mapped(builder, body, {"X": x}, node.result.type, numbers=numbers)


@signature("x, output_size, kernel_size, dilation, padding, stride")
def _col2im_shape(x: TensorType, output_size: Sequence[Size], kernel_size: Pair) -> TensorType:
    height, width = pair(kernel_size)
    return x.with_dims((*x.dims[:-2], x.dims[-2] // (height * width), *output_size))


@rewrite("aten.col2im.default", _col2im_shape)
def _col2im(
    builder: Builder,
    node: Node,
    x: Value,
    output_size: Sequence[Size],
    kernel_size: Pair,
    dilation: Pair,
    padding: Pair,
    stride: Pair,
) -> Value:
    window = _Window.of(kernel_size, dilation, padding, stride)
    batched = x.type.rank == 3
    down, across = window.counts(output_size)
    c, h, w = ("i1", "i2", "i3") if batched else ("i0", "i1", "i2")
    row = f"({c} * kernel_h + ky) * kernel_w + kx, y / stride_h * across + x / stride_w"
    element = f"X({'i0, ' if batched else ''}{row})"
    body = f"LOOPS(loop(kernel_h, loop(kernel_w))) SUM_OF_COLUMNS({h}, {w}, {element})"
    numbers = {"down": down, "across": across, **window.numbers}
    height, width = window.kernel
    return mapped(builder, body, {"X": x}, node.result.type, numbers=numbers, flops=height * width)

"""Convolutions of volumes and transposed convolutions, by convolutions of images.

Volumes: the elements along the depth of a window become channels. If windows follow one another, as
patches of videos do, each is a row of a matmul.

Transposed: with stride s, the outputs whose index has the same remainder by s are one ordinary
convolution of the input with every s-th element of the kernel, mirrored. One convolution computes
all of these: it has s times as many channels (along each dim), and a kernel of 1 / s of the length.
Its channels are then interleaved. Nothing is multiplied by an inserted zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.conv.arguments import Ints
from purevk.ops.conv.shapes import convolution_shape, refuse_convolution
from purevk.ops.map import mapped
from purevk.ops.movement.rearrange import pad
from purevk.ops.registry import View, define, rewrite
from purevk.ops.shapes import pair
from purevk.ops.signatures import signature

_LEAST_TERMS = 32  # of a window, from which on rows of them are worth a copy


def _windows_shape(x: TensorType, dim: int, kernel: int, stride: int, dilation: int) -> TensorType:
    count = (x.dims[dim] - (dilation * (kernel - 1) + 1)) // stride + 1
    return x.with_dims((*x.dims[:dim], count, *x.dims[dim + 1 :], kernel))


@signature("layout, x, results, value, dim, kernel, stride, dilation")
def _windows_layout(layout: Layout, dim: int, stride: int, dilation: int) -> tuple[Layout]:
    strides = tuple(step * stride if d == dim else step for d, step in enumerate(layout.strides))
    return (Layout(layout.offset, (*strides, layout.strides[dim] * dilation)),)


# A dim seen as overlapping windows: the elements of a window are a new last dim.
define("purevk.windows", _windows_shape, View(_windows_layout))


def convolve_volume(
    builder: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Value:
    """A convolution of [batch, channels, depth, height, width]."""
    batch, channels = x.type.dims[:2]
    kernel = _dims.specialize(weight.type.dims[2])
    patch = tuple(map(_dims.specialize, weight.type.dims[2:]))
    if (
        x.type.dtype in (DType.float32, DType.float16, DType.bfloat16)
        and patch == stride
        and not any(padding)
        and dilation == (1, 1, 1)
        and groups == 1
        and math.prod(map(_dims.specialize, weight.type.dims[1:])) >= _LEAST_TERMS
    ):
        return _multiply_patches(builder, x, weight, bias, patch)
    if padding[0]:
        x = pad(builder, x, (0, 0, 0, 0, padding[0], padding[0]))
    seen = builder.purevk.windows(x, dim=2, kernel=kernel, stride=stride[0], dilation=dilation[0])
    depth, height, width = seen.type.dims[2:5]
    seen = builder.aten.permute(seen, (0, 2, 1, 5, 3, 4))
    images = builder.aten.view(seen, (batch * depth, channels * kernel, height, width))
    flat = builder.aten.view(
        weight,
        (weight.type.dims[0], weight.type.dims[1] * kernel, *weight.type.dims[3:]),
    )
    made = builder.aten.convolution(
        images,
        flat,
        bias,
        stride[1:],
        padding[1:],
        dilation[1:],
        transposed=False,
        output_padding=(0, 0),
        groups=groups,
    )
    split = builder.aten.view(made, (batch, depth, *made.type.dims[1:]))
    return builder.aten.permute(split, (0, 2, 1, 3, 4))


def _multiply_patches(
    builder: Builder, x: Value, weight: Value, bias: Value | None, patch: tuple[int, ...]
) -> Value:
    """A convolution of volumes whose windows follow one another."""
    for at, length in enumerate(patch):
        x = builder.purevk.windows(x, 2 + at, length, length, dilation=1)
    batch, channels, depth, height, width = x.type.dims[:5]
    terms = channels * math.prod(patch)
    rows = builder.aten.permute(x, (0, 2, 3, 4, 1, 5, 6, 7))
    rows = builder.aten.reshape(rows, (batch * depth * height * width, terms))
    flat = builder.aten.reshape(weight, (weight.type.dims[0], terms))
    made = builder.aten.linear(rows, flat, bias)
    sizes = (batch, depth, height, width, weight.type.dims[0])
    made = builder.aten.view(made, sizes)
    return builder.aten.permute(made, (0, 4, 1, 2, 3))


def convolve_transposed(
    builder: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    extra: tuple[int, ...],
    groups: int,
    result: TensorType,
) -> Value:
    """A transposed convolution; `x` and `result` have a batch dim."""
    count = weight.type.rank - 2
    weight = _spread_kernel(builder, weight, dilation)
    lengths = [_dims.specialize(size) for size in weight.type.dims[2:]]
    parts = [-(-length // step) for length, step in zip(lengths, stride)]
    weight = pad(
        builder,
        weight,
        [n for k in reversed(range(count)) for n in (0, parts[k] * stride[k] - lengths[k])],
    )
    mirrored = _mirrored(builder, weight, parts, stride, groups)
    phases = math.prod(stride)
    before = []
    for d in range(count):
        if phases == 1 and lengths[d] - 1 - padding[d] >= 0 and not extra[d]:
            before.append(lengths[d] - 1 - padding[d])
        else:
            before.append(
                max(parts[d] - 1, (lengths[d] + extra[d] - padding[d] - 1) // stride[d], 0)
            )
    if bias is not None and phases > 1:
        split = builder.aten.view(bias, (groups, 1, bias.type.dims[0] // groups))
        wide = builder.aten.expand(split, (groups, phases, bias.type.dims[0] // groups))
        bias = builder.aten.view(wide, (bias.type.dims[0] * phases,))
    ones, zeros = (1,) * count, (0,) * count
    if _is_spread(builder, x, result, stride, before, groups):
        packed = builder.purevk.copy(builder.aten.permute(mirrored, (2, 3, 1, 0)))
        return builder.purevk.conv2d(
            x,
            packed,
            bias,
            ones,
            zeros,
            ones,
            groups,
            epilogue=None,
            extras=(),
            spread=tuple(stride),
        )
    made = builder.aten.convolution(
        x,
        mirrored,
        bias,
        ones,
        tuple(before),
        ones,
        transposed=False,
        output_padding=zeros,
        groups=groups,
    )
    if (
        made.type.dims == result.dims
        and phases == 1
        and all(before[d] == lengths[d] - 1 - padding[d] for d in range(count))
    ):
        return made
    return _interleave(
        builder, made, result, stride, padding, [b - (p - 1) for b, p in zip(before, parts)], groups
    )


def _is_spread(
    builder: Builder,
    x: Value,
    result: TensorType,
    stride: Sequence[int],
    before: Sequence[int],
    groups: int,
) -> bool:
    """Whether each pixel of an image becomes a block of its own, which a matmul can write to its
    final location."""
    sizes = result.dims
    return (
        len(stride) == 2
        and groups == 1
        and not any(before)
        and builder.traits.profile.has_fast_shared_memory
        and all(isinstance(size, int) for size in (*x.type.dims[1:], *sizes[1:]))
        and sizes[1] % 4 == 0
        and all(sizes[2 + d] == x.type.dims[2 + d] * stride[d] for d in range(2))
        and math.prod(stride) > 1
    )


def _spread_kernel(builder: Builder, weight: Value, dilation: Sequence[int]) -> Value:
    """The kernel of a dilated convolution, with zeros between its elements."""
    for d, step in enumerate(dilation, 2):
        if step > 1:
            sizes = weight.type.dims
            split = builder.aten.view(weight, (*sizes[: d + 1], 1, *sizes[d + 1 :]))
            wide = pad(builder, split, (*([0] * (2 * (len(sizes) - d - 1))), 0, step - 1))
            flat = builder.aten.view(wide, (*sizes[:d], sizes[d] * step, *sizes[d + 1 :]))
            weight = builder.aten.slice.Tensor(flat, d, start=0, end=step * (sizes[d] - 1) + 1)
    return weight


def _mirrored(
    builder: Builder, weight: Value, parts: Sequence[int], stride: Sequence[int], groups: int
) -> Value:
    """[in, out / groups, length...] as the kernel [groups * phases * out / groups, in / groups,
    part...]."""
    count = len(parts)
    inner, outer = weight.type.dims[:2]
    split: list[Size] = [groups, inner // groups, outer]
    for part, step in zip(parts, stride):
        split += [part, step]
    weight = builder.aten.view(weight, tuple(split))
    weight = builder.aten.flip(weight, tuple(3 + 2 * k for k in range(count)))
    order = (0, *(4 + 2 * k for k in range(count)), 2, 1, *(3 + 2 * k for k in range(count)))
    weight = builder.aten.permute(weight, order)
    return builder.aten.view(weight, (groups * math.prod(stride) * outer, inner // groups, *parts))


def _interleave(
    builder: Builder,
    x: Value,
    result: TensorType,
    stride: Sequence[int],
    padding: Sequence[int],
    skip: Sequence[int],
    groups: int,
) -> Value:
    rank = result.rank
    split: list[str] = []
    numbers: dict[str, Size] = {}
    phase = "0"
    for n, (step, shift, first) in enumerate(zip(stride, padding, skip)):
        d = n + 2
        numbers.update({f"step_{d}": step, f"shift_{d}": shift, f"first_{d}": first})
        split.append(f"int u{d} = i{d} + shift_{d}, t{d} = u{d} / step_{d};")
        phase = f"({phase} * step_{d} + u{d} - t{d} * step_{d})"
    numbers["width"] = result.dims[1] // groups
    numbers["phases"] = math.prod(stride)
    if groups == 1:
        channel = f"{phase} * width + i1"
    else:
        channel = f"(i1 / width * phases + {phase}) * width + i1 % width"
    at = ", ".join(["i0", channel, *(f"t{d} + first_{d}" for d in range(2, rank))])
    lanes: dict[int, tuple[int]] = {1: (1,)} if groups == 1 else {}
    return mapped(
        builder,
        " ".join(split) + f" r = X({at});",
        {"X": x},
        result,
        numbers=numbers,
        order=0,
        lanes=lanes,
    )


def expand(builder: Builder, node: Node) -> Value:
    """A transposed convolution, or one of volumes."""
    x, weight, bias = node.tensor("x"), node.tensor("weight"), node.optional_tensor("bias")
    count = weight.type.rank - 2
    stride, padding, dilation = (
        node.ints(name, count) for name in ("stride", "padding", "dilation")
    )
    groups, type = node.int("groups"), node.result.type
    if x.type.rank == count + 1:
        x = builder.aten.unsqueeze(x, dim=0)
    whole = type if type.rank == count + 2 else type.with_dims((1, *type.dims))
    if node.bool("transposed"):
        extra = pair(node.ints("output_padding") or (0,), count)
        made = convolve_transposed(
            builder, x, weight, bias, stride, padding, dilation, extra, groups, whole
        )
    else:
        made = convolve_volume(builder, x, weight, bias, stride, padding, dilation, groups)
    return made if made.type.rank == type.rank else builder.aten.view(made, type.dims)


# -- other names ---------------------------------------------------------------------------------
def _plain_shape(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> TensorType:
    count = weight.rank - 2
    if padding == "same":
        lead = x.dims[: x.rank - count - 1]
        return x.with_dims((*lead, weight.dims[0], *x.dims[x.rank - count :]))
    return convolution_shape(
        x,
        weight,
        bias,
        pair(stride, count),
        pair(0 if isinstance(padding, str) else padding, count),
        pair(dilation, count),
        False,
        (0,) * count,
        groups,
    )


def _plain(
    builder: Builder,
    node: Node,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
) -> Value:
    count = weight.type.rank - 2
    stride, dilation = pair(stride, count), pair(dilation, count)
    if padding == "same":
        lengths = [_dims.specialize(size) for size in weight.type.dims[2:]]
        totals = [step * (length - 1) for step, length in zip(dilation, lengths)]
        if any(total % 2 for total in totals):
            x = pad(
                builder,
                x,
                [n for total in reversed(totals) for n in (total // 2, total - total // 2)],
            )
            padding = 0
        else:
            padding = tuple(total // 2 for total in totals)
    padding = pair(0 if isinstance(padding, str) else padding, count)
    return builder.aten.convolution(
        x,
        weight,
        bias,
        stride,
        padding,
        dilation,
        transposed=False,
        output_padding=(0,) * count,
        groups=groups,
    )


for _count in (1, 2, 3):
    rewrite(
        f"aten.conv{_count}d.default",
        _plain_shape,
        f"aten.conv{_count}d.padding",
        supports=refuse_convolution,
    )(_plain)


def _back_shape(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> TensorType:
    count = weight.rank - 2
    stride, padding, extra, dilation = (
        pair(values, count) for values in (stride, padding, output_padding, dilation)
    )
    return convolution_shape(x, weight, bias, stride, padding, dilation, True, extra, groups)


@rewrite("aten.conv_transpose3d.input", _back_shape, supports=refuse_convolution)
@rewrite("aten.conv_transpose2d.input", _back_shape, supports=refuse_convolution)
@rewrite("aten.conv_transpose1d.default", _back_shape, supports=refuse_convolution)
def _back(
    builder: Builder,
    node: Node,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Ints,
    padding: Ints,
    extra: Ints,
    groups: int,
    dilation: Ints,
) -> Value:
    count = weight.type.rank - 2
    stride, padding, extra, dilation = (
        pair(values, count) for values in (stride, padding, extra, dilation)
    )
    return builder.aten.convolution(
        x,
        weight,
        bias,
        stride,
        padding,
        dilation,
        transposed=True,
        output_padding=extra,
        groups=groups,
    )

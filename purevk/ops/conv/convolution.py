"""Convolutions. Images are NHWC in memory, where a pointwise convolution is a matmul."""

from __future__ import annotations

from dataclasses import dataclass, replace

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, dense_operand, emit_copy, packed
from purevk.lower.epilogue import Epilogue, make_epilogue
from purevk.lower.expression import Expression
from purevk.lower.gpu_kernels import Tiled
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.matrix_core_kernels import Coopmat
from purevk.lower.numbers import gcd4, gcd8
from purevk.ops.conv.arguments import Conv2d
from purevk.ops.conv.choice import choose, choose_depthwise, is_short
from purevk.ops.conv.nchw import (
    adapt,
    lower_groups,
    lower_matmul,
    reads_nchw,
    runs_in_nchw,
    spread_last,
)
from purevk.ops.conv.nchw_tiles import lower_tiles, tiles_of
from purevk.ops.conv.shapes import convolved_size
from purevk.ops.image_layout import NHWC, LayoutQuery, is_nchw_operand, keeps_nchw
from purevk.ops.matmul.choice import (
    Batches,
    add_parts,
    both_half,
    emit,
    matrix_macros,
    may_overlap,
    parts_of,
    reads_extras_ahead,
    reads_wide,
    split_size,
    stored_vectors,
    vector_macros,
)
from purevk.ops.matmul.choice import choose as choose_matmul
from purevk.ops.matmul.matmul import supports_float
from purevk.ops.registry import Kernel, Order, define
from purevk.tuning import DeviceTraits

NAME = "purevk.conv2d"
COLUMNS_FIRST = (3, 0, 1, 2)  # a weight [kh, kw, in, out] whose input channels are dense


def _conv2d_shape(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    epilogue: Expression | None = None,
    extras: tuple[TensorType, ...] = (),
    spread: tuple[int, int] = (1, 1),
) -> TensorType:
    """With `spread` (y, x), which only 1 x 1 windows take, the channels (dy, dx, c) of an output
    are the channels c of y * x pixels."""
    kh, kw, _, out = weight.dims
    height = convolved_size(x.dims[2], kh, stride[0], padding[0], dilation[0])
    width = convolved_size(x.dims[3], kw, stride[1], padding[1], dilation[1])
    dtype = x.dtype if epilogue is None else epilogue.dtypes[epilogue.outputs[0]]
    return TensorType(
        dtype, (x.dims[0], out // (spread[0] * spread[1]), height * spread[0], width * spread[1])
    )


def pixels(lowering: Lowering, x: Operand) -> tuple[Operand, Size]:
    """An operand [B, C, H, W] whose pixels follow one another in memory, channels dense, and the
    elements from one pixel to the next; copied if it is not so."""
    batches, channels, height, width = x.dims
    batch, channel, row, pixel = x.strides
    if _is(width, 1):
        pixel = row if not _is(height, 1) else (batch if not _is(batches, 1) else channels)
    fits = isinstance(x.offset, int) and (_is(channels, 1) or _is(channel, 1))
    fits = fits and (_is(height, 1) or row == width * pixel)
    fits = fits and (_is(batches, 1) or batch == height * width * pixel)
    if not fits or _is(pixel, 0):
        x = dense(lowering, x, NHWC)
        pixel = channels
    return x, pixel


def _widens_pixels(traits: DeviceTraits, conv: Conv2d) -> bool:
    """Whether pixels of 2 or 3 channels are copied to where each has 4, to read them as vectors. Without
    shared memory, an invocation reads each pixel many times."""
    channels = conv.weight.type.dims[2]
    return (
        not traits.profile.has_fast_shared_memory
        and conv.groups == 1
        and conv.window.taps > 1
        and isinstance(channels, int)
        and channels in (2, 3)
    )


def _wide_pixels(lowering: Lowering, x: Operand) -> tuple[Operand, Size]:
    """A copy of NHWC images with 4 elements per pixel, and this number. Those behind the channels are
    not written."""
    batches, _, height, width = x.dims
    wide = lowering.temporary(TensorType(x.dtype, (batches, height, width, 4)))
    copy = Operand(wide.storage, Layout(0, (height * width * 4, 1, width * 4, 4)), x.type)
    emit_copy(lowering, x, copy, label="layout")
    return copy, 4


def _is(size: Size, number: int) -> bool:
    """Whether a size is known to be this number."""
    return isinstance(size, int) and size == number


@dataclass(frozen=True)
class _Nhwc:
    """A convolution of NHWC images.

    Attributes:
        pixel: elements of `x` from one pixel to the next.
        vectors: whether `x`, the weight and the result are read and written as vectors of 4.
        transposed: the weight is in the order `COLUMNS_FIRST`.
    """

    conv: Conv2d
    x: Operand
    pixel: Size
    weight: Operand
    bias: Operand | None
    out: Operand
    vectors: tuple[bool, bool, bool]
    transposed: bool = False

    @property
    def rows(self) -> Size:
        """Outputs of one channel, before they are spread."""
        batches, _, height, width = self.out.dims
        spread = self.conv.spread
        return batches * height * width // (spread[0] * spread[1])

    @property
    def half(self) -> bool:
        """Whether matrix cores take the operands."""
        return both_half(self.x.dtype, self.weight.dtype)

    @property
    def bfloat16(self) -> bool:
        return self.half and self.x.dtype is DType.bfloat16

    @property
    def flops(self) -> Size:
        _, _, channels, columns = self.weight.dims
        return 2 * self.rows * columns * self.conv.window.taps * channels

    @property
    def params(self) -> dict[str, Size]:
        """The parameters that the templates share."""
        batches, _, height, width = self.x.dims
        _, _, out_height, out_width = self.out.dims
        _, _, group_in, columns = self.weight.dims
        return {
            "batches": batches,
            "H": height,
            "W": width,
            "OH": out_height,
            "OW": out_width,
            "pixel_a": self.pixel,
            "pixel_o": columns,
            "ldb": self.conv.window.taps * group_in if self.transposed else columns,
            **self.conv.window.params,
        }

    @property
    def tensors(self) -> dict[str, Operand | None]:
        return {"a": self.x, "b": self.weight, "bias": self.bias, "out": self.out}

    def epilogue(self, lowering: Lowering, columns: str, ahead: bool = False) -> Epilogue:
        """The epilogue, for a kernel whose results have rows of `columns` elements; `ahead` as for
        `make_epilogue`."""
        element, channel = f"m * {columns} + n", "n"
        spread = self.conv.spread
        if spread != (1, 1):
            element, channel = spread_last(self.x, self.out, spread)
        made = make_epilogue(
            lowering,
            self.conv.epilogue,
            self.conv.extras,
            self.out,
            "b, m, n",
            element,
            (1, channel),
            self.vectors[2],
            ahead=ahead,
        )
        if spread != (1, 1):
            made.macros["ELEMENT(b, m, n)"] = f"({element})"
        return made


def _conv2d_lower(lowering: Lowering, node: Node) -> None:
    conv, traits = Conv2d.of(node), lowering.traits
    out = lowering.operand(node.result)
    bias = packed(lowering, conv.bias)
    x = lowering.operand(conv.x)
    nchw = is_nchw_operand(x) and is_nchw_operand(out) and runs_in_nchw(node, traits)
    if nchw or reads_nchw(traits, conv, x, node.result.type):
        tiles = tiles_of(traits, conv, node.result.type) if nchw else None
        if tiles is not None:
            weight = dense_operand(lowering, conv.weight)
            lower_tiles(lowering, conv, tiles, x, weight, bias, out)
        elif conv.is_matmul:
            lower_matmul(lowering, conv, x, bias, out)
        else:
            lower_groups(lowering, conv, x, dense_operand(lowering, conv.weight), bias, out)
        return
    weight = lowering.operand(conv.weight)
    transposed = weight.strides == Layout.dense(weight.dims, COLUMNS_FIRST).strides
    if weight.layout.is_contiguous(weight.dims) or not transposed:
        weight, transposed = dense_operand(lowering, conv.weight), False
    wide = _widens_pixels(traits, conv)
    x, pixel = _wide_pixels(lowering, x) if wide else pixels(lowering, x)
    channels, groups = x.dims[1], conv.groups
    _, _, group_in, columns = weight.dims
    depthwise = groups == channels and columns == channels and group_in == 1 and groups > 1
    group_out = columns if depthwise else columns // groups
    vectors = (
        gcd4(pixel, x.offset, channels if depthwise else group_in) or wide,
        gcd4(group_in, weight.offset) if transposed else gcd4(group_out, columns),
        gcd4(group_out),
    )
    images = _Nhwc(conv, x, pixel, weight, bias, out, vectors, transposed)
    if conv.is_matmul:
        _lower_as_matmul(lowering, images)
    elif depthwise:
        _lower_depthwise(lowering, images)
    else:
        _lower_window(lowering, images)


def _lower_depthwise(lowering: Lowering, images: _Nhwc) -> None:
    """Each output channel is made from the input channel of its number."""
    batches, channels, _, _ = images.x.dims
    _, _, height, width = images.out.dims
    window = images.conv.window
    choice = choose_depthwise(
        lowering.traits, channels, width, batches * height, window.dilation[1]
    )
    made = images.epilogue(lowering, "pixel_o")
    lowering.dispatch(
        "conv/conv2d_dw.comp",
        images.tensors,
        {**images.params, "C": channels},
        {**vector_macros(images.weight, *images.vectors), **choice.macros()},
        epilogue=made,
        always=window.params,
        grid=choice.grid(batches, channels, height, width),
        flops=images.flops,
    )


def _lower_window(lowering: Lowering, images: _Nhwc) -> None:
    """An implicit matmul: the rows of its first matrix are the windows of the images."""
    window, groups = images.conv.window, images.conv.groups
    _, _, group_in, columns = images.weight.dims
    group_out = columns // groups
    choice = choose(
        lowering.traits,
        images.rows,
        group_out,
        window.taps,
        group_in,
        groups,
        images.half,
        images.vectors[:2],
        gcd8(
            images.pixel,
            images.x.offset,
            group_in,
            group_in if images.transposed else group_out,
            images.weight.offset,
        ),
        images.transposed,
        images.bfloat16,
    )
    made = images.epilogue(
        lowering, "N" if choice.splits > 1 else "pixel_o", reads_extras_ahead(choice)
    )
    macros = vector_macros(images.weight, *images.vectors, reads_wide(choice))
    params: dict[str, Size] = {**images.params, "IC": group_in, "OC": group_out}
    if images.transposed:
        macros["B_TRANSPOSED"] = 1
    if isinstance(choice, (Tiled, Coopmat)) and choice.splits > 1:
        _lower_in_parts(lowering, choice, images, made, params, macros)
        return
    registers = choice.template == "matmul/matmul.comp"
    if registers and is_short(group_in):
        macros["TERMS"] = _dims.specialize(group_in)
    lowering.dispatch(
        "conv/conv2d.comp" if registers else "conv/conv2d_tiled.comp",
        images.tensors,
        params,
        {**macros, **matrix_macros(choice, images.x, images.out)},
        form=choice,
        epilogue=made,
        always=("IC", *window.params) if is_short(group_in) else window.params,
        grid=choice.grid(images.rows, group_out, groups),
        flops=images.flops,
    )


def _lower_in_parts(
    lowering: Lowering,
    choice: Tiled | Coopmat,
    images: _Nhwc,
    epilogue: Epilogue,
    params: dict[str, Size],
    macros: dict[str, str | int],
) -> None:
    """A convolution of one group with the depth split among workgroups, and a second dispatch that
    adds the parts up."""
    _, _, channels, columns = images.weight.dims
    rows, vectors = images.rows, images.vectors
    depth = images.conv.window.taps * (channels if vectors[0] else _dims.ceil_div(channels, 4) * 4)
    parts = parts_of(lowering, choice.splits, 1, rows, columns)
    lowering.dispatch(
        "conv/conv2d_tiled.comp",
        {**images.tensors, "bias": None, "out": parts},
        {**params, "splits": choice.splits, "split_size": split_size(depth, choice)},
        {**macros, "SPLIT_K": 1, **matrix_macros(choice, images.x, parts)},
        form=choice,
        grid=choice.grid(rows, columns, 1),
        flops=images.flops,
    )
    sizes, stored = (rows, columns, columns), vectors[2]
    add_parts(
        lowering,
        parts,
        images.bias,
        images.out,
        epilogue,
        choice.splits,
        sizes,
        Batches(),
        stored,
    )


def _lower_as_matmul(lowering: Lowering, images: _Nhwc) -> None:
    """A 1 x 1 window: the rows of the matmul are pixels."""
    x, weight, out, pixel = images.x, images.weight, images.out, images.pixel
    rows, (_, _, k, n) = images.rows, weight.dims
    turned = images.transposed
    aligned = gcd8(pixel, x.offset, n, k if turned else n, weight.offset, out.offset)
    aligned = aligned and may_overlap(lowering, out, images.conv.extras)
    wide = gcd8(k, k if turned else n, pixel, x.offset, weight.offset)
    choice = choose_matmul(
        lowering.traits,
        rows,
        n,
        k,
        1,
        images.half,
        turned,
        images.vectors[:2],
        aligned,
        wide,
        images.bfloat16,
    )
    vectors = (*images.vectors[:2], stored_vectors(choice, images.vectors[2]))
    made = replace(images, vectors=vectors).epilogue(lowering, "N", reads_extras_ahead(choice))
    emit(
        choice,
        lowering,
        a=Operand(x.storage, Layout(x.offset, (pixel, 1)), TensorType(x.dtype, (rows, k))),
        b=Operand(
            weight.storage,
            Layout(weight.offset, (1, k) if turned else (n, 1)),
            TensorType(weight.dtype, (k, n)),
        ),
        bias=images.bias,
        out=Operand(out.storage, Layout(out.offset, (n, 1)), TensorType(out.dtype, (rows, n))),
        epilogue=made,
        sizes=(rows, n, k),
        strides=(pixel, k if turned else n, n),
        batches=Batches(),
        transposed=turned,
        vectors=(gcd4(k, pixel, x.offset), images.vectors[1], vectors[2]),
    )


def _adapt(node: Node, orders: tuple[Order | None, ...], query: LayoutQuery) -> Node:
    """The node with the weight in the order that its kernel reads."""
    if orders[0] is None:
        return adapt(node, orders, query)
    conv, traits = Conv2d.of(node), query.traits
    half = both_half(conv.x.type.dtype, conv.weight.type.dtype)
    if traits is None or not half or traits.coopmat_shape is None:
        return node
    if not traits.profile.has_fast_shared_memory or not gcd8(conv.weight.type.dims[2]):
        return node
    args = (node.args[0], query.copied(conv.weight, COLUMNS_FIRST), *node.args[2:])
    return Node(node.op, args, node.results, node.source, node.alias)


def _conv2d_layouts(node: Node, query: LayoutQuery) -> tuple[Order | None]:
    nchw = query.traits is not None and runs_in_nchw(node, query.traits)
    nchw = nchw and keeps_nchw(node, node.tensor("x"), query, True, runs_in_nchw)
    return (None if nchw else NHWC,)


define(
    NAME,
    _conv2d_shape,
    Kernel(
        _conv2d_lower,
        layouts=_conv2d_layouts,
        supports=supports_float,
        epilogue=True,
        adapt=_adapt,
    ),
)

"""Convolutions of int8 images: general, pointwise, depthwise and transposed. Activations are NHWC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.declarations import byte_features
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4, gcd16
from purevk.ops.builder import Builder
from purevk.ops.conv.arguments import Window
from purevk.ops.conv.convolution import pixels
from purevk.ops.conv.shapes import convolved_size, transposed_size
from purevk.ops.elementwise.program import REAL
from purevk.ops.image_layout import NHWC, LayoutQuery
from purevk.ops.quantized.arithmetic import emit_quantize
from purevk.ops.quantized.fragments import choose_fragments
from purevk.ops.quantized.kernels import integer_tile
from purevk.ops.quantized.matmul import by_rows, check_rows
from purevk.ops.quantized.operands import (
    INT8,
    OutputQuantization,
    aligned_rows,
    has_dense_rows,
    output_params,
    supports,
    whole,
    whole_or_none,
)
from purevk.ops.registry import Kernel, Order, ShapeError, define, rewrite_node
from purevk.ops.shapes import is_empty
from purevk.ops.signatures import signature

NAME = "purevk.quantized_conv2d"


@dataclass(frozen=True)
class GroupedWindow(Window):
    """The window of a quantized convolution.

    Attributes:
        groups: of channels.
        transposed: whether the convolution is a transposed one.
        output_padding: of a transposed one, along y and x.
    """

    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, node: Node) -> GroupedWindow:
        """The window that a node of a file has."""
        return cls.of_pairs(
            node.ints("kernel_size"),
            node.ints("stride"),
            node.ints("padding"),
            node.ints("dilation"),
            node.int("groups"),
        )

    @classmethod
    def of_pairs(
        cls,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        output_padding: Sequence[int] | None = None,
    ) -> GroupedWindow:
        """A window from lists of two. That of a transposed convolution has an output padding.

        Raises:
            ShapeError: a list has another length.
        """
        return cls(
            _pair(kernel),
            _pair(stride),
            _pair(padding),
            _pair(dilation),
            groups,
            output_padding is not None,
            _pair(output_padding or (0, 0)),
        )

    def result_sizes(self, height: Size, width: Size) -> list[Size]:
        """Height and width of the result."""
        sizes: list[Size] = []
        for d, size in enumerate((height, width)):
            along = (size, self.kernel[d], self.stride[d], self.padding[d], self.dilation[d])
            sizes.append(
                transposed_size(*along, self.output_padding[d])
                if self.transposed
                else convolved_size(*along)
            )
        return sizes


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    if len(numbers) != 2:
        raise ShapeError(f"{list(numbers)} is not a pair of numbers, along y and x")
    return numbers[0], numbers[1]


def _shape(
    x: TensorType,
    weight: TensorType,
    sums: TensorType,
    scales: TensorType,
    bias: TensorType | None,
    x_scale: float,
    x_zero: int,
    window: GroupedWindow,
    out: OutputQuantization | None,
    dtype: DType = REAL,
) -> TensorType:
    """Sums and scales are [OC, 1]. See `_result`."""
    channels = _out_channels(weight)
    for each in (sums, scales):
        if each.rank != 2 or each.dims[1] != 1:
            raise ShapeError(f"{each} has not one number per output channel")
        check_rows(channels, each.dims[0])
    if bias is not None:
        check_rows(channels, bias.numel)
    return _result(x, weight, window, out, dtype)


def _shape_in_file(
    x: TensorType,
    weights: TensorType,
    weight_sums: TensorType,
    weight_scales: TensorType,
    bias: TensorType | None,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_padding: Sequence[int] | None = None,
    output_scale: float | None = None,
    output_zero_point: int = 0,
    activation: str = "none",
) -> TensorType:
    """Sums are [OC or more], or [KH, OC or more]. Scales are [OC or more], and those of a transposed
    convolution the ones of one group or more. Without an output scale, the result has the dtype of x.
    See `_result`."""
    window = GroupedWindow.of_pairs(kernel_size, stride, padding, dilation, groups, output_padding)
    out = None
    if output_scale is not None:
        out = OutputQuantization.after(activation, output_scale, output_zero_point)
    result = _result(x, weights, window, out, x.dtype)
    channels = _out_channels(weights)
    if weight_sums.rank not in (1, 2) or weight_scales.rank != 1:
        raise ShapeError(f"a convolution with sums {weight_sums} and scales {weight_scales}")
    check_rows(channels, weight_sums.dims[-1])
    check_rows(channels // window.groups if window.transposed else channels, weight_scales.dims[0])
    if bias is not None:
        check_rows(channels, bias.numel)
    return result


def _result(
    x: TensorType,
    weight: TensorType,
    window: GroupedWindow,
    out: OutputQuantization | None,
    dtype: DType,
) -> TensorType:
    """x [B, C, H, W] int8; weight [OC, KH * KW * IC or more], or [KH, KW, C] of a depthwise
    convolution; the result is of `dtype` if it is not quantized."""
    kernel, groups = window.kernel, window.groups
    if x.rank != 4 or weight.rank not in (2, 3) or groups < 1:
        raise ShapeError(f"cannot convolve {x} with {weight} in {groups} groups")
    channels = _out_channels(weight)
    if weight.rank == 2:
        depth = window.taps * (x.dims[1] // groups)
        if isinstance(depth, int) and (
            weight.dims[1] < depth or channels % groups or x.dims[1] % groups
        ):
            raise ShapeError(
                f"convolution of {x} with {weight} in {groups} groups by a window of {list(kernel)}"
            )
    elif channels != x.dims[1] or tuple(weight.dims[:2]) != kernel:
        raise ShapeError(
            f"depthwise convolution of {x} with {weight} by a window of {list(kernel)}"
        )
    sizes = (x.dims[0], channels, *window.result_sizes(*x.dims[2:]))
    return TensorType(DType.int8 if out is not None else dtype, sizes)


def _out_channels(weight: TensorType) -> Size:
    return weight.dims[-1] if weight.rank == 3 else weight.dims[0]


def _lower(lowering: Lowering, node: Node) -> None:
    out = lowering.operand(node.result)
    if is_empty(out.type):
        return
    x, pixel = pixels(lowering, lowering.operand(node.tensor("x")))
    weight = _weight(lowering, node.tensor("weight"))
    window = node.attribute("window", GroupedWindow)
    requantized = node.optional_attribute("out", OutputQuantization)
    batches, channels, height, width = x.dims
    _, out_channels, out_height, out_width = out.dims
    depthwise = weight.type.rank == 3
    group_in, group_out = channels // window.groups, out_channels // window.groups
    vector = gcd4(out_channels if depthwise else group_out, out.offset)
    macros: dict[str, int | str] = {
        "VEC4_OUT": int(vector),
        "REQUANT": int(requantized is not None),
        "TRANSPOSED": int(window.transposed),
        "DOT": int(lowering.traits.has("integer_dot_product")),
    }
    if not vector:
        macros |= byte_features(out.dtype)
    tensors = {
        "a": x,
        "w": weight,
        "scale": whole(lowering, node.tensor("scales")),
        "sum": whole(lowering, node.tensor("sums")),
        "bias": whole_or_none(lowering, node.optional_tensor("bias")),
        "out": out,
    }
    params: dict[str, Size] = {
        "batches": batches,
        "H": height,
        "W": width,
        "IC": 1 if depthwise else group_in,
        "OH": out_height,
        "OW": out_width,
        "OC": group_out,
        "pixel_a": pixel,
        "ldw": out_channels if depthwise else weight.strides[0] // 4,
        "channels_out": out_channels,
        **window.params,
        "x_scale": bits_of(node.float("x_scale")),
        "x_zero": node.int("x_zero"),
        **output_params(requantized),
        "offset_w": weight.offset // 4,
    }
    rows = batches * out_height * out_width
    grid: tuple[Size, Size, Size]
    subgroup: int | None = None
    if depthwise:
        template = "quantized/qconv2d_dw.comp"
        macros |= {"ALIGNED": 4 if gcd4(pixel, x.offset, out_channels) else 1, "PX": 2}
        work = _dims.ceil_div(out_channels, 4) * _dims.ceil_div(out_width, 2)
        grid = (_dims.ceil_div(work, 64), out_height, batches)
    else:
        template = "quantized/qconv2d.comp"
        aligned = gcd4(pixel, x.offset, group_in)
        macros["ALIGNED"] = 16 if aligned and gcd16(group_in) else 4 if aligned else 1
        wide = gcd16(pixel, x.offset, group_in, weight.strides[0], weight.offset)
        fragments = (
            choose_fragments(
                lowering.traits,
                rows,
                group_out,
                window.taps * group_in,
                window.groups,
                window=window.taps > 1,
            )
            if wide
            else None
        )
        if fragments is not None:
            macros |= fragments.macros()
            grid = fragments.grid(rows, group_out, window.groups)
            subgroup = fragments.subgroup
        else:
            tile = _tile(lowering, rows, group_out, window.groups)
            macros |= tile
            grid = (
                _dims.ceil_div(group_out, tile["TILE_N"]),
                _dims.ceil_div(rows, tile["TILE_M"]),
                window.groups,
            )
    lowering.dispatch(
        template,
        tensors,
        params,
        macros,
        specialize=window.params,
        grid=grid,
        subgroup_size=subgroup,
        flops=2 * rows * out_channels * window.taps * (1 if depthwise else group_in),
    )


def _tile(lowering: Lowering, rows: Size, columns: Size, groups: int) -> dict[str, int]:
    if not lowering.traits.profile.has_fast_shared_memory:
        return {"SHARED": 0, "TILE_M": 64, "TILE_N": 8, "CHUNKS": 1, "THREAD_M": 2, "THREAD_N": 8}
    for tile_m, tile_n in ((64, 64), (32, 64), (32, 32)):
        tiles = -(-_dims.upper(rows) // tile_m) * -(-_dims.upper(columns) // tile_n) * groups
        if tiles >= max(lowering.traits.cores, 16) and _dims.upper(columns) > tile_n // 2:
            break
    return integer_tile(lowering.traits, tile_m, tile_n)


def _weight(lowering: Lowering, value: Value) -> Operand:
    """Rows that start at multiples of 4 bytes; the weight of a depthwise convolution is dense."""
    operand = lowering.operand(value)
    known = isinstance(operand.offset, int) and operand.offset % 4 == 0
    if value.type.rank == 3:
        if known and operand.layout.is_contiguous(operand.dims):
            return operand
        return dense(lowering, operand)
    if known and gcd4(operand.strides[0]) and has_dense_rows(operand):
        return operand
    return aligned_rows(lowering, operand, 4)


def _layouts(node: Node, query: LayoutQuery) -> tuple[Order | None, ...]:
    return (NHWC,)


define(NAME, _shape, Kernel(_lower, layouts=_layouts, supports=supports))


# -- et_vk ---------------------------------------------------------------------------------------
def _emit(
    builder: Builder,
    node: Node,
    x: Value,
    scales: Value,
    window: GroupedWindow,
    out: OutputQuantization | None,
) -> Value:
    """The convolution of a node for an int8 x. Sums, scales and bias of files may have more
    elements than there are output channels. ExecuTorch 1.1 leaves the sums of a depthwise weight,
    [KH, OC], to be added up."""
    weight, sums = node.tensor("weights"), node.tensor("weight_sums")
    if sums.type.rank == 2:
        sums = builder.aten.sum.dim_IntList(sums, (0,), keepdim=False, dtype=DType.int32)
    channels = _out_channels(weight.type)
    if sums.type.dtype is not DType.int32:
        sums = builder.aten._to_copy(sums, DType.int32)
    if window.transposed and window.groups > 1:  # the first scales hold for each group
        group = by_rows(builder, scales, channels // window.groups)
        scales = builder.aten.cat((group,) * window.groups)
    sums, scales = by_rows(builder, sums, channels), by_rows(builder, scales, channels)
    return builder.emit(
        NAME,
        x,
        weight,
        sums,
        scales,
        node.optional_tensor("bias"),
        node.float("input_scale"),
        node.int("input_zero_point"),
        window,
        out,
        node.result.type.dtype,
    )


def _output_of(node: Node) -> OutputQuantization:
    return OutputQuantization.after(
        node.str("activation"), node.float("output_scale"), node.int("output_zero_point")
    )


_OPERANDS = "x, input_scale, input_zero_point: int, weights, weight_sums, weight_scales"
_OUTPUT = "output_scale, output_zero_point: int, bias, kernel_size, stride, padding"
_q8ta_shape = signature(f"{_OPERANDS}, {_OUTPUT}, dilation, groups: int, activation='none'")(
    _shape_in_file
)
_transposed_shape = signature(
    f"{_OPERANDS}, {_OUTPUT}, output_padding, dilation, groups: int, activation='none'"
)(_shape_in_file)
_float_shape = signature(f"{_OPERANDS}, bias, kernel_size, stride, padding, dilation, groups: int")(
    _shape_in_file
)


@rewrite_node(
    "et_vk.q8ta_conv2d.default",
    _q8ta_shape,
    "et_vk.q8ta_conv2d_pw.default",
    "et_vk.q8ta_conv2d_dw.default",
    "et_vk.conv2d_q8ta_q8csw_q8to.default",
    "et_vk.conv2d_q8ta_q8csw_q8to_dw.default",
    supports=supports,
)
def _expand_q8ta(builder: Builder, node: Node) -> Value:
    x, scales = node.tensor("x"), node.tensor("weight_scales")
    return _emit(builder, node, x, scales, GroupedWindow.of(node), _output_of(node))


@rewrite_node("et_vk.q8ta_conv2d_transposed.default", _transposed_shape, supports=supports)
def _expand_transposed(builder: Builder, node: Node) -> Value:
    window = replace(
        GroupedWindow.of(node), transposed=True, output_padding=_pair(node.ints("output_padding"))
    )
    scales = node.tensor("weight_scales")
    return _emit(builder, node, node.tensor("x"), scales, window, _output_of(node))


@rewrite_node("et_vk.conv2d_q8ta_q8csw.default", _float_shape, supports=supports)
def _expand_float(builder: Builder, node: Node) -> Value:
    scale, zero = node.float("input_scale"), node.int("input_zero_point")
    x = emit_quantize(builder, node.tensor("x"), scale, zero, *INT8, DType.int8)
    return _emit(builder, node, x, node.tensor("weight_scales"), GroupedWindow.of(node), None)

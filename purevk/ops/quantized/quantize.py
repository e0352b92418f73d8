"""Operators that quantize and dequantize tensors, channels, tokens, groups and blocks.

All of them are pointwise programs on a view of the tensor in which scales and zero points
broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import REAL
from purevk.ops.quantized.arithmetic import Number, emit_dequantize, emit_quantize
from purevk.ops.quantized.blocks import Blocks
from purevk.ops.quantized.operands import INT8
from purevk.ops.registry import rewrite_node
from purevk.ops.shapes import wrap
from purevk.ops.signatures import signature

_SPACE = "quantized_decomposed"
FileDType: TypeAlias = DType | int | None  # a dtype, ExecuTorch's number for one, or none


def dtype_or(given: object, otherwise: DType) -> DType:
    """The dtype that a file gives, or another one if it gives none."""
    if isinstance(given, DType):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return DType.from_pte(given) or otherwise
    return otherwise


def _number(builder: Builder, node: Node, name: str) -> Number:
    """A number, or a tensor of one element as one without dims."""
    if not isinstance(node.arg(name), Value):
        return node.float(name)
    value = node.tensor(name)
    return builder.aten.view(value, ()) if value.type.rank else value


# -- per tensor ----------------------------------------------------------------------------------
@signature("x, scale, zero_point, quant_min, quant_max, dtype=None")
def _quantize_shape(x: TensorType, dtype: FileDType) -> TensorType:
    return x.with_dtype(dtype_or(dtype, DType.int8))


@signature("x, scale, zero_point, quant_min, quant_max, input_dtype=None, out_dtype=None")
def _dequantize_shape(x: TensorType, out_dtype: FileDType) -> TensorType:
    return x.with_dtype(dtype_or(out_dtype, REAL))


def _expand_quantize(builder: Builder, node: Node) -> Value:
    scale, zero, low, high = (
        _number(builder, node, name) for name in ("scale", "zero_point", "quant_min", "quant_max")
    )
    return emit_quantize(builder, node.tensor("x"), scale, zero, low, high, node.result.type.dtype)


def _expand_dequantize(builder: Builder, node: Node) -> Value:
    scale, zero = (_number(builder, node, name) for name in ("scale", "zero_point"))
    return emit_dequantize(builder, node.tensor("x"), scale, zero, node.result.type.dtype)


for _overload in ("default", "tensor", "tensor2"):
    rewrite_node(f"{_SPACE}.quantize_per_tensor.{_overload}", _quantize_shape)(_expand_quantize)
    rewrite_node(f"{_SPACE}.dequantize_per_tensor.{_overload}", _dequantize_shape)(
        _expand_dequantize
    )


# Files made from ExecuTorch's sources in the autumn of 2025 have these around convolutions.
def _quantize_int8_shape(
    x: TensorType, scale: TensorType | float, zero_point: TensorType | int
) -> TensorType:
    return x.with_dtype(DType.int8)


def _dequantize_int8_shape(
    x: TensorType, scale: TensorType | float, zero_point: TensorType | int
) -> TensorType:
    return x.with_dtype(REAL)


@rewrite_node("et_vk.quantize_q8ta_for_conv2d.default", _quantize_int8_shape)
def _expand_quantize_int8(builder: Builder, node: Node) -> Value:
    scale, zero = (_number(builder, node, name) for name in ("scale", "zero_point"))
    return emit_quantize(builder, node.tensor("x"), scale, zero, *INT8, DType.int8)


rewrite_node("et_vk.dequantize_q8to_from_conv2d.default", _dequantize_int8_shape)(
    _expand_dequantize
)


def _convert_shape(x: TensorType, dtype: FileDType) -> TensorType:
    return x.with_dtype(dtype_or(dtype, x.dtype))


@rewrite_node(
    f"{_SPACE}.convert_element_type.no_fuse", _convert_shape, "prims.convert_element_type.default"
)
def _expand_convert(builder: Builder, node: Node) -> Value:
    return builder.aten._to_copy(node.tensor("x"), node.result.type.dtype)


# -- per channel ---------------------------------------------------------------------------------
@signature("x, scales, zero_points, axis: int, quant_min: int, quant_max: int, dtype=None")
def _quantize_channel_shape(x: TensorType, axis: int, dtype: FileDType) -> TensorType:
    wrap(axis, x.rank)
    return x.with_dtype(dtype_or(dtype, DType.int8))


@signature(
    "x, scales, zero_points, axis: int, quant_min: int, quant_max: int, input_dtype=None, "
    "out_dtype=None"
)
def _dequantize_channel_shape(x: TensorType, axis: int, out_dtype: FileDType) -> TensorType:
    wrap(axis, x.rank)
    return x.with_dtype(dtype_or(out_dtype, REAL))


@signature("x, scales, zero_points, axis: int, quant_min: int, quant_max: int")
def _fake_quantize_channel_shape(x: TensorType) -> TensorType:
    return x


def _channel_parameters(builder: Builder, node: Node) -> tuple[Value, Value | None]:
    """Scales and zero points as they broadcast along the axis."""
    rank = node.tensor("x").type.rank
    axis = wrap(node.int("axis"), rank)

    def along(values: Value) -> Value:
        sizes = tuple(values.type.numel if d == axis else 1 for d in range(rank))
        return builder.aten.view(values, sizes)

    scales, zeros = along(node.tensor("scales")), node.optional_tensor("zero_points")
    return scales, None if zeros is None else along(zeros)


@rewrite_node(f"{_SPACE}.quantize_per_channel.default", _quantize_channel_shape)
def _expand_quantize_channel(builder: Builder, node: Node) -> Value:
    scales, zeros = _channel_parameters(builder, node)
    bounds = node.int("quant_min"), node.int("quant_max")
    return emit_quantize(builder, node.tensor("x"), scales, zeros, *bounds, node.result.type.dtype)


@rewrite_node(f"{_SPACE}.dequantize_per_channel.default", _dequantize_channel_shape)
def _expand_dequantize_channel(builder: Builder, node: Node) -> Value:
    scales, zeros = _channel_parameters(builder, node)
    return emit_dequantize(builder, node.tensor("x"), scales, zeros, node.result.type.dtype)


@rewrite_node(f"{_SPACE}.fake_quant_per_channel.default", _fake_quantize_channel_shape)
def _expand_fake_quantize_channel(builder: Builder, node: Node) -> Value:
    x, (scales, zeros) = node.tensor("x"), _channel_parameters(builder, node)
    bounds = node.int("quant_min"), node.int("quant_max")
    quantized = emit_quantize(builder, x, scales, zeros, *bounds, DType.int32)
    return emit_dequantize(builder, quantized, scales, zeros, x.type.dtype)


# -- per token -----------------------------------------------------------------------------------
@signature("x, scales, zero_points, quant_min: int, quant_max: int, dtype=None")
def _quantize_token_shape(x: TensorType, dtype: FileDType) -> TensorType:
    return x.with_dtype(dtype_or(dtype, DType.int8))


@signature(
    "x, scales, zero_points, quant_min: int, quant_max: int, input_dtype=None, output_dtype=None"
)
def _dequantize_token_shape(x: TensorType, output_dtype: FileDType) -> TensorType:
    return x.with_dtype(dtype_or(output_dtype, REAL))


def _token_parameters(builder: Builder, node: Node) -> tuple[Value, Value]:
    """Scales and zero points as they broadcast along the last dim."""
    sizes = (*node.tensor("x").type.dims[:-1], 1)
    scales = builder.aten.view(node.tensor("scales"), sizes)
    return scales, builder.aten.view(node.tensor("zero_points"), sizes)


@rewrite_node(f"{_SPACE}.quantize_per_token.default", _quantize_token_shape)
def _expand_quantize_token(builder: Builder, node: Node) -> Value:
    scales, zeros = _token_parameters(builder, node)
    return emit_quantize(
        builder,
        node.tensor("x"),
        scales,
        zeros,
        node.int("quant_min"),
        node.int("quant_max"),
        node.result.type.dtype,
        zero_first=True,
    )


@rewrite_node(f"{_SPACE}.dequantize_per_token.default", _dequantize_token_shape)
def _expand_dequantize_token(builder: Builder, node: Node) -> Value:
    scales, zeros = _token_parameters(builder, node)
    return emit_dequantize(builder, node.tensor("x"), scales, zeros, node.result.type.dtype)


# -- by blocks -----------------------------------------------------------------------------------
def _quantize_blocks(
    builder: Builder,
    node: Node,
    blocks: Blocks,
    scale: Value,
    zero: Value | None,
    bounds: tuple[int, int],
    zero_first: bool = False,
) -> Value:
    x, (scale, zero) = node.tensor("x"), _block_parameters(builder, blocks, scale, zero)
    view, dtype = blocks.view(builder, x), node.result.type.dtype
    quantized = emit_quantize(builder, view, scale, zero, *bounds, dtype, zero_first)
    return builder.aten.view(quantized, x.type.dims)


def _dequantize_blocks(
    builder: Builder, node: Node, blocks: Blocks, scale: Value, zero: Value | None
) -> Value:
    x, (scale, zero) = node.tensor("x"), _block_parameters(builder, blocks, scale, zero)
    view, dtype = blocks.view(builder, x), node.result.type.dtype
    numbers = emit_dequantize(builder, view, scale, zero, dtype)
    return builder.aten.view(numbers, x.type.dims)


def _block_parameters(
    builder: Builder, blocks: Blocks, scale: Value, zero: Value | None
) -> tuple[Value, Value | None]:
    scale = blocks.parameters(builder, scale)
    return scale, None if zero is None else blocks.parameters(builder, zero)


# -- per group of a row --------------------------------------------------------------------------
@signature(
    "x, scales, zero_points, quant_min: int, quant_max: int, dtype=None, group_size: int = 128"
)
def _quantize_group_shape(x: TensorType, dtype: FileDType) -> TensorType:
    return x.with_dtype(dtype_or(dtype, DType.int8))


@signature(
    "x, scales, zero_points, quant_min: int, quant_max: int, input_dtype=None, "
    "group_size: int = 128, output_dtype=None"
)
def _dequantize_group_shape(x: TensorType, output_dtype: FileDType) -> TensorType:
    return x.with_dtype(dtype_or(output_dtype, REAL))


def _groups(node: Node) -> Blocks:
    """The groups of each row. A group that is longer than a row is the row."""
    sizes = node.tensor("x").type.dims
    return Blocks(sizes, (1, min(node.int("group_size"), sizes[1])))


@rewrite_node(f"{_SPACE}.quantize_per_channel_group.default", _quantize_group_shape)
def _expand_quantize_group(builder: Builder, node: Node) -> Value:
    return _quantize_blocks(
        builder,
        node,
        _groups(node),
        node.tensor("scales"),
        node.tensor("zero_points"),
        (node.int("quant_min"), node.int("quant_max")),
        zero_first=True,
    )


@rewrite_node(f"{_SPACE}.dequantize_per_channel_group.default", _dequantize_group_shape)
def _expand_dequantize_group(builder: Builder, node: Node) -> Value:
    zeros = node.optional_tensor("zero_points")
    return _dequantize_blocks(builder, node, _groups(node), node.tensor("scales"), zeros)


# -- torchao: blocks of any shape ----------------------------------------------------------------
_RANGES = {
    DType.int8: INT8,
    DType.uint8: (0, 255),
    DType.int16: (-(2**15), 2**15 - 1),
    DType.int32: (-(2**31), 2**31 - 1),
}


@signature(
    "x, block_size, scale, zero_point, dtype=None, quant_min: int | None = None, "
    "quant_max: int | None = None"
)
def _quantize_affine_shape(
    x: TensorType, block_size: Sequence[Size], dtype: FileDType
) -> TensorType:
    Blocks(x.dims, block_size)
    return x.with_dtype(dtype_or(dtype, DType.int8))


@signature(
    "x, block_size, scale, zero_point, input_dtype=None, quant_min: int | None = None, "
    "quant_max: int | None = None, output_dtype=None"
)
def _dequantize_affine_shape(
    x: TensorType, block_size: Sequence[Size], output_dtype: FileDType
) -> TensorType:
    Blocks(x.dims, block_size)
    return x.with_dtype(dtype_or(output_dtype, REAL))


def _affine_blocks(node: Node) -> tuple[Blocks, Value, Value | None]:
    """The blocks, their scales and zero points. Files have empty zero points for none."""
    zero = node.optional_tensor("zero_point")
    if zero is not None and zero.type.numel == 0:
        zero = None
    blocks = Blocks(node.tensor("x").type.dims, node.sizes("block_size"))
    return blocks, node.tensor("scale"), zero


@rewrite_node("torchao.quantize_affine.default", _quantize_affine_shape)
def _expand_quantize_affine(builder: Builder, node: Node) -> Value:
    low, high = _RANGES[node.result.type.dtype]
    least, most = node.optional_int("quant_min"), node.optional_int("quant_max")
    bounds = (low if least is None else least, high if most is None else most)
    return _quantize_blocks(builder, node, *_affine_blocks(node), bounds)


@rewrite_node("torchao.dequantize_affine.default", _dequantize_affine_shape)
def _expand_dequantize_affine(builder: Builder, node: Node) -> Value:
    return _dequantize_blocks(builder, node, *_affine_blocks(node))

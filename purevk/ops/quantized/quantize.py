"""Operators that quantize and dequantize tensors, channels, tokens, groups and blocks.

All of them are pointwise programs on a view of the tensor in which scales and zero points
broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


# -- types ---------------------------------------------------------------------------------------
def _checked(x: TensorType, axis: int | None, block_size: Sequence[Size] | None) -> TensorType:
    """The tensor, if it has such an axis and such blocks."""
    if axis is not None:
        wrap(axis, x.rank)
    if block_size is not None:
        Blocks(x.dims, block_size)
    return x


def _quantized_type(
    x: TensorType,
    dtype: FileDType = None,
    axis: int | None = None,
    block_size: Sequence[Size] | None = None,
) -> TensorType:
    return _checked(x, axis, block_size).with_dtype(dtype_or(dtype, DType.int8))


def _real_type(
    x: TensorType,
    out_dtype: FileDType = None,
    output_dtype: FileDType = None,
    axis: int | None = None,
    block_size: Sequence[Size] | None = None,
) -> TensorType:
    dtype = output_dtype if out_dtype is None else out_dtype
    return _checked(x, axis, block_size).with_dtype(dtype_or(dtype, REAL))


# -- per tensor ----------------------------------------------------------------------------------
_quantize_shape = signature("x, scale, zero_point, quant_min, quant_max, dtype=None")(
    _quantized_type
)
_dequantize_shape = signature(
    "x, scale, zero_point, quant_min, quant_max, input_dtype=None, out_dtype=None"
)(_real_type)


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
_parameters_only = signature("x, scale, zero_point")


@rewrite_node("et_vk.quantize_q8ta_for_conv2d.default", _parameters_only(_quantized_type))
def _expand_quantize_int8(builder: Builder, node: Node) -> Value:
    scale, zero = (_number(builder, node, name) for name in ("scale", "zero_point"))
    return emit_quantize(builder, node.tensor("x"), scale, zero, *INT8, DType.int8)


rewrite_node("et_vk.dequantize_q8to_from_conv2d.default", _parameters_only(_real_type))(
    _expand_dequantize
)


def _convert_shape(x: TensorType, dtype: FileDType) -> TensorType:
    return x.with_dtype(dtype_or(dtype, x.dtype))


@rewrite_node(
    f"{_SPACE}.convert_element_type.no_fuse", _convert_shape, "prims.convert_element_type.default"
)
def _expand_convert(builder: Builder, node: Node) -> Value:
    return builder.aten._to_copy(node.tensor("x"), node.result.type.dtype)


# -- by blocks -----------------------------------------------------------------------------------
_RANGES = {
    DType.int8: INT8,
    DType.uint8: (0, 255),
    DType.int16: (-(2**15), 2**15 - 1),
    DType.int32: (-(2**31), 2**31 - 1),
}
_BlockSizes: TypeAlias = Callable[[Node], Sequence[Size]]


def _channels(node: Node) -> Sequence[Size]:
    """A block for each index along the axis."""
    type = node.tensor("x").type
    axis = wrap(node.int("axis"), type.rank)
    return [1 if d == axis else size for d, size in enumerate(type.dims)]


def _tokens(node: Node) -> Sequence[Size]:
    """A block for each row."""
    *lead, columns = node.tensor("x").type.dims
    return [*(1 for _ in lead), columns]


def _groups(node: Node) -> Sequence[Size]:
    """The groups of each row. A group that is longer than a row is the row."""
    return 1, min(node.int("group_size"), node.tensor("x").type.dims[1])


def _block_parameters(
    builder: Builder, node: Node, block: _BlockSizes
) -> tuple[Blocks, Value, Value | None]:
    """The blocks, with their scales and zero points as they broadcast. Files have empty zero points
    for none."""
    blocks = Blocks(node.tensor("x").type.dims, block(node))
    plural = "" if node.op.startswith("torchao.") else "s"
    scale, zero = node.tensor(f"scale{plural}"), node.optional_tensor(f"zero_point{plural}")
    if zero is not None:
        zero = None if zero.type.numel == 0 else blocks.parameters(builder, zero)
    return blocks, blocks.parameters(builder, scale), zero


def _bounds(node: Node, dtype: DType) -> tuple[int, int]:
    """The least and the largest quantized value; those of the dtype if the node has none."""
    low, high = node.optional_int("quant_min"), node.optional_int("quant_max")
    return (
        _RANGES[dtype][0] if low is None else low,
        _RANGES[dtype][1] if high is None else high,
    )


def _register(
    operator: str, block: _BlockSizes, quantize: str, dequantize: str, zero_first: bool = False
) -> None:
    """Registers an operator that quantizes blocks, and its inverse.

    Args:
        operator: a name with "quantize". block: the sizes of a block.
        quantize, dequantize: the parameters of both.
        zero_first: zero points are added before values are rounded.
    """

    @rewrite_node(operator, signature(quantize)(_quantized_type))
    def expand_quantize(builder: Builder, node: Node) -> Value:
        x, dtype = node.tensor("x"), node.result.type.dtype
        blocks, scale, zero = _block_parameters(builder, node, block)
        view, bounds = blocks.view(builder, x), _bounds(node, dtype)
        quantized = emit_quantize(builder, view, scale, zero, *bounds, dtype, zero_first)
        return builder.aten.view(quantized, x.type.dims)

    @rewrite_node(operator.replace(".quantize", ".dequantize"), signature(dequantize)(_real_type))
    def expand_dequantize(builder: Builder, node: Node) -> Value:
        x = node.tensor("x")
        blocks, scale, zero = _block_parameters(builder, node, block)
        view = blocks.view(builder, x)
        numbers = emit_dequantize(builder, view, scale, zero, node.result.type.dtype)
        return builder.aten.view(numbers, x.type.dims)


_register(
    f"{_SPACE}.quantize_per_channel.default",
    _channels,
    "x, scales, zero_points, axis: int, quant_min: int, quant_max: int, dtype=None",
    "x, scales, zero_points, axis: int, quant_min: int, quant_max: int, input_dtype=None, "
    "out_dtype=None",
)
_register(
    f"{_SPACE}.quantize_per_token.default",
    _tokens,
    "x, scales, zero_points, quant_min: int, quant_max: int, dtype=None",
    "x, scales, zero_points, quant_min: int, quant_max: int, input_dtype=None, output_dtype=None",
    zero_first=True,
)
_register(
    f"{_SPACE}.quantize_per_channel_group.default",
    _groups,
    "x, scales, zero_points, quant_min: int, quant_max: int, dtype=None, group_size: int = 128",
    "x, scales, zero_points, quant_min: int, quant_max: int, input_dtype=None, "
    "group_size: int = 128, output_dtype=None",
    zero_first=True,
)
_register(  # blocks of any shape
    "torchao.quantize_affine.default",
    lambda node: node.sizes("block_size"),
    "x, block_size, scale, zero_point, dtype=None, quant_min: int | None = None, "
    "quant_max: int | None = None",
    "x, block_size, scale, zero_point, input_dtype=None, quant_min: int | None = None, "
    "quant_max: int | None = None, output_dtype=None",
)


@rewrite_node(
    f"{_SPACE}.fake_quant_per_channel.default",
    signature("x, scales, zero_points, axis: int, quant_min: int, quant_max: int")(lambda x: x),
)
def _expand_fake_quantize_channel(builder: Builder, node: Node) -> Value:
    x, (_, scales, zeros) = node.tensor("x"), _block_parameters(builder, node, _channels)
    bounds = _bounds(node, DType.int32)
    quantized = emit_quantize(builder, x, scales, zeros, *bounds, DType.int32)
    return emit_dequantize(builder, quantized, scales, zeros, x.type.dtype)

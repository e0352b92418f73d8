"""Linear layers with quantized weights, as files name them."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import REAL
from purevk.ops.quantized.arithmetic import emit_quantize
from purevk.ops.quantized.matmul import (
    by_rows,
    check_groups,
    check_parameters,
    check_rows,
    emit_linear,
)
from purevk.ops.quantized.operands import INT8, OutputQuantization, supports
from purevk.ops.registry import ShapeError, rewrite_node
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits


def _result(x: TensorType, weight: TensorType, *parameters: TensorType | None) -> TensorType:
    """The type of the result. Parameters have a row for each row of the weight, or more."""
    if x.rank < 1 or weight.rank != 2:
        raise ShapeError(f"cannot apply a linear layer with weight {weight} to {x}")
    check_parameters(weight.dims[0], *parameters)
    return x.with_dims((*x.dims[:-1], weight.dims[0]))


# -- float activations ---------------------------------------------------------------------------
def _linear_shape(
    x: TensorType,
    weight: TensorType,
    scales: TensorType,
    group: int,
    bias: TensorType | None = None,
    bits: int = 8,
    minimums: TensorType | None = None,
) -> TensorType:
    return _result(x, weight, scales, bias, minimums)


# A linear layer with a weight of int8 or of 4 bits (the low nibble of a byte has the even column,
# as value + 8), scales and minimums [N] or [N, groups], and float activations.
@rewrite_node("purevk.quantized_linear", _linear_shape, supports=supports)
def _expand_linear(builder: Builder, node: Node) -> Value:
    weight, minimums = node.tensor("weight"), node.optional_tensor("minimums")
    rows = weight.type.dims[0]
    return emit_linear(
        builder,
        node.tensor("x"),
        weight,
        by_rows(builder, node.tensor("scales"), rows),
        bits=node.int("bits"),
        group=node.int("group"),
        minimums=None if minimums is None else by_rows(builder, minimums, rows),
        bias=node.optional_tensor("bias"),
        dtype=node.result.type.dtype,
    )


def _by_channel_shape(x: TensorType, weight: TensorType, scales: TensorType) -> TensorType:
    return _result(x, weight, scales)


@rewrite_node("aten._weight_int8pack_mm.default", _by_channel_shape, supports=supports)
def _expand_int8pack(builder: Builder, node: Node) -> Value:
    weight = node.tensor("weight")
    scales = by_rows(builder, node.tensor("scales"), weight.type.dims[0])
    return emit_linear(builder, node.tensor("x"), weight, scales, dtype=node.result.type.dtype)


@rewrite_node("et_vk.linear_qcs4w.default", _by_channel_shape, supports=supports)
def _expand_qcs4w(builder: Builder, node: Node) -> Value:
    weight = node.tensor("weight")
    return emit_linear(
        builder,
        node.tensor("x"),
        weight,
        by_rows(builder, node.tensor("scales"), weight.type.dims[0]),
        bits=4,
        high_first=True,
        dtype=node.result.type.dtype,
    )


def _q4gsw_shape(
    x: TensorType,
    weights: TensorType,
    weight_scales: TensorType,
    group_size: int,
    bias: TensorType | None = None,
) -> TensorType:
    """Scales are [groups, rows or more], or [rows or more]; a bias is [rows or more]."""
    if weight_scales.rank not in (1, 2) or not x.rank:
        raise ShapeError(f"a linear layer of {x} with scales {weight_scales}")
    groups = weight_scales.dims[0] if weight_scales.rank == 2 else 1
    check_groups(x.dims[-1], groups, group_size)
    check_rows(weights.dims[0], weight_scales.dims[-1])
    if bias is not None:
        check_rows(weights.dims[0], bias.numel)
    return _result(x, weights)


@rewrite_node("et_vk.linear_q4gsw.default", _q4gsw_shape, supports=supports)
def _expand_q4gsw(builder: Builder, node: Node) -> Value:
    weight = node.tensor("weights")
    scales = node.tensor("weight_scales")
    return emit_linear(
        builder,
        node.tensor("x"),
        weight,
        by_rows(builder, scales, weight.type.dims[0], transposed=True),
        bits=4,
        group=node.int("group_size"),
        bias=node.optional_tensor("bias"),
        dtype=node.result.type.dtype,
    )


# -- quantized_decomposed ------------------------------------------------------------------------
def _mixed_linear_shape(
    x: TensorType,
    weight: TensorType,
    weight_scales: TensorType,
    weight_zero_points: TensorType | None,
    dtype: DType | int | None = None,
) -> TensorType:
    result = _result(x, weight, weight_scales)
    return result.with_dtype(dtype) if isinstance(dtype, DType) else result


def _refuse_zero_points(node: Node, traits: DeviceTraits) -> str | None:
    if node.optional_tensor("weight_zero_points") is not None:
        return "no kernel for zero points of the weight"
    return supports(node, traits)


@signature("x, weight, weight_scales, weight_zero_points")
def _mixed_mm_shape(x: TensorType, weight: TensorType) -> TensorType:
    return x.with_dims((*x.dims[:-1], weight.dims[1]))


_SPACE = "quantized_decomposed"


@rewrite_node(f"{_SPACE}.mixed_linear.default", _mixed_linear_shape, supports=_refuse_zero_points)
def _expand_mixed_linear(builder: Builder, node: Node) -> Value:
    weight = node.tensor("weight")
    rows, columns = weight.type.dims
    scales = by_rows(builder, node.tensor("weight_scales"), rows)
    group = _dims.specialize(columns // scales.type.dims[1])
    return emit_linear(
        builder, node.tensor("x"), weight, scales, group=group, dtype=node.result.type.dtype
    )


@rewrite_node(f"{_SPACE}.mixed_mm.default", _mixed_mm_shape, supports=_refuse_zero_points)
def _expand_mixed_mm(builder: Builder, node: Node) -> Value:
    """The scales are those of the rows of the weight [K, N], so x is multiplied by them."""
    scaled = builder.aten.mul.Tensor(node.tensor("x"), node.tensor("weight_scales"))
    weight = builder.aten._to_copy(node.tensor("weight"), scaled.type.dtype)
    return builder.aten.mm(scaled, weight)


# -- int8 activations ----------------------------------------------------------------------------
_dq8ca_shape = signature(
    "x, input_scales, input_zp, weights, weight_sums, weight_scales, group_size: int, bias=None"
)(_q4gsw_shape)


@rewrite_node("et_vk.linear_dq8ca_q4gsw.default", _dq8ca_shape, supports=supports)
def _expand_dq8ca(builder: Builder, node: Node) -> Value:
    x, weight = node.tensor("x"), node.tensor("weights")
    x_scale, x_zero = node.tensor("input_scales"), node.tensor("input_zp")
    n, per_row = weight.type.dims[0], (*x.type.dims[:-1], 1)
    scale, zero = (builder.aten.view(each, per_row) for each in (x_scale, x_zero))
    quantized = emit_quantize(builder, x, scale, zero, *INT8, DType.int8)
    scales, sums = node.tensor("weight_scales"), node.tensor("weight_sums")
    return emit_linear(
        builder,
        quantized,
        weight,
        by_rows(builder, scales, n, transposed=True),
        bits=4,
        group=node.int("group_size"),
        bias=node.optional_tensor("bias"),
        sums=by_rows(builder, sums, n, transposed=True),
        x_scale=x_scale,
        x_zero=x_zero,
        dtype=node.result.type.dtype,
    )


def _q8csw_shape(
    x: TensorType,
    input_scale: float,
    input_zero_point: int,
    weights: TensorType,
    weight_sums: TensorType,
    weight_scales: TensorType,
    bias: TensorType | None = None,
) -> TensorType:
    result = _result(x, weights, weight_sums, weight_scales, bias)
    return result.with_dtype(REAL) if x.dtype is DType.int8 else result


@rewrite_node("et_vk.linear_q8ta_q8csw.default", _q8csw_shape, supports=supports)
def _expand_q8csw(builder: Builder, node: Node) -> Value:
    x, scale, zero = node.tensor("x"), node.float("input_scale"), node.int("input_zero_point")
    if x.type.dtype is not DType.int8:
        x = emit_quantize(builder, x, scale, zero, *INT8, DType.int8)
    return _emit_q8csw(builder, node, x, None)


def _q8ta_shape(
    x: TensorType,
    input_scale: float,
    input_zero_point: int,
    weights: TensorType,
    weight_sums: TensorType,
    weight_scales: TensorType,
    output_scale: float,
    output_zero_point: int,
    bias: TensorType | None = None,
    activation: str = "none",
) -> TensorType:
    OutputQuantization.after(activation, output_scale, output_zero_point)
    return _result(x, weights, weight_sums, weight_scales, bias).with_dtype(DType.int8)


@rewrite_node(
    "et_vk.q8ta_linear.default", _q8ta_shape, "et_vk.q8ta_linear_gemv.default", supports=supports
)
def _expand_q8ta(builder: Builder, node: Node) -> Value:
    out = OutputQuantization.after(
        node.str("activation"), node.float("output_scale"), node.int("output_zero_point")
    )
    return _emit_q8csw(builder, node, node.tensor("x"), out)


def _emit_q8csw(builder: Builder, node: Node, x: Value, out: OutputQuantization | None) -> Value:
    """The linear layer of a node for an int8 x, with an int8 weight that has one scale for each
    row."""
    weight = node.tensor("weights")
    n = weight.type.dims[0]
    return emit_linear(
        builder,
        x,
        weight,
        by_rows(builder, node.tensor("weight_scales"), n),
        bias=node.optional_tensor("bias"),
        sums=by_rows(builder, node.tensor("weight_sums"), n),
        x_scale=node.float("input_scale"),
        x_zero=node.int("input_zero_point"),
        dtype=node.result.type.dtype,
        out=out,
    )

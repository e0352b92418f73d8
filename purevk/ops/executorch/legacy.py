"""Operators that earlier releases of ExecuTorch wrote and later ones dropped: arithmetic fused with a
clamp or a convolution, and linear layers with 4-bit weights that have zero points."""

from __future__ import annotations

from purevk.ir import Node, TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.conv.shapes import CONVOLUTION, convolution_shape, refuse_convolution
from purevk.ops.promotion import result_type, wide_type
from purevk.ops.quantized.matmul import by_rows, emit_linear
from purevk.ops.registry import ShapeError, rewrite_node
from purevk.ops.shapes import broadcast_of
from purevk.ops.signatures import signature

_LARGEST = 3.4028235e38


def _bound(value: float | None, sign: int) -> float | None:
    """A bound of a clamp; the exporter writes the largest double for none."""
    return None if value is None or sign * value >= _LARGEST else float(value)


def _clamped(builder: Builder, node: Node, value: Value) -> Value:
    low = _bound(node.optional_float("output_min"), -1)
    high = _bound(node.optional_float("output_max"), 1)
    if low is None and high is None:
        return value
    return builder.aten.clamp(value, low, high)


@signature("x, other, output_min=None, output_max=None")
def _sum_shape(x: TensorType, other: TensorType | float) -> TensorType:
    return TensorType(result_type((x, other)), broadcast_of((x, other)))


_clamp_first_shape = signature("x, output_min, output_max, other")(_sum_shape)


_convolved_shape = signature(f"{CONVOLUTION}, other")(convolution_shape)


def _register(kind: str) -> None:
    full = f"aten.{kind}.Tensor"

    def then_clamp(builder: Builder, node: Node) -> Value:
        result = builder.emit(full, node.tensor("x"), node.tensor_or_scalar("other"))
        return _clamped(builder, node, result)

    def clamp_first(builder: Builder, node: Node) -> Value:
        clamped = _clamped(builder, node, node.tensor("x"))
        return builder.emit(full, clamped, node.tensor_or_scalar("other"))

    def convolved(builder: Builder, node: Node) -> Value:
        *convolution, other = node.args  # those of aten.convolution, then the other operand
        return builder.emit(full, builder.aten.convolution(*convolution), other)

    rewrite_node(f"et_vk.binary_{kind}_with_clamp.default", _sum_shape)(then_clamp)
    rewrite_node(f"et_vk.clamp_with_binary_{kind}.default", _clamp_first_shape)(clamp_first)
    rewrite_node(
        f"et_vk.conv_with_binary_{kind}.default", _convolved_shape, supports=refuse_convolution
    )(convolved)


for _kind in ("add", "sub", "mul", "div"):
    _register(_kind)


def _int4_shape(
    x: TensorType, mat2: TensorType, qGroupSize: int, qScaleAndZeros: TensorType, inner_k_tiles: int
) -> TensorType:
    """mat2 [N, K / 2], the even column in the high nibble; qScaleAndZeros [K / group, N, 2].
    `inner_k_tiles` is of no meaning here: it is about the packing of another device."""
    if x.rank < 1 or mat2.rank != 2 or x.dims[-1] % qGroupSize:
        raise ShapeError(f"cannot multiply {x} by {mat2} in groups of {qGroupSize}")
    return x.with_dims((*x.dims[:-1], mat2.dims[0]))


@rewrite_node("et_vk.linear_weight_int4.default", _int4_shape)
def _expand_int4(builder: Builder, node: Node) -> Value:
    """The weight is (quantized value - 8) * scale + zero. So the zeros of a group are multiplied by
    the sum of its columns of x."""
    x, weight, parameters = node.tensor("x"), node.tensor("mat2"), node.tensor("qScaleAndZeros")
    group = node.int("qGroupSize")
    rows, (*lead, columns) = weight.type.dims[0], x.type.dims
    scales = builder.aten.select.int(parameters, dim=2, index=0)
    zeros = builder.aten.select.int(parameters, dim=2, index=1)
    linear = emit_linear(
        builder,
        x,
        weight,
        by_rows(builder, scales, rows, transposed=True),
        bits=4,
        high_first=True,
        group=group,
        dtype=wide_type(x.type.dtype),
    )
    groups = builder.aten.view(x, (*lead, columns // group, group))
    sums = builder.aten.sum.dim_IntList(groups, (-1,))
    of_zeros = builder.purevk.unrounded_matmul(sums, zeros)
    made = builder.aten.add.Tensor(linear, of_zeros)
    return builder.aten._to_copy(made, node.result.type.dtype)

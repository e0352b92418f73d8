"""Keeps weights quantized: exporters write out the dequantization of a constant before the linear
layer or the embedding that reads it."""

from __future__ import annotations

from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Size, Value
from purevk.ops.quantized.blocks import Blocks
from purevk.ops.registry import ShapeError
from purevk.passes.rewrite import Rewriter, each_node
from purevk.tuning import DeviceTraits

_PER_CHANNEL = "quantized_decomposed.dequantize_per_channel.default"
_PER_GROUP = "quantized_decomposed.dequantize_per_channel_group.default"
_AFFINE = "torchao.dequantize_affine.default"
_TRANSPOSES = {"aten.permute.default", "aten.t.default", "aten.transpose.int"}


class _Weight(NamedTuple):
    """A matrix of int8 values with scales by rows: [rows] or [rows, groups]."""

    quantized: Value
    scales: Value
    group: Size


def keep_weights_quantized(graph: Graph, traits: DeviceTraits) -> Graph:
    """`linear(x, dequantize(w))` with a constant w of int8 and zero points of 0 reads w as it is.
    So do `mm`, `addmm` and `embedding`."""
    producers = graph.producers()

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        bias: Value | None = None
        if node.op == "aten.linear.default" and node.tensor("weight").type.rank == 2:
            x, bias = node.tensor("x"), node.optional_tensor("bias")
            weight = _weight(rewriter, graph, producers, node.tensor("weight"))
        elif node.op == "aten.mm.default":
            x = node.tensor("a")
            weight = _weight(rewriter, graph, producers, _transposed(producers, node.tensor("b")))
        elif node.op == "aten.addmm.default":
            x, bias = node.tensor("a"), node.tensor("bias")
            if (node.arg("beta"), node.arg("alpha")) != (1, 1):
                return None
            weight = _weight(rewriter, graph, producers, _transposed(producers, node.tensor("b")))
        elif node.op == "aten.embedding.default":
            weight = _weight(rewriter, graph, producers, node.tensor("weight"))
            if weight is None:
                return None
            return rewriter.purevk.quantized_table(
                weight.quantized,
                weight.scales,
                node.tensor("indices"),
                node.result.type.dtype,
            )
        else:
            return None
        if weight is None or x.type.dtype not in (DType.float32, DType.float16):
            return None
        if bias is not None and bias.type.dims != weight.quantized.type.dims[:1]:
            return None  # a bias that broadcasts
        return rewriter.purevk.quantized_linear(
            x, weight.quantized, weight.scales, weight.group, bias
        )

    return each_node(graph, visit)


def _transposed(producers: dict[Value, Node], value: Value) -> Value | None:
    """The matrix that `value` is the transpose of, or None."""
    node = producers.get(value)
    if node is None or node.op not in _TRANSPOSES:
        return None
    source = node.tensor("x")
    if source.type.rank != 2:
        return None
    if node.op == "aten.permute.default" and tuple(d % 2 for d in node.ints("dims")) != (1, 0):
        return None
    return source


def _weight(
    rewriter: Rewriter, graph: Graph, producers: dict[Value, Node], value: Value | None
) -> _Weight | None:
    node = None if value is None else producers.get(value)
    if node is None or node.op not in (_PER_CHANNEL, _PER_GROUP, _AFFINE):
        return None
    quantized = node.tensor("x")
    if quantized not in graph.constants:
        return None
    if quantized.type.rank != 2 or quantized.type.dtype is not DType.int8:
        return None
    rows, columns = quantized.type.dims
    shape: tuple[Size, ...]
    group: Size
    if node.op == _AFFINE:
        scales, zeros = node.tensor("scale"), node.optional_tensor("zero_point")
        try:
            grid = Blocks(quantized.type.dims, node.ints("block_size")).grid
        except ShapeError:
            return None
        if grid[0] != rows:
            return None
        shape, group = tuple(grid), columns // grid[1]
    else:
        scales, zeros = node.tensor("scales"), node.optional_tensor("zero_points")
        if node.op == _PER_GROUP:
            group = min(node.int("group_size"), columns)
        elif node.int("axis") in (0, -2):
            group = columns
        else:
            return None
        shape = (rows, columns // group)
    if scales not in graph.constants or not _is_zero(graph, zeros):
        return None
    if tuple(scales.type.dims) != shape:
        scales = rewriter.aten.view(scales, shape)
    return _Weight(quantized, scales, group)


def _is_zero(graph: Graph, zeros: Value | None) -> bool:
    if zeros is None:
        return True
    constant = graph.constants.get(zeros)
    if constant is not None and not constant.known:
        return True  # a plan without weights takes zero points as 0
    return (
        constant is not None
        and zeros.type.dtype is not DType.bfloat16
        and not constant.array(zeros.type).any()
    )

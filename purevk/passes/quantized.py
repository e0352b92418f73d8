"""Keeps weights quantized: exporters write out the dequantization of a constant before the product
that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Value
from purevk.ops.quantized.blocks import Blocks
from purevk.ops.registry import ShapeError
from purevk.passes.rewrite import Rewriter, each_node

_TRANSPOSES = {"aten.permute.default", "aten.t.default", "aten.transpose.int"}


@dataclass(frozen=True)
class _Weight:
    """A matrix of int8 codes with scales by rows: [rows] or [rows, groups]."""

    codes: Value
    scales: Value
    group: int


def keep_weights_quantized(graph: Graph) -> Graph:
    """`linear(x, dequantize(w))` with a constant w of int8 and zero points of 0 reads w as it is,
    and so do `mm`, `addmm` and `embedding`."""
    made = graph.producers()

    def visit(rewriter: Rewriter, node: Node) -> Any:
        if node.op == "aten.linear.default":
            x, matrix, bias = node.args
            weight = _weight(rewriter, graph, made, matrix)
        elif node.op == "aten.mm.default":
            (x, matrix), bias = node.args, None
            weight = _weight(rewriter, graph, made, _transposed(made, matrix))
        elif (
            node.op == "aten.addmm.default"
            and node.args[3:] == (1, 1)
            and node.args[0].type.rank == 1
        ):
            bias, x, matrix = node.args[:3]
            weight = _weight(rewriter, graph, made, _transposed(made, matrix))
        elif node.op == "aten.embedding.default":
            weight = _weight(rewriter, graph, made, node.args[0])
            if weight is None:
                return None
            return rewriter.emit(
                "purevk.quantized_table",
                weight.codes,
                weight.scales,
                node.args[1],
                node.result.type.dtype,
            )
        else:
            return None
        if weight is None or x.type.dtype not in (DType.float32, DType.float16):
            return None
        return rewriter.emit(
            "purevk.quantized_linear", x, weight.codes, weight.scales, weight.group, bias
        )

    return each_node(graph, visit)


def _transposed(made: dict[Value, Node], value: Value) -> Value | None:
    node = made.get(value)
    if node is None or node.op not in _TRANSPOSES or node.args[0].type.rank != 2:
        return None
    if node.op == "aten.permute.default" and tuple(d % 2 for d in node.args[1]) != (1, 0):
        return None
    return node.args[0]


def _weight(
    rewriter: Rewriter, graph: Graph, made: dict[Value, Node], value: Value | None
) -> _Weight | None:
    node = made.get(value)
    if node is None or node.args[0] not in graph.constants:
        return None
    codes = node.args[0]
    if codes.type.rank != 2 or codes.type.dtype is not DType.int8:
        return None
    rows, columns = codes.type.dims
    match node.op:
        case "quantized_decomposed.dequantize_per_channel.default":
            _, scales, zeros, axis = node.args[:4]
            if axis not in (0, -2):
                return None
            shape, group = (rows, 1), columns
        case "quantized_decomposed.dequantize_per_channel_group.default":
            _, scales, zeros = node.args[:3]
            group = min(node.args[6], columns)
            shape = (rows, columns // group)
        case "torchao.dequantize_affine.default":
            _, block, scales, zeros = node.args[:4]
            try:
                grid = Blocks(codes.type.dims, block).grid
            except ShapeError:
                return None
            if grid[0] != rows:
                return None
            shape, group = tuple(grid), columns // grid[1]
        case _:
            return None
    if scales not in graph.constants or not _is_zero(graph, zeros):
        return None
    if tuple(scales.type.dims) != shape:
        scales = rewriter.emit("aten.view.default", scales, shape)
    return _Weight(codes, scales, group)


def _is_zero(graph: Graph, zeros: Value | None) -> bool:
    if zeros is None:
        return True
    constant = graph.constants.get(zeros)
    if constant is not None and not constant.known:
        return True  # what a plan without weights takes for granted
    return (
        constant is not None
        and zeros.type.dtype is not DType.bfloat16
        and not constant.array(zeros.type).any()
    )

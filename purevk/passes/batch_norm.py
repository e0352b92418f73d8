"""Folds a batch norm into the convolution before it."""

from __future__ import annotations

from typing import Any

from purevk.ir import Graph, Node, Value
from purevk.ops.reduce.normalization import batch_norm_factors
from purevk.passes.rewrite import Rewriter, each_node, uses

_CONVOLUTION = "aten.convolution.default"
_CONVOLUTIONS = {_CONVOLUTION, "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default"}
_BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"


def fold_batch_norm(graph: Graph) -> Graph:
    """`batch_norm(convolution(x, w, b))` becomes `convolution(x, w * scale, b * scale + shift)`
    where weights are constant.

    The new weights depend on constants alone, so they are computed once, at load. In half precision
    the product is rounded to half again.
    """
    counts = uses(graph.nodes, graph.outputs)
    made = graph.producers()

    def visit(rewriter: Rewriter, node: Node) -> Any:
        if node.op != _BATCH_NORM:
            return None
        original = made[node.results[0]]
        convolution = made.get(original.args[0])
        if (
            convolution is None
            or convolution.op not in _CONVOLUTIONS
            or counts[original.args[0]] != 1
        ):
            return None
        if convolution.op == _CONVOLUTION and convolution.args[6]:
            return None  # transposed
        weight, bias = convolution.args[1:3]
        constants = [value for value in (weight, bias, *original.args[1:5]) if value is not None]
        if any(value not in graph.constants for value in constants):
            return None
        if any(counts.get(value, 0) for value in original.results[1:]):
            return None
        return _folded(rewriter, rewriter.current(convolution), node)

    return each_node(graph, visit)


def _folded(rewriter: Rewriter, convolution: Node, norm: Node) -> tuple[Value, ...]:
    weight, bias = convolution.args[1:3]
    scale, shift = batch_norm_factors(
        rewriter, norm.args[1], norm.args[2], norm.args[3], norm.args[4], norm.args[6]
    )
    dtype = weight.type.dtype
    column = rewriter.emit(
        "aten.view.default", scale, (scale.type.dims[0], *([1] * (weight.type.rank - 1)))
    )
    scaled = rewriter.emit(
        "aten._to_copy.default", rewriter.emit("aten.mul.Tensor", weight, column), dtype
    )
    if bias is not None:
        shift = rewriter.emit(
            "aten.add.Tensor", rewriter.emit("aten.mul.Tensor", bias, scale), shift, 1
        )
    shift = rewriter.emit("aten._to_copy.default", shift, dtype)
    made = rewriter.emit(convolution.op, convolution.args[0], scaled, shift, *convolution.args[3:])
    return (made, *norm.results[1:])

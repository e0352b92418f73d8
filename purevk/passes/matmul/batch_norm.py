"""Folds a batch norm into the convolution before it."""

from __future__ import annotations

from purevk.ir import Graph, Node, Value
from purevk.ops.reduce.normalization import batch_norm_factors, batch_norm_inputs
from purevk.passes.rewrite import Rewriter, each_node, reader_counts
from purevk.tuning import DeviceTraits

_CONVOLUTION = "aten.convolution.default"
_CONVOLUTIONS = {_CONVOLUTION, "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default"}
_BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"


def fold_batch_norm(graph: Graph, traits: DeviceTraits) -> Graph:
    """`batch_norm(convolution(x, w, b))` becomes `convolution(x, w * scale, b * scale + shift)`
    where weights are constant.

    The new weights depend on constants alone, so they are computed once, at load. In half precision
    they are rounded to half again.
    """
    counts = reader_counts(graph)
    producers = graph.producers()

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != _BATCH_NORM:
            return None
        original = producers[node.results[0]]
        convolved = original.tensor("x")
        convolution = producers.get(convolved)
        if convolution is None or convolution.op not in _CONVOLUTIONS or counts[convolved] != 1:
            return None
        if convolution.op == _CONVOLUTION and convolution.bool("transposed"):
            return None
        if convolution.tensor("x").type.rank != convolution.tensor("weight").type.rank:
            return None  # without a batch: the norm takes the channels for it
        constants = (*convolution.inputs[1:], *original.inputs[1:])
        if any(value not in graph.constants for value in constants):
            return None
        if any(counts.get(value, 0) for value in original.results[1:]):
            return None
        return _folded(rewriter, rewriter.current(convolution), node)

    return each_node(graph, visit)


def _folded(rewriter: Rewriter, convolution: Node, norm: Node) -> tuple[Value, ...]:
    weight, bias = convolution.tensor("weight"), convolution.optional_tensor("bias")
    scale, shift = batch_norm_factors(rewriter, *batch_norm_inputs(norm))
    dtype = weight.type.dtype
    column = rewriter.aten.view(scale, (scale.type.dims[0], *([1] * (weight.type.rank - 1))))
    scaled = rewriter.aten._to_copy(rewriter.aten.mul.Tensor(weight, column), dtype)
    if bias is not None:
        shift = rewriter.aten.add.Tensor(rewriter.aten.mul.Tensor(bias, scale), shift)
    shift = rewriter.aten._to_copy(shift, dtype)
    rewriter.source = f"{convolution.source} + {norm.source}"
    scaled_convolution = rewriter.emit(
        convolution.op, convolution.tensor("x"), scaled, shift, *convolution.args[3:]
    )
    return (scaled_convolution, *norm.results[1:])

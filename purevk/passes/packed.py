"""Attention within the parts of one sequence, such as the windows of an image or packed texts, as one
node.

Without kernels for packed sequences, models split queries, keys and values, and join what the parts
give, which is a kernel and a copy for each part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Value
from purevk.ops.attention.attention import NAME
from purevk.ops.shapes import wrap
from purevk.passes.decoding.heads import swaps_heads
from purevk.passes.matching import Matcher
from purevk.passes.rewrite import Rewriter, changing, each_node
from purevk.tuning import DeviceTraits

_SPLITS = ("aten.split_with_sizes.default", "aten.split.Tensor")
_HEADS_LAST = (0, 2, 1, 3)
# Arguments of attention that parts must not have.
_OTHERS = ("mask", "length", "functions", "limits", "sinks", "pages")


class _Part(NamedTuple):
    """The attention of a part, and what splits its q, k and v."""

    node: Node
    splits: tuple[Node, Node, Node]


def join_attention(graph: Graph, traits: DeviceTraits) -> Graph:
    """Replaces a concatenation of attention over all parts of queries, keys and values by attention
    over the whole, in which queries see the keys of their part."""
    matcher, moving = Matcher(graph), changing(graph.nodes)

    def part_of(value: Value, number: int, turned: bool) -> _Part | None:
        node, swaps = matcher.through(value, swaps_heads)
        if node is None or node.op != NAME or len(swaps) != turned or node.bool("causal"):
            return None
        if (
            any(node.arg(name) is not None for name in _OTHERS)
            or node.float("softcap")
            or node.bool("blocks")
        ):
            return None
        splits = []
        for name in "qkv":
            split = matcher.producer(node.tensor(name), *_SPLITS)
            if split is None or split.tensor("x") in moving:
                return None
            if split.results[number] is not node.tensor(name) or wrap(split.int("dim"), 4) != 2:
                return None
            splits.append(split)
        q, k, v = splits
        return _Part(node, (q, k, v))

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node.op != "aten.cat.default" or node.result.type.rank != 4:
            return None
        values, dim = node.tensors("tensors"), wrap(node.int("dim"), 4)
        if dim not in (1, 2) or len(values) < 2:
            return None
        first = part_of(values[0], 0, dim == 1)
        if first is None or any(len(split.results) != len(values) for split in first.splits):
            return None
        scale = first.node.float("scale")
        for number, value in enumerate(values):
            part = part_of(value, number, dim == 1)
            if part is None or part.splits != first.splits or part.node.float("scale") != scale:
                return None
        queries, keys, lengths_of_values = (_lengths(split) for split in first.splits)
        if queries is None or keys is None or keys != lengths_of_values:
            return None
        whole = [rewriter.resolve(split.tensor("x")) for split in first.splits]
        if {*queries, *keys} == {queries[0]} and whole[0].type.dims[0] == 1:
            result = _in_batches(rewriter, whole, len(queries), queries[0], scale)
        else:
            limits = rewriter.constant(_limits(queries, keys), DType.int32)
            arguments = (*whole, None, scale, False, 0, None, None, (), (), limits)
            result = rewriter.emit(NAME, *arguments)
        return rewriter.aten.permute(result, _HEADS_LAST) if dim == 1 else result

    return each_node(graph, visit)


def _lengths(split: Node) -> list[int] | None:
    """The lengths of the parts; None if a call decides them."""
    lengths = [value.type.dims[2] for value in split.results]
    static_lengths = [length for length in lengths if isinstance(length, int)]
    return static_lengths if len(static_lengths) == len(lengths) else None


def _limits(queries: list[int], keys: list[int]) -> np.ndarray:
    """The first key of each query and the one after its last, [1, 1, queries, 2]."""
    ends = np.cumsum(keys)
    limits = np.stack((ends - keys, ends), -1)
    return np.repeat(limits, queries, axis=0).astype(np.int32)[None, None]


def _in_batches(
    rewriter: Rewriter, whole: list[Value], count: int, length: int, scale: float
) -> Value:
    """Attention over parts of one length: they are a batch, without a copy."""
    parts = []
    for value in whole:
        heads, width = value.type.dims[1], value.type.dims[3]
        value = rewriter.aten.view(value, (heads, count, length, width))
        parts.append(rewriter.aten.permute(value, (1, 0, 2, 3)))
    result = rewriter.emit(NAME, *parts, None, scale, False, 0, None)
    heads, width = result.type.dims[1], result.type.dims[3]
    result = rewriter.aten.permute(result, _HEADS_LAST)
    result = rewriter.aten.view(result, (1, count * length, heads, width))
    return rewriter.aten.permute(result, _HEADS_LAST)

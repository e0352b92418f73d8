"""Recognizes attention written out: softmax(scale * q k^T + mask) v, with or without the guard
against rows that see nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Value
from purevk.ops.attention.attention import NAME, head_width_fits
from purevk.passes.rewrite import Rewriter, each_node
from purevk.passes.simplify import static_value

_PRODUCTS = ("aten.bmm.default", "aten.matmul.default")
_VIEWS = (
    "aten.view.default",
    "aten.permute.default",
    "aten.expand.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dims",
    "aten.transpose.int",
)


def guard_softmax(graph: Graph) -> Graph:
    """`where(not any(not (s == -inf)), 0, softmax(s))` becomes one softmax that gives 0 for rows of
    -inf.

    This is how torch writes out the softmax of scaled_dot_product_attention.
    """
    made = graph.producers()

    def visit(rewriter: Rewriter, node: Node) -> Any:
        if node.op != "aten.where.self":
            return None
        condition, zeros, soft = made[node.result].args
        softmax = made.get(soft)
        if (
            softmax is None
            or softmax.op != "aten._softmax.default"
            or not _is_number(graph, made, zeros, 0.0)
        ):
            return None
        scores, dim = softmax.args[0], softmax.args[1]
        seen_none = _argument(made, condition, "aten.logical_not.default")
        reduced = made.get(seen_none)
        if reduced is None or reduced.op != "aten.any.dim" or not reduced.args[2]:
            return None
        rank = scores.type.rank
        dims = reduced.args[1] if isinstance(reduced.args[1], tuple) else (reduced.args[1],)
        if len(dims) != 1 or dims[0] % rank != dim % rank:
            return None
        blocked = made.get(_argument(made, reduced.args[0], "aten.logical_not.default"))
        if blocked is None or blocked.op != "aten.eq.Tensor" or blocked.args[0] is not scores:
            return None
        if not _is_minus_infinity(graph, made, blocked.args[1]):
            return None
        return rewriter.emit(
            "purevk.softmax", rewriter.resolve(scores), dim, False, True, node.result.type.dtype
        )

    return each_node(graph, visit)


def _argument(made: dict[Value, Node], value: Value, op: str) -> Any:
    node = made.get(value)
    return node.args[0] if node is not None and node.op == op else None


def _number(graph: Graph, made: dict[Value, Node], value: Any) -> float | None:
    """The number that a value is everywhere, or None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, Value):
        return None
    node = made.get(value)
    if node is not None and node.op in ("aten.full_like.default", "aten.full.default"):
        number = node.args[1]
        return float(number) if isinstance(number, (int, float)) else None
    if (
        node is not None
        and node.op == "aten.scalar_tensor.default"
        and isinstance(node.args[0], (int, float))
    ):
        return float(node.args[0])
    found = static_value(graph.constants, value)
    return None if found is None else float(found)


def _is_number(graph: Graph, made: dict[Value, Node], value: Any, wanted: float) -> bool:
    return _number(graph, made, value) == wanted


def _is_minus_infinity(graph: Graph, made: dict[Value, Node], value: Any) -> bool:
    return _number(graph, made, value) == float("-inf")


@dataclass
class _Scores:
    """scale * (a b) + mask, at the sizes of the softmax."""

    product: Node
    scale: float
    mask: Value | None


def find_attention(graph: Graph) -> Graph:
    """Replaces softmax(...) v, where the softmax is over scores that a product makes, by one
    attention node."""
    made = graph.producers()
    counts: dict[Value, int] = {}
    for node in graph.nodes:
        for value in node.inputs:
            counts[value] = counts.get(value, 0) + 1
    for value in graph.output_values():
        counts[value] = counts.get(value, 0) + 1

    def visit(rewriter: Rewriter, node: Node) -> Any:
        if node.op not in _PRODUCTS:
            return None
        return _match(rewriter, graph, made, counts, made[node.result])

    return each_node(graph, visit)


def _match(
    rewriter: Rewriter, graph: Graph, made: dict[Value, Node], counts: dict[Value, int], node: Node
) -> Any:
    weights, values = node.args[:2]
    softmax = _through_reshapes(made, counts, weights)
    if (
        softmax is None
        or softmax.op not in ("purevk.softmax", "aten._softmax.default")
        or counts[softmax.result] != 1
    ):
        return None
    scores_value, dim = softmax.args[:2]
    if (
        softmax.op == "purevk.softmax" and softmax.args[2]
    ) or dim % scores_value.type.rank != scores_value.type.rank - 1:
        return None
    found = _scores(graph, made, counts, scores_value)
    if found is None:
        return None
    a, b = found.product.args[:2]
    if a.type.rank not in (3, 4) or b.type.rank != a.type.rank:
        return None
    width, value_width = a.type.dims[-1], values.type.dims[-1]
    if not head_width_fits(width, value_width) or a.type.dtype not in (
        DType.float32,
        DType.float16,
    ):
        return None
    a, scale_a = _unscaled(rewriter, graph, made, a)
    b, scale_b = _unscaled(rewriter, graph, made, b)
    sizes = scores_value.type.dims
    batch = sizes[:-2] if len(sizes) == 4 else (1, *sizes[:-2])
    if len(batch) != 2:
        return None
    queries, keys = sizes[-2], sizes[-1]

    def shaped(value: Value, rows: Any, columns: Any) -> Value:
        wanted = (*batch, rows, columns)
        value = rewriter.resolve(value)
        return (
            value
            if value.type.dims == wanted
            else rewriter.emit("aten.view.default", value, wanted)
        )

    q = shaped(a, queries, width)
    k = rewriter.emit("aten.permute.default", shaped(b, width, keys), (0, 1, 3, 2))
    v = shaped(values, keys, value_width)
    mask = None if found.mask is None else rewriter.resolve(found.mask)
    scale = found.scale * scale_a * scale_b
    made_node = rewriter.emit(NAME, q, k, v, mask, scale, False, 0, None)
    if made_node.type.dtype is not node.result.type.dtype:
        made_node = rewriter.emit("aten._to_copy.default", made_node, node.result.type.dtype)
    if made_node.type.dims == node.result.type.dims:
        return made_node
    return rewriter.emit("aten.view.default", made_node, node.result.type.dims)


def _through_reshapes(
    made: dict[Value, Node], counts: dict[Value, int], value: Value
) -> Node | None:
    """The node behind views that change the shape only, and clones; each read once."""
    node = made.get(value)
    while node is not None and counts.get(value, 0) == 1 and _is_reshape(node):
        value = node.args[0]
        node = made.get(value)
    return node if node is not None and counts.get(value, 0) == 1 else None


def _is_reshape(node: Node) -> bool:
    if node.op == "aten.expand.default":
        return node.args[0].type.dims == node.result.type.dims
    return node.op in (
        "aten.view.default",
        "aten.unsqueeze.default",
        "aten.squeeze.dims",
        "aten.alias.default",
    )


def _scores(
    graph: Graph, made: dict[Value, Node], counts: dict[Value, int], value: Value
) -> _Scores | None:
    """Takes scores apart into a product, a scale and one mask that is added."""
    scale, mask = 1.0, None
    sizes = value.type.dims
    while True:
        node = made.get(value)
        if node is None or counts.get(value, 0) != 1:
            return None
        if node.op in _PRODUCTS:
            return _Scores(node, scale, mask)
        if _is_reshape(node):
            # A mask found before stays one of the final sizes; after a reshape of other sizes none
            # may follow.
            value = node.args[0]
            continue
        if node.op == "aten.add.Tensor" and mask is None and scale == 1.0 and node.args[2] == 1:
            left, right = node.args[:2]
            pick = _pick_product(made, left, right)
            if pick is None or value.type.dims != sizes:
                return None
            value, mask = pick
            if mask.type.dtype not in (DType.float32, DType.float16):
                return None
            continue
        if node.op in ("aten.mul.Tensor", "aten.div.Tensor"):
            number = _number(graph, made, node.args[1])
            if number is None or number == 0.0 or not isinstance(node.args[0], Value):
                return None
            scale *= number if node.op == "aten.mul.Tensor" else 1.0 / number
            value = node.args[0]
            continue
        return None


def _pick_product(made: dict[Value, Node], left: Any, right: Any) -> tuple[Value, Value] | None:
    """Which of two summands leads to a product; the other is the mask."""
    for first, second in ((left, right), (right, left)):
        if not isinstance(first, Value) or not isinstance(second, Value):
            continue
        node = made.get(first)
        while node is not None and (
            _is_reshape(node) or node.op in ("aten.mul.Tensor", "aten.div.Tensor")
        ):
            node = made.get(node.args[0]) if isinstance(node.args[0], Value) else None
        if node is not None and node.op in _PRODUCTS:
            return first, second
    return None


def _unscaled(
    rewriter: Rewriter, graph: Graph, made: dict[Value, Node], value: Value
) -> tuple[Value, float]:
    """An operand without the multiplication by a number that stands somewhere behind its views, and
    that number.

    A cast between float types on the way is left out: the product is summed up in float32 anyway.
    """
    views: list[Node] = []
    at = value
    node = made.get(at)
    while node is not None and (node.op in (*_VIEWS, "aten.alias.default") or _is_float_cast(node)):
        views.append(node)
        at = node.args[0]
        node = made.get(at)
    if node is None or node.op != "aten.mul.Tensor" or not isinstance(node.args[0], Value):
        return value, 1.0
    number = _number(graph, made, node.args[1])
    if number is None or node.args[0].type.dims != node.result.type.dims:
        return value, 1.0
    result, inner = _unscaled(rewriter, graph, made, node.args[0])
    result = rewriter.resolve(result)
    source = made.get(result)
    if (
        source is not None
        and _is_float_cast(source)
        and source.args[0].type.dtype is value.type.dtype
    ):
        result = rewriter.resolve(source.args[0])
    for view in reversed(views):
        if view.op in _VIEWS:
            result = rewriter.emit(
                view.op, result, *[rewriter.resolve(arg) for arg in view.args[1:]]
            )
    if result.type.dtype is not value.type.dtype:
        result = rewriter.emit("aten._to_copy.default", result, value.type.dtype)
    return result, number * inner


def _is_float_cast(node: Node) -> bool:
    return (
        node.op == "aten._to_copy.default"
        and node.args[0].type.dtype in (DType.float32, DType.float16)
        and node.result.type.dtype in (DType.float32, DType.float16)
    )

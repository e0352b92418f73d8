"""Recognizes attention that is written out as softmax(scale * q k^T + mask) v, with or without
torch's guard for rows in which every score is -inf."""

from __future__ import annotations

import math
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Size, TensorType, Value
from purevk.ops import registry
from purevk.ops.attention.attention import NAME, head_width_fits
from purevk.ops.facts import Moves
from purevk.ops.shapes import wrap
from purevk.passes.matching import Matcher, Pattern, Var, op
from purevk.passes.rewrite import Rewriter, each_node
from purevk.tuning import DeviceTraits

_MATMULS = ("aten.bmm.default", "aten.matmul.default")
_SOFTMAXES = ("purevk.softmax", "aten._softmax.default")
_VIEWS = (
    "aten.view.default",
    "aten.permute.default",
    "aten.expand.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dims",
    "aten.transpose.int",
)
_LARGEST = 3.4028234663852886e38  # float32
_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
_WHERE, _ANY, _SOFTMAX = "aten.where.self", "aten.any.dim", "aten._softmax.default"


def _not(pattern: Pattern) -> Pattern:
    return op("aten.logical_not.default", x=pattern)


_IS_BLOCKED = op("aten.eq.Tensor", x=Var("scores"), y=float("-inf"))
_HAS_KEYS = op(_ANY, x=_not(_IS_BLOCKED), keepdim=True)
_GUARDED = op(_WHERE, cond=_not(_HAS_KEYS), x=0, y=op(_SOFTMAX, x=Var("scores")))


def guard_softmax(graph: Graph, traits: DeviceTraits) -> Graph:
    """`where(not any(not (s == -inf)), 0, softmax(s))` becomes one softmax that gives 0 for rows of
    -inf.

    This is how torch writes out the softmax of scaled_dot_product_attention.
    """
    matcher = Matcher(graph)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        match = matcher.match(_GUARDED, node.result, shared=True) if node.op == _WHERE else None
        if match is None:
            return None
        softmax, reduced = (
            next(node for node in match.nodes if node.op == name) for name in (_SOFTMAX, _ANY)
        )
        scores, dim = softmax.tensor("x"), softmax.int("dim")
        dims = [wrap(d, scores.type.rank) for d in reduced.optional_ints("dim") or ()]
        if dims != [wrap(dim, scores.type.rank)] or node.result.type.dims != scores.type.dims:
            return None  # it is of other rows, or the 0 has more dims
        return rewriter.purevk.softmax(
            rewriter.resolve(scores), dim, log=False, zero_rows=True, dtype=node.result.type.dtype
        )

    return each_node(graph, visit)


def find_attention(graph: Graph, traits: DeviceTraits) -> Graph:
    """Replaces softmax(...) v by one attention node, if the softmax is over scores that a matmul
    makes."""
    matcher = _Attention(graph)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        return (
            matcher.attention(rewriter, matcher.made[node.result]) if node.op in _MATMULS else None
        )

    return each_node(graph, visit)


class _Scores(NamedTuple):
    """scale * (a b) + mask, of the sizes of the softmax."""

    matmul: Node
    scale: float
    mask: Value | None


class _Attention(Matcher):
    """Finds attention by the matmul that makes its result."""

    def attention(self, rewriter: Rewriter, node: Node) -> Value | None:
        """The attention node that takes the place of a matmul with softmax weights, or None."""
        values = node.tensor("b")
        weights = self._weights(node.tensor("a"))
        if weights is None:
            return None
        scores, sinks = weights
        match = self._scores(scores)
        if match is None:
            return None
        a, b = match.matmul.tensor("a"), match.matmul.tensor("b")
        if a.type.rank not in (3, 4) or b.type.rank != a.type.rank:
            return None
        width, value_width = a.type.dims[-1], values.type.dims[-1]
        if not head_width_fits(width, value_width) or a.type.dtype not in _FLOATS:
            return None
        if not a.type.dtype is b.type.dtype is values.type.dtype:
            return None
        a, scale_a = self._unscaled(rewriter, a)
        b, scale_b = self._unscaled(rewriter, b)
        scale = match.scale * scale_a * scale_b
        if _LARGEST < abs(scale) < math.inf:
            return None  # each factor is a float32, and the product is none
        sizes = scores.type.dims
        batch = sizes[:-2] if len(sizes) == 4 else (1, *sizes[:-2])
        if len(batch) != 2:
            return None
        queries, keys = sizes[-2], sizes[-1]
        if not _is_view_of(node.tensor("a"), (*batch, queries, keys)):
            return None  # weights of several heads in one matrix
        if not _is_view_of(node.result, (*batch, queries, value_width)):
            return None  # values of more heads
        wanted_sizes = ((queries, width), (width, keys), (keys, value_width))
        shaped = [
            _shaped(rewriter, rewriter.resolve(value), (*batch, *sizes))
            for value, sizes in zip((a, b, values), wanted_sizes)
        ]
        q, k, v = shaped
        if q is None or k is None or v is None:
            return None
        k = rewriter.aten.permute(k, (0, 1, 3, 2))
        mask = None if match.mask is None else rewriter.resolve(match.mask)
        sinks = None if sinks is None else rewriter.resolve(sinks)
        others = (False, 0, None, None, (), (), None, sinks)
        result = rewriter.emit(NAME, q, k, v, mask, scale, *others)
        type_ = node.result.type
        if result.type.dtype is not type_.dtype:
            result = rewriter.aten._to_copy(result, type_.dtype)
        if result.type.dims == type_.dims:
            return result
        return rewriter.aten.view(result, type_.dims)

    def _weights(self, value: Value) -> tuple[Value, Value | None] | None:
        """The scores whose softmax a tensor is, and the sinks of queries: scores of one key more,
        which the softmax knows and the result does not have."""
        node, _ = self.through(value, _is_reshape)
        cut = node is not None and node.op == "aten.slice.Tensor"
        if node is not None and cut:
            *sizes, columns = node.tensor("x").type.dims
            plain = node.optional_size("start") in (None, 0) and node.optional_size("step") in (
                None,
                1,
            )
            if not plain or node.result.type.dims != (*sizes, columns - 1):
                return None
            node, _ = self.through(node.tensor("x"), _is_reshape)
        if node is None or node.op not in _SOFTMAXES:
            return None
        if node.op == "purevk.softmax" and node.bool("log"):
            return None
        scores = node.tensor("x")
        if wrap(node.int("dim"), scores.type.rank) != scores.type.rank - 1:
            return None
        return self._without_sinks(scores) if cut else (scores, None)

    def _without_sinks(self, scores: Value) -> tuple[Value, Value] | None:
        """Two tensors that `scores` joins: all but the last column, and that one. A number may have
        been subtracted from each row, such as its maximum: that does not change a softmax."""
        cat = self.made.get(scores)
        if cat is not None and cat.op == "aten.sub.Tensor" and self._is_read_once(scores):
            top = self.producer(cat.arg("y"))
            joined = cat.arg("x")
            if top is None or top.op not in ("aten.max.dim", "aten.amax.default"):
                return None
            plain = top.arg("x") is joined and top.bool("keepdim") and cat.scalar("alpha") == 1
            if not plain or not isinstance(joined, Value) or top.result.type.dims[-1] != 1:
                return None
            cat = self.made.get(joined)
        if cat is None or cat.op != "aten.cat.default":
            return None
        parts, rank = cat.tensors("tensors"), scores.type.rank
        if len(parts) != 2 or rank != 4 or wrap(cat.int("dim"), rank) != rank - 1:
            return None
        others, sinks = parts
        alike = others.type.dtype is sinks.type.dtype and sinks.type.dtype in _FLOATS
        return (others, sinks) if alike and sinks.type.dims[-1] == 1 else None

    def _is_read_once(self, value: Value) -> bool:
        return self.readers.get(value, 0) == 1

    def _scores(self, value: Value) -> _Scores | None:
        """Takes scores apart into a matmul, a scale and one mask that is added."""
        scale: float = 1.0
        mask: Value | None = None
        sizes = value.type.dims
        while True:
            node = self.made.get(value)
            if node is None or not self._is_read_once(value):
                return None
            if node.op in _MATMULS:
                return _Scores(node, scale, mask)
            if _is_reshape(node):
                # A mask found before has the final sizes. After a reshape to other sizes, no mask
                # may follow.
                value = node.tensor("x")
            elif node.op == "aten.add.Tensor" and mask is None and scale == 1.0:
                if node.scalar("alpha") != 1 or value.type.dims != sizes:
                    return None
                match = self._matmul_and_mask(node)
                if match is None:
                    return None
                value, mask = match
                if mask.type.dtype not in _FLOATS or value.type.dims != sizes:
                    return None
            elif node.op in ("aten.mul.Tensor", "aten.div.Tensor"):
                operand, number = node.arg("x"), self.number(node.arg("y"))
                if number is None or number == 0.0 or not isinstance(operand, Value):
                    return None
                if operand.type.dims != value.type.dims:
                    return None  # the number has more dims
                scale *= number if node.op == "aten.mul.Tensor" else 1.0 / number
                value = operand
            else:
                return None

    def _matmul_and_mask(self, addition: Node) -> tuple[Value, Value] | None:
        """The summand that a matmul makes, and the other one, which is the mask."""
        x, y = addition.arg("x"), addition.arg("y")
        if not isinstance(x, Value) or not isinstance(y, Value):
            return None
        for first, second in ((x, y), (y, x)):
            node = self.made.get(first)
            while node is not None and (
                _is_reshape(node) or node.op in ("aten.mul.Tensor", "aten.div.Tensor")
            ):
                node = self.producer(node.arg("x"))
            if node is not None and node.op in _MATMULS:
                return first, second
        return None

    def _unscaled(self, rewriter: Rewriter, value: Value) -> tuple[Value, float]:
        """An operand without a multiplication by a number before its views, and that number.

        A cast between float types on the way is left out: the matmul sums in float32 anyway.
        """
        views: list[Node] = []
        node = self.made.get(value)
        while node is not None and (
            node.op in (*_VIEWS, "aten.alias.default") or _is_float_cast(node)
        ):
            views.append(node)
            node = self.made.get(node.tensor("x"))
        if node is None or node.op != "aten.mul.Tensor":
            return value, 1.0
        operand, number = node.arg("x"), self.number(node.arg("y"))
        if not isinstance(operand, Value) or number is None:
            return value, 1.0
        if operand.type.dims != node.result.type.dims:
            return value, 1.0
        result, inner = self._unscaled(rewriter, operand)
        result = rewriter.resolve(result)
        source = self.made.get(result)
        if source is not None and _is_float_cast(source):
            before_cast = source.tensor("x")
            if before_cast.type.dtype is value.type.dtype:
                result = rewriter.resolve(before_cast)
        for view in reversed(views):
            if view.op in _VIEWS:
                others = [rewriter.resolve(arg) for arg in view.args[1:]]
                result = rewriter.emit(view.op, result, *others)
        if result.type.dtype is not value.type.dtype:
            result = rewriter.aten._to_copy(result, value.type.dtype)
        return result, number * inner


def _is_view_of(value: Value, dims: tuple[Size, ...]) -> bool:
    """Whether a tensor has the elements of matrices of these sizes, row by row."""
    return (
        value.type.dims[-2:] == dims[-2:]
        and value.type.numel == TensorType(value.type.dtype, dims).numel
    )


def _shaped(rewriter: Rewriter, value: Value, dims: tuple[Size, ...]) -> Value | None:
    """Matrices with 4 dims, of which those before the last two may broadcast; None if they do not
    have these sizes."""
    sizes = value.type.dims
    if sizes == dims:
        return value
    if sizes[-2:] != dims[-2:]:
        return None
    if _is_view_of(value, dims):
        return rewriter.aten.view(value, dims)
    sizes = (*([1] * (4 - len(sizes))), *sizes)
    if not all(
        (isinstance(size, int) and size == 1) or size == target for size, target in zip(sizes, dims)
    ):
        return None
    if sizes != value.type.dims:
        value = rewriter.aten.view(value, sizes)
    return rewriter.aten.expand(value, dims)


def _is_reshape(node: Node) -> bool:
    if node.op == "aten.expand.default":
        return node.tensor("x").type.dims == node.result.type.dims
    return registry.movement(node) is Moves.IN_ORDER


def _is_float_cast(node: Node) -> bool:
    return (
        node.op == "aten._to_copy.default"
        and node.tensor("x").type.dtype in _FLOATS
        and node.result.type.dtype in _FLOATS
    )

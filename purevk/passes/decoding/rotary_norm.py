"""Norms of heads take over the rotation of what they make, and its write to a cache."""

from __future__ import annotations

from typing import NamedTuple

from purevk.ir import Arg, Graph, Node, Value
from purevk.ops.attention.cache import WRITE_ROWS
from purevk.ops.attention.rotary import HALVES
from purevk.ops.attention.rotary_cache import NAME as ROTATE_TO_CACHE
from purevk.ops.reduce.normalization import NAME as NORM
from purevk.ops.shapes import wrap
from purevk.passes.matching import Matcher
from purevk.passes.rewrite import Rewriter, changing, each_node
from purevk.tuning import DeviceTraits

_SWAP = (0, 2, 1, 3)  # [B, S, H, D] to [B, H, S, D]
_VIEW, _PERMUTE = "aten.view.default", "aten.permute.default"
_VIEWS = (_VIEW, _PERMUTE)


def rotate_norms(graph: Graph, traits: DeviceTraits) -> Graph:
    """A norm of heads that only a rotation by halves reads becomes one node with this, also where
    queries and keys are rotated on the way to a cache."""
    kinds = {node.op for node in graph.nodes}
    if NORM not in kinds or not {HALVES, ROTATE_TO_CACHE} & kinds:
        return graph
    finder = _Finder(graph)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node.op == HALVES:
            norm = finder.norm(node, node.tensor("x"))
            return None if norm is None else _emit(rewriter, norm, node)[0]
        if node.op != ROTATE_TO_CACHE:
            return None
        of_queries, of_keys = (finder.norm(node, node.tensor(name)) for name in "qk")
        if of_queries is None or of_keys is None or node.tensor("keys") not in graph.states:
            return None  # a state is dense, which the norm that stores keys needs
        values, dim, index = node.tensor("v"), node.int("dim"), node.tensor("index")
        if dim == 2:
            values = rewriter.emit(_PERMUTE, values, _SWAP)
        (queries,) = _emit(rewriter, of_queries, node)
        _emit(rewriter, of_keys, node, state=node.tensor("keys"), dim=dim, index=index)
        rewriter.source = node.source
        rewriter.emit_all(WRITE_ROWS, node.tensor("values"), values, dim, index)
        return queries

    return each_node(graph, visit)


def _emit(rewriter: Rewriter, norm: _Norm, rotation: Node, **store: Arg) -> tuple[Value, ...]:
    rewriter.source = f"{norm.node.source} + {rotation.source}"
    angles = {name: rotation.arg(name) for name in ("cos", "sin", "start")}
    node = norm.node.with_arguments(x=norm.x(rewriter), **angles, **store)
    return rewriter.emit_all(NORM, *rewriter.current(node).args)


class _Norm(NamedTuple):
    """A norm, and the views of its result, one of the other, that end in what rotates."""

    node: Node
    views: tuple[Node, ...]

    def x(self, rewriter: Rewriter) -> Value:
        """The same views of what it normalizes."""
        x = rewriter.resolve(self.node.tensor("x"))
        if self.views and x.type.dims == self.views[-1].result.type.dims and not self._permutes:
            return x
        for view in self.views:
            x = rewriter.emit(view.op, x, *(rewriter.resolve(arg) for arg in view.args[1:]))
        return x

    @property
    def _permutes(self) -> bool:
        return any(view.op == _PERMUTE for view in self.views)


class _Finder(Matcher):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._written = changing(graph.nodes)

    def norm(self, rotation: Node, x: Value) -> _Norm | None:
        """The norm that can run where the rotation of its result x does, in one kernel with it. x may be
        a view of the result in which the rows are in another order, or have other dims."""
        width, (node, views) = x.type.dims[-1], self.through(x, _keeps_last)
        if node is None or node.op != NORM or node.int("count") != 1:
            return None
        if any(node.arg(name) is not None for name in ("epilogue", "cos")):
            return None
        if self._written & set(node.inputs):
            return None  # they may have changed after the norm
        cos, sin = (rotation.tensor(name).type for name in ("cos", "sin"))
        fits = isinstance(width, int) and cos.dims[1] == width and cos == sin
        return _Norm(node, views[::-1]) if fits else None


def _keeps_last(view: Node) -> bool:
    """Whether a node is a view in which the rows along the last dim stay as they are."""
    if view.op not in _VIEWS:
        return False
    dims, rank = view.tensor("x").type.dims, view.result.type.rank
    if not dims or view.result.type.dims[-1:] != dims[-1:]:
        return False
    return view.op == _VIEW or wrap(view.ints("dims")[-1], rank) == rank - 1

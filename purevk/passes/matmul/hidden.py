"""Widths of hidden layers that are no multiples of fragments, such as the 3420 of Qwen2.5-VL's encoder of
images: kernels that read operands in the order of fragments take whole blocks of 16 terms."""

from __future__ import annotations

import math

import numpy as np

from purevk.ir import Graph, Node, Size, Value
from purevk.ir import dims as _dims
from purevk.ops import registry
from purevk.ops.facts import Moves
from purevk.ops.matmul.fragments import BLOCK, has_fragments
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.passes.rewrite import Rewriter, changing, constants_of
from purevk.tuning import DeviceTraits

_LEAST = 256  # columns that are worth it
# Operators by element that give a finite number for zeros.
_POINTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy.default add.Tensor clamp.default elu.default gelu.default hardsigmoid.default"
        " hardswish.default leaky_relu.default mul.Tensor neg.default relu.default relu6.default"
        " sigmoid.default silu.default softplus.default square.default sub.Tensor tanh.default"
    ).split()
)
_BOUNDED = frozenset(
    f"aten.{name}.default" for name in ("clamp", "hardsigmoid", "relu6", "sigmoid", "tanh")
)


def pad_hidden(graph: Graph, traits: DeviceTraits) -> Graph:
    """Adds columns of zeros to constant matrices, and rows of zeros to the one behind them, where only
    operators by element are between: `f(x a, x b) c` has the same elements, and kernels on matrix
    cores take it."""
    finder = _Finder(graph, traits)
    if not finder.last:
        return graph
    rewriter = Rewriter(graph)
    padded = _Padded(rewriter)
    for node in graph.nodes:
        current = rewriter.current(node)
        rewriter.source = node.source
        if node in finder.first or node in finder.last:
            b, bias = current.tensor("b"), current.optional_tensor("bias")
            if node in finder.last:
                b = padded(b, 0)
            if node in finder.first:
                b = padded(b, 1)
                bias = None if bias is None else padded(bias, 0)
            args = current.with_arguments(b=b, bias=bias).args
        elif node in finder.between and node.op == "aten.view.default":
            *sizes, width = node.result.type.dims
            args = (current.args[0], (*sizes, width + _missing(width)))
        elif node in finder.between:
            args = current.args
        else:
            rewriter.keep(current)
            continue
        rewriter.replace(node, rewriter.emit(node.op, *args))
    return rewriter.finish()


class _Finder:
    """Hidden layers with widths that fill no fragments.

    Attributes:
        first, between, last: the matmuls that make the columns, the operators by element behind them,
            and the matmuls that read these.
    """

    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        self.first: set[Node] = set()
        self.between: set[Node] = set()
        self.last: set[Node] = set()
        self._traits, self._made, self._users = traits, graph.producers(), graph.users()
        self._constant = constants_of(graph) - changing(graph.nodes)
        self._outputs = graph.output_values()
        for node in graph.nodes:
            if self._is_wide(node, 0):
                self._find(node)

    def _is_wide(self, node: Node, dim: int) -> bool:
        """Whether a node multiplies by a constant matrix whose size along a dim is to be padded."""
        if node.op != MATMUL or node.arg("epilogue") is not None:
            return False
        b, bias = node.tensor("b"), node.optional_tensor("bias")
        if b not in self._constant or b.type.rank != 2 or not b.type.is_static:
            return False
        if bias is not None and (bias not in self._constant or bias.type.rank != 1):
            return False
        size = b.type.dims[dim]
        is_padded = isinstance(size, int) and size >= _LEAST and size % BLOCK != 0
        return is_padded and has_fragments(self._traits, b.type.dtype)

    def _find(self, last: Node) -> None:
        width, waiting = last.tensor("b").type.dims[0], [last.tensor("a")]
        first: set[Node] = set()
        between: set[Node] = set()
        while waiting:
            value = waiting.pop()
            node = self._made.get(value)
            if node is None or value in self._outputs or value.type.dims[-1] != width:
                return
            if node in first or node in between:
                continue
            if self._is_wide(node, 1):
                first.add(node)
                continue
            tensors = [arg for arg in node.args if isinstance(arg, Value)]
            if not self._keeps_zeros_finite(node, tensors):
                return
            between.add(node)
            waiting += tensors
        if self._is_bounded(last.tensor("a"), first, {}):
            return  # an infinite input has finite results, and none times a column of zeros
        inside = first | between | {last}
        for node in first | between:
            for value in node.results:
                if any(user not in inside for user in self._users.get(value, ())):
                    return
        self.first |= first
        self.between |= between
        self.last.add(last)

    def _is_bounded(self, value: Value, first: set[Node], answers: dict[Node, bool]) -> bool:
        """Whether operators make finite numbers of infinite ones."""
        node = self._made[value]
        if node not in answers:
            answers[node] = node not in first and (
                node.op in _BOUNDED
                or all(self._is_bounded(operand, first, answers) for operand in node.inputs)
            )
        return answers[node]

    def _keeps_zeros_finite(self, node: Node, tensors: list[Value]) -> bool:
        if len(node.results) != 1 or not tensors:
            return False
        if registry.movement(node) is Moves.IN_ORDER:
            return node.tensor("x").type.dims[-1] == node.result.type.dims[-1]
        numbers = [arg for arg in node.args if isinstance(arg, float)]
        plain = all(tensor.type.dims == node.result.type.dims for tensor in tensors)
        return node.op in _POINTWISE and plain and all(map(math.isfinite, numbers))


def _missing(size: Size) -> int:
    """What is missing to whole blocks."""
    return -_dims.specialize(size) % BLOCK


class _Padded:
    """Makes constants with zeros behind them, to whole blocks; one for all that read it."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter
        self._made: dict[tuple[Value, int], Value] = {}

    def __call__(self, value: Value, dim: int) -> Value:
        key = (value, dim)
        if key not in self._made:
            more = _missing(value.type.dims[dim])
            sizes = tuple(more if at == dim else size for at, size in enumerate(value.type.dims))
            zeros = self._rewriter.constant(np.zeros(sizes), value.type.dtype)
            self._made[key] = self._rewriter.aten.cat((value, zeros), dim)
        return self._made[key]

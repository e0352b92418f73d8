"""Recognizes root mean square norms that are written out, as models of transformers do:
`weight * (x * rsqrt(mean(x^2) + eps))`, with quotients or powers in place of `rsqrt`, without a weight,
and with casts to float32 around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Arg, Graph, Node, Value
from purevk.ops.shapes import wrap
from purevk.passes.rewrite import Rewriter, changing, each_node, reader_counts
from purevk.passes.simplify import static_value
from purevk.tuning import DeviceTraits

_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
# Of halves, squares overflow in eager torch: those norms stay as they are.
_COMPUTED = (DType.float32, DType.bfloat16)
_CAST = "aten._to_copy.default"


class _Norm(NamedTuple):
    """A norm: what it reads, and the nodes from the factor's product to its result."""

    x: Value
    weight: Value | None
    eps: float
    nodes: tuple[Node, ...]


def find_rms_norm(graph: Graph, traits: DeviceTraits) -> Graph:
    """Replaces a norm over the last dim, computed in float32 or bfloat16, by one node."""
    if all(node.op != "aten.mean.dim" for node in graph.nodes):
        return graph
    matcher, norms, inside = _Matcher(graph), dict[Value, _Norm](), set[Node]()
    # From the end on: what a weight multiplies, and what is cast, is a norm too.
    for node in reversed(graph.nodes):
        norm = None if node in inside else matcher.norm(node)
        if norm is not None:
            norms[node.result] = norm
            inside.update(norm.nodes)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        norm = norms.get(node.results[0]) if node.results else None
        if norm is None:
            return None
        x, weight = (
            None if value is None else rewriter.resolve(value) for value in (norm.x, norm.weight)
        )
        return rewriter.aten.rms_norm(x, (norm.x.type.dims[-1],), weight, norm.eps)

    return each_node(graph, visit) if norms else graph


class _Matcher:
    def __init__(self, graph: Graph) -> None:
        self._constants = graph.constants
        self._written = changing(graph.nodes)
        self._made = graph.producers()
        self._readers = reader_counts(graph)

    def norm(self, node: Node) -> _Norm | None:
        """The norm whose last operator a node is: of x / sqrt(mean(x^2) + eps), its product with a
        weight, or a cast of this."""
        found, product = self._scaled(node), node
        if found is not None:
            return self._typed(found, node)
        if node.op == _CAST:
            maker = self._only_reader(node.tensor("x"))
            if maker is None:
                return None
            product = maker
        if product.op != "aten.mul.Tensor":
            return None
        for weight, scaled in _both(product):
            if not isinstance(weight, Value) or weight.type.rank != 1:
                continue
            maker = self._only_reader(scaled)
            found = None if maker is None else self._scaled(maker)
            if found is not None:
                nodes = (*found.nodes, product)
                return self._typed(found._replace(weight=weight, nodes=nodes), node)
        return None

    def _typed(self, norm: _Norm, last: Node) -> _Norm | None:
        """The norm, of what its operand is a cast of, if its result has the type of that."""
        dtype, weight = last.result.type.dtype, norm.weight
        between = {norm.x.type.dtype, *(node.result.type.dtype for node in norm.nodes)}
        if not between <= {DType.float32, dtype}:
            return None  # elements are rounded to another type on purpose
        x = self._before_cast(norm.x, dtype)
        if x is None or x.type.dtype not in _FLOATS or x.type != last.result.type:
            return None
        if weight is not None:
            if weight.type.dtype not in _FLOATS or weight.type.dims != x.type.dims[-1:]:
                return None
            if weight in self._written:
                return None
        return None if x in self._written else norm._replace(x=x)

    def _scaled(self, node: Node) -> _Norm | None:
        """The norm without a weight, if a node is x / sqrt(mean(x^2) + eps), or a cast of it."""
        product: Node | None = node
        if node.op == _CAST:
            product = self._only_reader(node.tensor("x"))
        if product is None or product.op not in ("aten.mul.Tensor", "aten.div.Tensor"):
            return None
        for x, factor in _both(product):
            maker = self._only_reader(factor)
            if not isinstance(x, Value) or maker is None or x.type.dtype not in _COMPUTED:
                continue
            if product.op == "aten.div.Tensor":
                is_root = maker.op == "aten.sqrt.default" and x is product.arg("x")
            else:
                is_root = maker.op == "aten.rsqrt.default" or self._power(maker) == -0.5
            eps = self._mean_square(maker.arg("x"), x) if is_root else None
            if eps is not None:
                return _Norm(x, None, eps, (product, node))
        return None

    def _mean_square(self, arg: Arg, x: Value) -> float | None:
        """eps, if an argument is mean(x^2) + eps over the last dim."""
        addition = self._only_reader(arg, "aten.add.Tensor")
        if addition is None or addition.scalar("alpha") != 1:
            return None
        mean, eps = self._only_reader(addition.arg("x"), "aten.mean.dim"), addition.arg("y")
        eps = static_value(self._constants, eps) if isinstance(eps, Value) else eps
        if mean is None or isinstance(eps, bool) or not isinstance(eps, (int, float)):
            return None
        dims = mean.optional_ints("dim") or ()
        last = x.type.rank - 1
        if [wrap(d, x.type.rank) for d in dims] != [last] or not mean.bool("keepdim"):
            return None
        if mean.result.type.dtype is not x.type.dtype:
            return None
        square = self._only_reader(mean.arg("x"))
        if square is None:
            return None
        if square.op == "aten.mul.Tensor":
            squared = square.arg("x") is x and square.arg("y") is x
        else:
            squared = self._power(square) == 2 and square.arg("x") is x
        return float(eps) if squared else None

    def _power(self, node: Node) -> float | None:
        """The exponent, if a node is a power with a constant one."""
        if node.op != "aten.pow.Tensor_Tensor":
            return None
        exponent = node.arg("y")
        number = (
            static_value(self._constants, exponent) if isinstance(exponent, Value) else exponent
        )
        return float(number) if isinstance(number, (int, float)) else None

    def _before_cast(self, wide: Value, dtype: DType) -> Value | None:
        """The value of a dtype that a tensor is a cast of, or it itself."""
        if wide.type.dtype is dtype:
            return wide
        node = self._made.get(wide)
        if node is None or node.op != _CAST:
            return None
        return node.tensor("x") if node.tensor("x").type.dtype is dtype else None

    def _only_reader(self, arg: Arg, op: str = "") -> Node | None:
        """The node that makes an argument, if nobody else reads this, and it has this name."""
        node = self._made.get(arg) if isinstance(arg, Value) else None
        if node is None or (op and node.op != op) or len(node.results) != 1:
            return None
        return node if self._readers[node.result] == 1 else None


def _both(node: Node) -> Iterator[tuple[Arg, Arg]]:
    """Both operands, in either order."""
    x, y = node.arg("x"), node.arg("y")
    yield x, y
    yield y, x

"""Recognizes root mean square norms that are written out, as models of transformers do:
`weight * (x * rsqrt(mean(x^2) + eps))`."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Arg, Graph, Node, Value
from purevk.ops.shapes import wrap
from purevk.passes.rewrite import Rewriter, changing, each_node, reader_counts
from purevk.passes.simplify import static_value

_FLOATS = (DType.float32, DType.float16, DType.bfloat16)


def find_rms_norm(graph: Graph) -> Graph:
    """Replaces a norm over the last dim, computed in float32 and multiplied by a weight, by one
    node."""
    matcher = _Matcher(graph)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        found = matcher.norm(node)
        if found is None:
            return None
        x, weight, eps = found
        sizes = (x.type.dims[-1],)
        x, weight = rewriter.resolve(x), rewriter.resolve(weight)
        return rewriter.emit("aten.rms_norm.default", x, sizes, weight, eps)

    return each_node(graph, visit)


class _Matcher:
    def __init__(self, graph: Graph) -> None:
        self._constants = graph.constants
        self._written = changing(graph.nodes)
        self._made = graph.producers()
        self._readers = reader_counts(graph)

    def norm(self, node: Node) -> tuple[Value, Value, float] | None:
        """x, the weight and eps of a norm whose last operator a node is."""
        if node.op != "aten.mul.Tensor":
            return None
        for a, b in (("x", "y"), ("y", "x")):
            weight, scaled = node.arg(a), node.arg(b)
            if not isinstance(weight, Value) or weight.type.rank != 1:
                continue
            found = self._scaled(scaled)
            if found is None:
                continue
            wide, eps = found
            x = self._before_cast(wide, node.result.type.dtype)
            if x is None or x.type.dtype not in _FLOATS or x.type != node.result.type:
                continue
            if self._written & {x, weight}:
                continue
            if weight.type.dtype is x.type.dtype and weight.type.dims == x.type.dims[-1:]:
                return x, weight, eps
        return None

    def _scaled(self, arg: Arg) -> tuple[Value, float] | None:
        """x and eps, if an argument is x * rsqrt(mean(x^2) + eps), or a cast of it."""
        node = self._only_reader(arg)
        if node is not None and node.op == "aten._to_copy.default":
            node = self._only_reader(node.tensor("x"))
        if node is None or node.op != "aten.mul.Tensor":
            return None
        for a, b in (("x", "y"), ("y", "x")):
            x, factor = node.arg(a), self._only_reader(node.arg(b), "aten.rsqrt.default")
            if not isinstance(x, Value) or factor is None or x.type.dtype is not DType.float32:
                continue
            eps = self._mean_square(factor.arg("x"), x)
            if eps is not None:
                return x, eps
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
        if mean.result.type.dtype is not DType.float32:
            return None
        square = self._only_reader(mean.arg("x"))
        if square is None:
            return None
        if square.op == "aten.mul.Tensor":
            squared = square.arg("x") is x and square.arg("y") is x
        else:
            two = square.arg("y") if square.op == "aten.pow.Tensor_Tensor" else None
            number = static_value(self._constants, two) if isinstance(two, Value) else two
            squared = number == 2 and square.arg("x") is x
        return float(eps) if squared else None

    def _before_cast(self, wide: Value, dtype: DType) -> Value | None:
        """The value of a dtype that a float32 one is a cast of, or it itself."""
        if dtype is DType.float32:
            return wide
        node = self._made.get(wide)
        if node is None or node.op != "aten._to_copy.default":
            return None
        return node.tensor("x") if node.tensor("x").type.dtype is dtype else None

    def _only_reader(self, arg: Arg, op: str = "") -> Node | None:
        """The node that makes an argument, if nobody else reads this, and it has this name."""
        node = self._made.get(arg) if isinstance(arg, Value) else None
        if node is None or (op and node.op != op) or len(node.results) != 1:
            return None
        return node if self._readers[node.result] == 1 else None

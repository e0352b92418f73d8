"""What reads the result of a matmul in pairs of columns: a gated activation, or a rotary embedding with
the writes to a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Arg, Graph, Layout, Node, Size, Value
from purevk.ir import dims as _dims
from purevk.lower.expression import Expression, ExpressionBuilder
from purevk.ops import registry
from purevk.ops.attention.rotary_cache import NAME as ROTATE_TO_CACHE
from purevk.ops.elementwise.pointwise import NAME as POINTWISE
from purevk.ops.matmul.fused import ToCache, takes_caches
from purevk.ops.movement.views import view_layout
from purevk.passes.fusion.pointwise import MAX_EPILOGUE_CODE
from purevk.passes.rewrite import Rewriter, changing

FLOATS = (DType.float32, DType.float16, DType.bfloat16)


class PairReader(NamedTuple):
    """The node that alone reads a matmul, and reads pairs of its columns.

    Attributes:
        pair: columns from the first to the second.
        turned: it names the second before the first.
        views: the nodes between the matmul and this one.
    """

    node: Node
    pair: int
    turned: bool
    views: tuple[Node, ...]

    @property
    def is_gate(self) -> bool:
        """Whether it is a pointwise program that makes one column of two."""
        return self.node.op == POINTWISE

    def attributes(self, rewriter: Rewriter) -> dict[str, Arg]:
        """What the matmul does in its place, as `ops/matmul/fused.py` says."""
        node = self.node
        if self.is_gate:
            return {"pair": self.pair, "epilogue": self._program()}
        extras, caches = (
            tuple(rewriter.resolve(node.tensor(name)) for name in names)
            for names in (("cos", "sin", "index"), ("keys", "values"))
        )
        to_cache = ToCache(node.int("start"), node.int("dim"))
        return {"pair": self.pair, "epilogue": to_cache, "extras": extras, "caches": caches}

    def _program(self) -> Expression:
        """The program of a gate, whose input 0 is the first of a pair."""
        expression = self.node.attribute("expression", Expression)
        if not self.turned:
            return expression
        builder = ExpressionBuilder()
        inputs = zip(self.node.tensors("inputs"), expression.inputs, strict=True)
        refs = [builder.input(value, dtype) for value, dtype in reversed([*inputs])]
        return builder.build(builder.inline(expression, refs[::-1]))


class PairFinder:
    """Looks at what reads matmuls."""

    def __init__(self, graph: Graph) -> None:
        self._made, self._users = graph.producers(), graph.users()
        self._outputs = graph.output_values()
        self._outputs |= {s.value for s in graph.symbols.values() if s.value is not None}
        self._written = changing(graph.nodes)

    def reader(self, matmul: Node) -> PairReader | None:
        """The node that alone reads pairs of columns of a matmul; None if there is none."""
        reached = self._views(matmul.result)
        if reached is None:
            return None
        layouts, end = reached
        results = (self._made[value] for value in layouts if value is not matmul.result)
        views = tuple(dict.fromkeys(results))
        pair, turned = 0, False
        if end.op == POINTWISE:
            for turned in (False, True):
                pair = self._gate(matmul, end, layouts, turned)
                if pair:
                    break
        elif end.op == ROTATE_TO_CACHE:
            pair = self._heads(matmul, end, layouts)
        return PairReader(end, pair, turned, views) if pair else None

    def _views(self, value: Value) -> tuple[dict[Value, Layout], Node] | None:
        """The layouts of all views of a value in it, and the one node that reads them; None if there
        are several."""
        layouts = {value: Layout.dense(value.type.dims)}
        ends: set[Node] = set()
        waiting = [value]
        while waiting:
            source = waiting.pop()
            if source in self._outputs:
                return None
            for node in self._users.get(source, ()):
                definition = registry.find(node.op)
                form = None if definition is None else definition.form
                if definition is None or not isinstance(form, registry.View):
                    ends.add(node)
                    continue
                types = tuple(result.type for result in node.results)
                bound = tuple(definition.bind(node.args).values())
                seen = form.layout(layouts[source], source.type, types, *bound)
                if seen is None or node.inputs != (source,):
                    return None
                layouts.update(zip(node.results, seen))
                waiting += node.results
        return (layouts, ends.pop()) if len(ends) == 1 else None

    def _gate(self, matmul: Node, end: Node, layouts: Mapping[Value, Layout], turned: bool) -> int:
        """Half of the columns, if a pointwise program makes one column of one of the first and one
        of the second half, or the other way round; else 0."""
        if len(end.results) != 1 or end.sizes("scalars") or len(end.tensors("inputs")) != 2:
            return 0
        expression, inputs = end.attribute("expression", Expression), end.tensors("inputs")
        types = {*expression.dtypes, *expression.inputs, end.result.type.dtype}
        if expression.code_size > MAX_EPILOGUE_CODE or not types.issubset(FLOATS):
            return 0
        m, n = matmul.result.type.dims
        if not isinstance(n, int) or n % 8 or end.result.type.dtype not in FLOATS:
            return 0
        sizes = tuple(end.sizes("sizes"))
        if _dims.product(sizes) != m * (n // 2):
            return 0
        for number, value in enumerate(reversed(inputs) if turned else inputs):
            expected = view_layout(Layout(number * (n // 2), (n, 1)), (m, n // 2), sizes)
            if expected is None or value.type.dims != sizes or value not in layouts:
                return 0
            if not _is_same(layouts[value], expected, sizes):
                return 0
        return n // 2

    def _heads(self, matmul: Node, end: Node, layouts: Mapping[Value, Layout]) -> int:
        """Half of the width of a head, if queries, keys and values are the columns in this order;
        else 0."""
        q, k, v = (end.tensor(name) for name in "qkv")
        n, width = matmul.result.type.dims[1], q.type.dims[3]
        args = [end.arg(name) for name in ("cos", "sin", "start", "keys", "values")]
        if not takes_caches(q, *args) or not isinstance(n, int):  # type: ignore[arg-type]
            return 0
        inputs = {end.tensor(name) for name in ("cos", "sin", "index")}
        if self._written & inputs or inputs & layouts.keys():
            return 0
        first: Size = 0
        for value in (q, k, v):
            if value not in layouts or value.type.dtype is not matmul.result.type.dtype:
                return 0
            layout = Layout(first, (0, n, width, 1))
            if not _is_same(layouts[value], layout, value.type.dims):
                return 0
            first = first + value.type.dims[2] * width
        return width // 2 if first == n and isinstance(width, int) else 0


def _is_same(first: Layout, second: Layout, dims: Sequence[Size]) -> bool:
    """Whether two layouts are of the same elements."""
    return first.offset == second.offset and all(
        size == 1 or a == b for size, a, b in zip(dims, first.strides, second.strides)
    )

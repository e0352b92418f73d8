"""Complex numbers as real ones: each operator of complex tensors becomes operators of real tensors.

- A complex tensor is a tensor of *pairs*: floats with a last dim of size 2, as `torch.view_as_real`
  gives. Or it is its real and imaginary *parts*, which are views of pairs with stride 2.
- A rule in `ops/complex/` says what an operator is for complex numbers. An operator without a rule runs
  on the CPU, also if it is expressed by operators that have rules: what holds for real numbers may be
  wrong for complex ones.
- Most operators that move elements move the pairs. Pointwise operators compute both parts in one
  program, so a chain is one kernel. A matmul is one real matmul: the pairs of the left matrix are
  columns, and the right one has two rows and two columns per element.
- Inputs, outputs, constants, states, and operands of CPU nodes keep their complex dtypes. They are
  viewed as pairs, and nothing is copied.
"""

from __future__ import annotations

from dataclasses import replace

from purevk.dtypes import DType
from purevk.errors import GraphError
from purevk.ir import Arg, Graph, Node, Value, map_values, values_in
from purevk.ir.host import HOST
from purevk.ops import registry
from purevk.ops.complex.split import Pairs, Parts, Split, is_complex, rule_of
from purevk.ops.movement.bits import VIEW_DTYPE
from purevk.passes.rewrite import Rewriter
from purevk.tuning import DeviceTraits

# Operators that move complex32 as it is.
_STORAGE = (
    "purevk.store",
    "aten.copy.default",
    "aten.view_as_real.default",
    "aten.view_as_complex.default",
    VIEW_DTYPE,
)


def split_complex(graph: Graph, traits: DeviceTraits) -> Graph:
    """Expresses the operators of complex numbers by operators of real ones.

    What is left of complex numbers is what the host reads and writes: inputs, outputs, constants,
    states, and operands and results of nodes on the CPU and of control flow. They are views of the
    same bytes (`aten.view_as_real`, `aten.view_as_complex`).
    """
    if not any(is_complex(node) for node in graph.nodes):
        return graph
    return _Splitter(graph, traits).run()


class _Splitter:
    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        self.graph = graph
        self.rewriter = Rewriter(graph, traits)
        self.split = Split(self.rewriter)

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self._visit(node)
        for value in values_in(self.graph.outputs):
            if self.split.is_split(value):
                self.rewriter.replaced[value] = self.split.whole(value)
        for source in self.graph.symbols.values():
            measured = source.value
            if measured is not None and self.split.is_split(measured):
                self.rewriter.replaced.setdefault(measured, self.split.pairs(measured))
        return self.rewriter.finish()

    def _visit(self, node: Node) -> None:
        node = self.rewriter.current(node)
        self.rewriter.source = node.source
        if not is_complex(node):
            self.rewriter.keep(node)
            return
        rule = None if node.op == HOST or node.graphs else rule_of(node)
        if rule is None:
            self.rewriter.keep(replace(node, args=tuple(self._whole(arg) for arg in node.args)))
            return
        if node.op not in _STORAGE and any(
            value.type.dtype is DType.complex32 for value in (*node.inputs, *node.results)
        ):
            self._visit_wide(node)
            return
        if rule.apply is not None:
            replacements = rule.apply(self.split, node)
            results = (
                [replacements]
                if isinstance(replacements, (Value, Pairs, Parts))
                else [*replacements]
            )
        else:
            assert rule.expand is not None  # a rule has one of the two
            start = len(self.rewriter.nodes)
            values = rule.expand(self.rewriter, node)
            added = self.rewriter.nodes[start:]
            del self.rewriter.nodes[start:]
            for new_node in added:
                self._visit(new_node)
            results = [values] if isinstance(values, Value) else [*values]
        for old, new in zip(node.results, results, strict=True):
            self._define(node, old, new)

    def _visit_wide(self, node: Node) -> None:
        """A node on complex32 computes on complex64. What it gives is rounded."""

        def wide(value: Value) -> Value:
            if value.type.dtype is not DType.complex32:
                return value
            wide_value = Value(
                self.rewriter.names.fresh("wide"), value.type.with_dtype(DType.complex64)
            )
            self.split.define(wide_value, Pairs(self.split.pairs(value, DType.float32)))
            return wide_value

        args = tuple(_wide_dtypes(map_values(arg, wide)) for arg in node.args)
        try:
            dtypes = [_wide(type.dtype) for type in registry.definition_of(node).infer(args)]
        except registry.UnknownSizes:
            dtypes = [_wide(value.type.dtype) for value in node.results]
        results = tuple(
            Value(self.rewriter.names.fresh("wide"), value.type.with_dtype(dtype))
            for value, dtype in zip(node.results, dtypes, strict=True)
        )
        self._visit(replace(node, args=args, results=results))
        for old, new in zip(node.results, results, strict=True):
            if old.type.dtype.is_complex:
                pairs = self.split.pairs(self.rewriter.resolve(new), old.type.dtype.component)
                self.split.define(old, Pairs(pairs))
            else:
                self.rewriter.replaced[old] = self.split.cast(
                    self.rewriter.resolve(new), old.type.dtype
                )

    def _define(self, node: Node, old: Value, new: Value | Pairs | Parts) -> None:
        if isinstance(new, Value):
            new = self.rewriter.resolve(new)
            if new.type.dtype is not old.type.dtype:
                raise GraphError(
                    f"{node.op} of complex numbers gives {new.type}",
                    where=node.source,
                    why=f"{old.type} is expected",
                )
        if not isinstance(new, Value):
            self.split.define(old, new)
        elif new.type.dtype.is_complex:
            self.split.follow(old, new)
        else:
            self.rewriter.replaced[old] = new

    def _whole(self, arg: Arg) -> Arg:
        return map_values(
            arg, lambda value: self.split.whole(value) if value.type.dtype.is_complex else value
        )


def _wide_dtypes(arg: Arg) -> Arg:
    """An argument with complex64 in place of the dtype complex32."""
    if isinstance(arg, tuple):
        return tuple(_wide_dtypes(item) for item in arg)
    return _wide(arg) if isinstance(arg, DType) else arg


def _wide(dtype: DType) -> DType:
    return DType.complex64 if dtype is DType.complex32 else dtype

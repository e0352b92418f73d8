"""Assigns a storage and a layout to each value: views share the bytes of other values, and the rest
have an order of dims in memory."""

from __future__ import annotations

from dataclasses import replace

from purevk.errors import GraphError
from purevk.ir import Graph, Layout, Node, Value, values_in
from purevk.ir import dims as _dims
from purevk.ir.host import HOST
from purevk.ops import registry
from purevk.ops.complex.views import INTERLEAVE, pair_type, part_layout
from purevk.ops.elementwise.pointwise import NAME as POINTWISE
from purevk.ops.image_layout import LayoutQuery
from purevk.passes.rewrite import Rewriter
from purevk.schedule.plan import StorageAssignment
from purevk.tuning import DeviceTraits


def assign_storage(graph: Graph, traits: DeviceTraits | None = None) -> StorageAssignment:
    """Turns views into layouts, and gives each kernel's result its order of dims, which may depend
    on the device."""
    return _StorageAssigner(graph, traits).run()


class _StorageAssigner:
    def __init__(self, graph: Graph, traits: DeviceTraits | None) -> None:
        self.rewriter = Rewriter(graph)
        self.graph = graph
        self.storages: dict[Value, Value] = {}
        self.layouts: dict[Value, Layout] = {}
        self.placed = _placed_parts(graph)
        self.query = LayoutQuery(
            self.layout, self._copied, traits, graph.users(), graph.output_values()
        )

    def run(self) -> StorageAssignment:
        for node in self.graph.nodes:
            node = self.rewriter.current(node)
            self.rewriter.source = node.source
            definition = registry.find(node.op)
            form = None if definition is None else definition.form
            if definition is not None and isinstance(form, registry.View):
                self._view(node, definition, form)
                continue
            if node.op == HOST:
                for value in dict.fromkeys(node.inputs):
                    self.rewriter.replaced.update(self._dense_copy(value))
                node = self.rewriter.current(node)
            elif node.graphs:
                node = self._control(node)
            elif isinstance(form, registry.Kernel):
                node = self._results(node, form)
            self.rewriter.keep(node)
        outputs = []
        for output in self.graph.outputs:
            output = self.rewriter.resolve(output)
            for value in values_in((output,)):
                copied = self._dense_copy(value, own=True)
                output = copied.get(value, output)
            outputs.append(output)
        symbols = {}
        for symbol, source in self.graph.symbols.items():
            if source.dim is None and source.value is not None:
                value = self.rewriter.resolve(source.value)
                source = replace(source, value=self._dense_copy(value).get(value, value))
            symbols[symbol] = source
        graph = self.graph.with_nodes(self.rewriter.nodes, outputs=tuple(outputs), symbols=symbols)
        return StorageAssignment(graph, self.storages, self.layouts)

    def _control(self, node: Node) -> Node:
        """What the host hands to sub-graphs is dense; states that these touch stay as they are."""
        *args, reads, writes = node.args
        copies: dict[Value, Value] = {}
        for value in dict.fromkeys(values_in(args)):
            copies.update(self._dense_copy(value))
        self.rewriter.replaced.update(copies)
        return replace(node, args=(*map(self.rewriter.resolve, args), reads, writes))

    def layout(self, value: Value) -> Layout:
        return self.layouts.get(value) or Layout.dense(value.type.dims)

    def _view(self, node: Node, definition: registry.Operator, form: registry.View) -> None:
        source = node.inputs[0]
        bound = tuple(definition.bind(node.args).values())
        types = tuple(value.type for value in node.results)
        seen = form.layout(self.layout(source), source.type, types, *bound)
        if seen is None:
            source = self.rewriter.purevk.copy(source)
            seen = form.layout(self.layout(source), source.type, types, *bound)
        if seen is None:
            raise GraphError(
                f"{node.op} gives no layout",
                where=node.source,
                why="its input is dense, so a view needs no further copy",
                next="return layouts for a dense input",
            )
        for value, layout in zip(node.results, seen):
            self.storages[value] = self.storages.get(source, source)
            self.layouts[value] = layout

    def _dense_copy(self, value: Value, own: bool = False) -> dict[Value, Value]:
        """A value that the host reads must be dense and start at its storage's first byte.

        Args:
            own: whether it needs memory of its own, beside that of constants and states.
        """
        if own and (value in self.graph.constants or value in self.graph.inputs):
            return {}
        layout = self.layout(value)
        storage = self.storages.get(value, value)
        shared = own and (value in self.graph.states or storage in self.graph.constants)
        if value.type.dtype.is_complex and (shared or storage is not value):
            return self._dense_pairs(value, storage, shared)
        whole = (
            _dims.same(storage.type.numel, value.type.numel)
            and isinstance(layout.offset, int)
            and layout.offset == 0
        )
        if not shared and whole and layout.is_contiguous(value.type.dims):
            return {}
        return {value: self.rewriter.purevk.copy(value)}

    def _dense_pairs(self, value: Value, storage: Value, shared: bool) -> dict[Value, Value]:
        """The same for a view of pairs as complex numbers, which is dense by itself. Copies are of
        pairs."""
        pairs = Value(f"{value.name}_pairs", pair_type(value.type))
        self.storages[pairs], self.layouts[pairs] = storage, Layout.dense(pairs.type.dims)
        copied = {pairs: self.rewriter.purevk.copy(pairs)} if shared else self._dense_copy(pairs)
        if not copied:
            return {}
        whole = Value(f"{value.name}_copy", value.type)
        self.storages[whole], self.layouts[whole] = copied[pairs], Layout.dense(value.type.dims)
        return {value: whole}

    def _results(self, node: Node, form: registry.Kernel) -> Node:
        if any(value in self.placed for value in node.results):
            for number, value in enumerate(node.results):
                pairs = self.storages[value] = self.placed[value]
                self.layouts[value] = part_layout(Layout.dense(pairs.type.dims), number)
            return node
        if form.layouts is None:
            return node
        orders = form.layouts(node, self.query)
        for value, order in zip(node.results, orders):
            if order is not None and tuple(order) != tuple(range(value.type.rank)):
                self.layouts[value] = Layout.dense(value.type.dims, order)
        return node if form.adapt is None else form.adapt(node, orders, self.query)

    def _copied(self, value: Value, order: tuple[int, ...]) -> Value:
        """A copy with another order of dims in memory."""
        made = self.rewriter.purevk.copy(value, order)
        self.layouts[made] = Layout.dense(made.type.dims, order)
        return made


def _placed_parts(graph: Graph) -> dict[Value, Value]:
    """The real and imaginary parts that a pointwise program makes, with the pairs that are made of
    them: the program writes them there."""
    producers = graph.producers()
    placed: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.op != INTERLEAVE:
            continue
        parts = node.inputs
        maker = producers.get(parts[0])
        if maker is None or maker.op != POINTWISE or maker.results != parts:
            continue
        for part in parts:
            placed.setdefault(part, node.result)
    return placed

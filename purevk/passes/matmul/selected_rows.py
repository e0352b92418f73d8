"""Slices and selections of rows move up: only the rows that are read later are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from purevk.ir import Graph, Node, Size, Value, map_values
from purevk.ir import dims as _dims
from purevk.ops import registry
from purevk.ops.facts import Moves, is_same
from purevk.ops.movement.slices import position_of, slice_bounds
from purevk.ops.shapes import wrap
from purevk.passes.rewrite import Rewriter, constants_of
from purevk.tuning import DeviceTraits

_SLICE, _SELECT = "aten.slice.Tensor", "aten.select.int"
_LEAST_SAVED = 2  # times as many rows as are read


@dataclass(frozen=True)
class Rows:
    """Rows along a dim: of each of `groups` runs of `size` rows, those from `start` on.

    Attributes:
        dim: the dim of a tensor. It has `groups * size` rows.
        groups: 1 for rows next to one another; more where dims before them are merged into `dim`.
        size: the rows of a run.
        start: the first row of a run that is read.
        count: how many rows of a run are read.
    """

    dim: int
    groups: Size
    size: Size
    start: Size
    count: Size

    def is_same(self, other: Rows) -> bool:
        """Whether both are the same rows in each call."""
        pairs = zip(self._sizes(), other._sizes())
        return self.dim == other.dim and all(is_same(mine, its) for mine, its in pairs)

    def _sizes(self) -> tuple[Size, ...]:
        return self.groups, self.size, self.start, self.count

    def of(self, dims: tuple[Size, ...]) -> tuple[Size, ...]:
        """The sizes of a tensor with these rows only."""
        return (*dims[: self.dim], self.groups * self.count, *dims[self.dim + 1 :])


def compute_selected_rows(graph: Graph, traits: DeviceTraits) -> Graph:
    """`f(x)[:, -1]` becomes `f(x[:, -1])` where f computes each row of one row, as linear layers, norms
    and operators by element do. A language model whose caller reads the logits of the last token
    computes no others, and one row of the feed-forward part of its last layer.

    Only where nothing else reads f(x), where at most half of the rows are read, and where f has more
    than operators by element.
    """
    readers = _Readers(graph)
    return _Selecting(graph, readers).run() if readers.computed else graph


class _Readers:
    """Follows the graph from its end: which rows of each value are read.

    Attributes:
        rows: of each value that is read by selections of the same rows only, these rows.
        computed: nodes that only need to compute the rows of their results.
    """

    def __init__(self, graph: Graph) -> None:
        self.rows: dict[Value, Rows | None] = dict.fromkeys(graph.output_values())
        sources = (source.value for source in graph.symbols.values() if source.value is not None)
        self.rows.update(dict.fromkeys(sources))
        self._constants = constants_of(graph)
        self.computed: set[Node] = set()
        needs: dict[Node, Mapping[Value, Rows]] = {}
        for node in reversed(graph.nodes):
            needed = self._needed(node)
            if needed is not None and selection(node) is None:
                needs[node] = needed
            for value in node.inputs:
                self._read(value, (needed or {}).get(value))
        self._choose(graph, needs)

    def _read(self, value: Value, rows: Rows | None) -> None:
        before = self.rows.get(value, rows)
        is_same = before is not None and rows is not None and before.is_same(rows)
        self.rows[value] = rows if is_same else None

    def _needed(self, node: Node) -> dict[Value, Rows] | None:
        """The rows of the operands that a node needs, where it does not need all of them."""
        own = selection(node)
        if own is not None:
            x = node.inputs[0]
            return {} if x in self._constants else {x: own}
        read = [self.rows[result] for result in node.results if result in self.rows]
        if not read or read[0] is None or node.graphs or registry.mutated(node):
            return None
        if not all(rows is not None and rows.is_same(read[0]) for rows in read):
            return None
        if self._constants.issuperset(node.inputs):
            return None
        return rows_of_operands(node, read[0])

    def _choose(self, graph: Graph, needs: Mapping[Node, Mapping[Value, Rows]]) -> None:
        """Takes the nodes between selections and what they select from, if there is more than
        operators by element among them."""
        makers = graph.producers()
        leader = {node: node for node in needs}

        def find(node: Node) -> Node:
            while leader[node] is not node:
                node = leader[node]
            return node

        for node, needed in needs.items():
            for value in needed:
                maker = makers.get(value)
                if maker is not None and maker in needs:
                    leader[find(maker)] = find(node)
        costly = {find(node) for node in needs if _computes(node)}
        self.computed = {node for node in needs if find(node) in costly}


def _computes(node: Node) -> bool:
    """Whether a node does more than move elements, or compute with each of them."""
    definition = registry.definition_of(node)
    simple = isinstance(definition.form, (registry.Pointwise, registry.View))
    return not simple and registry.movement(node) is Moves.NO


def selection(node: Node) -> Rows | None:
    """The rows that a node selects, if it does nothing else; None if these are more than half."""
    if node.op not in (_SLICE, _SELECT):
        return None
    x = node.inputs[0].type
    if not x.rank:
        return None
    dim = wrap(node.int("dim"), x.rank)
    size, count = x.dims[dim], node.result.type.dims[dim] if node.op == _SLICE else 1
    if node.op == _SELECT:
        start = position_of(node.size("index"), size)
    elif node.int("step") == 1:
        ends = node.optional_size("start"), node.optional_size("end")
        start = slice_bounds(size, ends[0], ends[1], 1)[0]
    else:
        return None
    if any(symbol.unbacked for end in (start, count) for symbol in _dims.symbols(end)):
        return None  # known only after a part of the call
    if _dims.upper(count) * _LEAST_SAVED > _dims.upper(size):
        return None
    return Rows(dim, 1, size, start, count)


def rows_of_operands(node: Node, rows: Rows) -> dict[Value, Rows] | None:
    """The rows of the operands that a node needs for rows of its results; None if it needs more."""
    definition = registry.find(node.op)
    if registry.is_reshape(node):
        x = node.inputs[0]
        before = rows_before_reshape(x.type.dims, node.result.type.dims, rows)
        return None if before is None else {x: before}
    rule = None if definition is None else definition.rows
    dims = None if rule is None else rule(node, rows.dim)
    if dims is None:
        return None
    needed: dict[Value, Rows] = {}
    for position, dim in dims.items():
        for value in Node(node.op, (node.args[position],), ()).inputs:
            needed[value] = replace(rows, dim=dim)
    # A value may be another operand too, which is read whole.
    others = [arg for position, arg in enumerate(node.args) if position not in dims]
    return None if needed.keys() & set(Node(node.op, tuple(others), ()).inputs) else needed


def rows_before_reshape(
    before: tuple[Size, ...], after: tuple[Size, ...], rows: Rows
) -> Rows | None:
    """The rows before a reshape that are the rows `rows` after it."""
    for first, last in _runs(before, after):
        if rows.dim not in last:
            continue
        inner = _dims.product(after[d] for d in last if d > rows.dim)
        groups = rows.groups * _dims.product(after[d] for d in last if d < rows.dim)
        size, start, count = (number * inner for number in (rows.size, rows.start, rows.count))
        for dim in first:
            below = _dims.product(before[d] for d in first if d > dim)
            above = _dims.product(before[d] for d in first if d < dim)
            numbers = [
                _divided(number, by)
                for number, by in ((groups, above), (size, below), (start, below), (count, below))
            ]
            if None in numbers:
                continue
            own = Rows(dim, *numbers)  # type: ignore[arg-type]
            if is_same(own.groups * own.size, before[dim]):
                return own
    return None


def _runs(before: tuple[Size, ...], after: tuple[Size, ...]) -> Iterator[tuple[range, range]]:
    """Runs of dims with as many elements as one another before and after a reshape."""
    i = j = 0
    while i < len(before) and j < len(after):
        first, last = i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while not is_same(left, right):
            if i < len(before) and (j == len(after) or _dims.upper(left) <= _dims.upper(right)):
                left, i = left * before[i], i + 1
            elif j < len(after):
                right, j = right * after[j], j + 1
            else:
                return
        yield range(first, i), range(last, j)


def _divided(number: Size, by: Size) -> Size | None:
    """An exact quotient, or None."""
    if isinstance(by, int) and by == 0:
        return None
    quotient = number // by
    return quotient if is_same(quotient * by, number) else None


class _Selecting(Rewriter):
    """Computes only the rows that are read."""

    def __init__(self, graph: Graph, readers: _Readers) -> None:
        super().__init__(graph)
        self._read = readers.rows
        self._computed = {value for node in readers.computed for value in node.results}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self.source = node.source
            rows = next((r for v in node.results if (r := self._read.get(v)) is not None), None)
            if rows is not None and node.results[0] in self._computed:
                self._compute(node, rows)
            elif node.op in (_SLICE, _SELECT) and node.inputs[0] in self._computed:
                x = self.resolve(node.inputs[0])
                if node.op == _SELECT:
                    x = self.aten.select.int(x, node.int("dim"), 0)
                self.replace(node, x)
            else:
                self.keep(self.current(node))
        return self.finish()

    def _compute(self, node: Node, rows: Rows) -> None:
        """Emits a node for the rows that are read."""
        needed = rows_of_operands(node, rows) or {}

        def operand(value: Value) -> Value:
            if value not in needed or value in self._computed:
                return self.resolve(value)
            return self._selected(self.resolve(value), needed[value])

        args = tuple(map_values(arg, operand) for arg in node.args)
        types = [value.type.with_dims(rows.of(value.type.dims)) for value in node.results]
        if registry.is_reshape(node):
            self.replace(node, self.aten.view(args[0], types[0].dims))
            return
        node = replace(node, args=args)
        if "size" in registry.definition_of(node).parameters:
            node = node.with_arguments(size=types[0].dims)
        results = tuple(Value(self.names.fresh("rows"), type) for type in types)
        self.keep(replace(node, results=results))
        self.replace(node, results)

    def _selected(self, value: Value, rows: Rows) -> Value:
        """The rows of a tensor that is there as a whole."""
        dim, dims, ends = rows.dim, value.type.dims, (rows.start, rows.start + rows.count)
        if is_same(rows.groups, 1):
            return self.aten.slice.Tensor(value, dim, *ends)
        runs = self.aten.view(value, (*dims[:dim], rows.groups, rows.size, *dims[dim + 1 :]))
        return self.aten.view(self.aten.slice.Tensor(runs, dim + 1, *ends), rows.of(dims))

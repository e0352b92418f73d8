"""Writes to a cache in place: `state = index_copy(state, dim, positions, rows)`, which torch.export
makes of `index_copy_`, copies the whole cache."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Size, Value, values_in
from purevk.ir.host import HOST
from purevk.ops import registry
from purevk.ops.attention.cache import WRITE_ROWS
from purevk.ops.facts import Moves
from purevk.ops.index.scatter import NAME as SCATTER
from purevk.passes.rewrite import Rewriter, each_node
from purevk.tuning import DeviceTraits


def write_in_place(graph: Graph, traits: DeviceTraits) -> Graph:
    """A scatter of rows into a state that then becomes its result writes these rows into the state.

    Only if no two rows have the same position, and nobody reads the state as it was afterwards.
    """
    writes = _writes(graph)
    if not writes:
        return graph
    stores = {
        node for node in graph.nodes if node.op == "purevk.store" and node.tensor("value") in writes
    }

    def visit(rewriter: Rewriter, node: Node) -> Value | tuple[()]:
        if node.op == "purevk.store":
            return ()
        state, (index,) = node.tensor("x"), node.tensors("indices")
        dim = node.ints("given")[0]
        source = _expanded(rewriter, node.tensor("source"), _rows(state, dim, index))
        rewriter.emit_all(WRITE_ROWS, state, source, dim, index)
        return state

    return each_node(graph, visit, stores.union(writes.values()))


def _writes(graph: Graph) -> dict[Value, Node]:
    """The results of scatters that can be written in place, with the scatters."""
    producers = graph.producers()
    stores: dict[Value, list[Node]] = {}  # what writes each state
    for node in graph.nodes:
        for state in registry.mutated(node):
            stores.setdefault(state, []).append(node)
        for operand in values_in(node.args) if node.graphs else ():
            stores.setdefault(operand, []).append(node)
    outputs, reads = graph.output_values(), _Reads(graph)
    caches: dict[Value, Node] = {}
    for state, nodes in stores.items():
        if state not in graph.states or len(nodes) != 1 or nodes[0].op != "purevk.store":
            continue
        scatter = producers.get(nodes[0].tensor("value"))
        if scatter is None or not _writes_rows(graph, producers, scatter, state):
            continue
        if outputs.isdisjoint(reads.same_bytes(scatter.result)) and _unread_after(
            graph, reads, scatter, state, nodes[0]
        ):
            caches[scatter.result] = scatter
    return caches


def _writes_rows(graph: Graph, producers: dict[Value, Node], scatter: Node, state: Value) -> bool:
    """Whether a node sets rows of a state at positions of which no two are equal."""
    if scatter.op != SCATTER or scatter.tensor("x") is not state:
        return False
    indices, source = scatter.tensors("indices"), scatter.arg("source")
    dims = scatter.ints("given")
    if scatter.str("mode") != "set" or scatter.optional_int("along") is not None:
        return False
    if len(dims) != 1 or len(indices) != 1 or not isinstance(source, Value):
        return False
    (dim,), (index,) = dims, indices
    if index.type.rank != 1 or index.type.dtype not in (DType.int32, DType.int64):
        return False
    rows_ = _rows(state, dim, index)
    given_dims = source.type.dims
    return (
        len(given_dims) <= len(rows_)
        and all(a in (b, 1) for a, b in zip(reversed(given_dims), reversed(rows_)))
        and source.type.dtype is state.type.dtype
        and _is_distinct(graph, producers, index, state.type.dims[dim])
    )


def _rows(state: Value, dim: int, index: Value) -> tuple[Size, ...]:
    """The sizes of the rows of a state at the positions of an index."""
    return tuple(index.type.numel if d == dim else size for d, size in enumerate(state.type.dims))


def _expanded(rewriter: Rewriter, value: Value, dims: tuple[Size, ...]) -> Value:
    """A value broadcast to `dims`."""
    lead = len(dims) - value.type.rank
    if lead:
        value = rewriter.aten.view(value, (*([1] * lead), *value.type.dims))
    return value if value.type.dims == dims else rewriter.aten.expand(value, tuple(dims))


def _is_distinct(graph: Graph, producers: dict[Value, Node], index: Value, rows: Size) -> bool:
    """Whether no two elements of an index are the same row: numbers counted up, by a step of 1, from
    anywhere. As many as there are rows at most are distinct also if some count from the end."""
    count = index.type.numel
    if isinstance(count, int) and count == 1:
        return True
    fits = isinstance(count, int) and isinstance(rows, int) and count <= rows
    return (fits or not isinstance(count, int)) and _counts_up(graph, producers, index)


def _counts_up(graph: Graph, producers: dict[Value, Node], value: Value) -> bool:
    """Whether each element is the one before plus 1."""
    if value.type.dtype not in (DType.int32, DType.int64):
        return False
    constant = graph.constants.get(value)
    if constant is not None:
        if not constant.known or value.type.rank != 1:
            return False
        numbers = constant.array(value.type)
        return bool((numbers[1:] - numbers[:-1] == 1).all())
    node = producers.get(value)
    if node is None:
        return False
    if node.op == "purevk.iota":
        return True
    if node.op == "aten.slice.Tensor":
        whole = node.tensor("x")
        return (
            whole.type.rank == 1 and node.int("step") == 1 and _counts_up(graph, producers, whole)
        )
    if node.op == "aten._to_copy.default" or registry.movement(node) is Moves.IN_ORDER:
        return _counts_up(graph, producers, node.tensor("x"))
    if node.op == "aten.add.Tensor" and node.scalar("alpha") == 1:
        x, y = node.arg("x"), node.arg("y")
        for first, second in ((x, y), (y, x)):
            single = not isinstance(second, Value) or second.type.numel == 1
            if isinstance(first, Value) and single and first.type.numel == value.type.numel:
                return _counts_up(graph, producers, first)
    return False


class _Reads:
    """Where the values of a graph are read.

    Attributes:
        nodes: the numbers of the nodes that read each value.
        views: the results of views of each value.
        numbers: of the nodes that give each value.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes: dict[Value, list[int]] = {}
        self.views: dict[Value, list[Value]] = {}
        self.numbers: dict[Value, int] = {}
        for number, node in enumerate(graph.nodes):
            for value in values_in(node.args):
                self.nodes.setdefault(value, []).append(number)
            if registry.is_view(node):
                self.views.setdefault(node.inputs[0], []).extend(node.results)
            self.numbers.update(dict.fromkeys(node.results, number))

    def same_bytes(self, value: Value) -> set[Value]:
        """A value and all views of it."""
        values, queue = {value}, [value]
        while queue:
            new = [view for view in self.views.get(queue.pop(), ()) if view not in values]
            values.update(new)
            queue += new
        return values


def _unread_after(graph: Graph, reads: _Reads, scatter: Node, state: Value, store: Node) -> bool:
    """Whether no node reads a state as it was after a scatter has made the new one, and none on the
    host or with sub-graphs reads the new one."""
    old, new = reads.same_bytes(state), reads.same_bytes(scatter.result)
    if old & {*scatter.tensors("indices"), scatter.tensor("source")}:
        return False  # rows would be read while they are written
    sources = {source.value for source in graph.symbols.values()}
    if sources & (old | new) or not graph.output_values().isdisjoint(old):
        return False
    number = reads.numbers[scatter.result]
    after = {at for value in old for at in reads.nodes.get(value, ()) if at > number}
    if any(graph.nodes[at] is not store for at in after):
        return False
    readers = {at for value in old | new for at in reads.nodes.get(value, ())}
    return not any(graph.nodes[at].op == HOST or graph.nodes[at].graphs for at in readers)

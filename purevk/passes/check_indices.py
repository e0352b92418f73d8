"""Checks of indices: kernels take the nearest element for one that is out of range, where torch raises.

Inputs on the host are compared when a call brings them (`ranges_of_inputs`). All other indices are
checked by a kernel of its own (`check_indices`), unless what they are made of shows that they are in
range.

The kernel writes a note only if an index is out of range. Notes are in a buffer that the host reads after
it has waited for a segment, so there are no atomic operations and no copies. Assertions of the model on
its data are the same node, with a text. Equal checks are made once.

A check sets a flag too, in memory of the device: kernels that write states and are lowered after a check
have one more binding (macro GUARD) with all flags, and do nothing if one is set. So no state is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from purevk import knobs
from purevk.dtypes import DType
from purevk.ir import Arg, Graph, Node, Size, Value
from purevk.ir import dims as _dims
from purevk.ir.binding import input_symbols
from purevk.ir.index_range import DELEGATE_INPUT, IndexRange
from purevk.ops import registry
from purevk.ops.attention.flex import NAME as FLEX
from purevk.ops.attention.flex import composed
from purevk.ops.facts import Moves
from purevk.ops.index.check import NAME as CHECK
from purevk.ops.shapes import wrap
from purevk.passes.placement import refusal
from purevk.passes.rewrite import Rewriter, changing
from purevk.passes.value_ranges import ValueRanges
from purevk.tuning import DeviceTraits

# Features with which calls take tensors of another API on the device, which the host cannot read.
EXTERNAL = ("external_memory_fd", "external_semaphore_fd", "timeline_semaphore")

# Operators with one index along a dim, and those of them that count negative indices from the end.
_ALONG = {
    f"aten.{name}"
    for name in (
        "gather.default",
        "index_add.default",
        "index_copy.default",
        "index_fill.int_Scalar",
        "index_reduce.default",
        "index_select.default",
        "scatter.reduce",
        "scatter.src",
        "scatter.value",
        "scatter.value_reduce",
        "scatter_add.default",
        "scatter_reduce.two",
    )
}
_FROM_END = {"aten.index_fill.int_Scalar"}
_BY_TENSORS = {"aten.index.Tensor", "aten.index_put.default"}
_FLAT = {"aten.take.default", "aten.put.default"}
_UNPOOLED = {"aten.max_unpool2d.default", "aten.max_unpool3d.default"}
_TABLES = {
    "aten.embedding.default",
    "aten._embedding_bag.default",
    "aten._embedding_bag_forward_only.default",
    "et_vk.embedding_q4gsw.default",
    *(f"quantized_decomposed.embedding_{kind}.default" for kind in ("byte", "4bit", "2bit")),
    "aten.embedding_renorm.default",
}


_ONE_HOT = "aten.one_hot.default"
# All operators whose indices are checked, besides flex_attention.
OPERATORS = frozenset({*_ALONG, *_BY_TENSORS, *_FLAT, *_TABLES, *_UNPOOLED, _ONE_HOT})
_INDICES = (DType.int32, DType.int64)
_SIGNED = (DType.int8, DType.int16, DType.int32, DType.int64)


class _Inputs:
    """Which indices are inputs of a graph as they are."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._positions = {
            value: at for at, value in enumerate(graph.inputs) if isinstance(value, Value)
        }
        self._moving = changing(graph.nodes)
        self._symbols = {symbol for symbol, _, _ in input_symbols(graph)}

    @functools.cached_property
    def _made(self) -> dict[Value, Node]:
        return self._graph.producers()

    def find(self, index: Value, size: Size) -> tuple[int, DType] | None:
        """The position of the input that an index is, and the narrowest dtype on the way from it, as
        far as the exported module converts it; None if it is none, or if the size is not known
        before the call."""
        if not _dims.symbols(size) <= self._symbols:
            return None
        narrowest = index.type.dtype
        while index not in self._positions and index not in self._moving:
            node = self._made.get(index)
            before = None if node is None or not _has_all(node) else node.args[0]
            if node is None or not isinstance(before, Value) or before.type.dtype not in _SIGNED:
                return None
            if node.alias == DELEGATE_INPUT and narrowest is index.type.dtype:
                narrowest = before.type.dtype
            index = before
            narrowest = min(narrowest, index.type.dtype, key=lambda dtype: dtype.itemsize)
        if index in self._moving or narrowest not in _SIGNED:
            return None
        return self._positions[index], narrowest


def _has_all(node: Node) -> bool:
    """Whether a result has all elements of the first argument, and no others."""
    return node.op == "aten._to_copy.default" or registry.movement(node) >= Moves.ALL


def ranges_of_inputs(graph: Graph) -> dict[int, tuple[IndexRange, ...]]:
    """The inputs of a graph, as the front end made it, that are indices as they are: their positions,
    and what they have to be within. Sizes that become known only during a call are left out, and so
    are sub-graphs, which may not run."""
    inputs: _Inputs | None = None
    # Layers take the same index for caches of the same size: a call compares it once.
    index_ranges: dict[int, dict[tuple[Size, Size, DType], IndexRange]] = {}
    for node in graph.nodes:
        for index, size, lowest in _indices(node):
            inputs = inputs or _Inputs(graph)
            input_position = inputs.find(index, size)
            if input_position is not None:
                position, dtype = input_position
                index_range = IndexRange(lowest, size, dtype, node.op, node.source)
                ranges = index_ranges.setdefault(position, {})
                ranges.setdefault((lowest, size, dtype), index_range)
    return {position: tuple(ranges.values()) for position, ranges in index_ranges.items()}


def check_indices(graph: Graph, traits: DeviceTraits) -> Graph:
    """Puts a check before each node that takes indices which may be out of range, in sub-graphs too.
    With PUREVK_CHECK_INDICES=0 it gives the graph itself.

    A kernel of its own compares the indices as the model has them. So passes may fuse what takes
    them, and rewrites may count on the nearest element, without a rule for each. It reads only the
    indices, and writes only if one is out of range.
    """
    if not knobs.CHECK_INDICES() or not _takes_indices(graph):
        return graph
    return _Checker(graph, traits, _Inputs(graph)).run()


def _takes_indices(graph: Graph) -> bool:
    return any(
        node.op == FLEX or node.op in OPERATORS for inner in graph.nested() for node in inner.nodes
    )


def check_first(graph: Graph, traits: DeviceTraits) -> Graph:
    """Moves checks of indices, with what makes the indices, before the first node that writes a
    state. Kernels that write states read what the checks have noted. A check stays where it is if
    its index is made of a state that was written before, or by control flow."""
    nodes = graph.nodes
    writes = [at for at, node in enumerate(nodes) if node.graphs or registry.mutated(node)]
    if not writes or not any(node.op == CHECK for node in nodes[writes[0] :]):
        return graph
    first = writes[0]
    state_of: dict[Value, Value] = {}
    for node in nodes:
        if registry.is_view(node):
            state_of[node.results[0]] = state_of.get(node.inputs[0], node.inputs[0])
    written: set[Value] = set()
    fixed: set[Value] = set()  # results that are made after the first write
    movable: dict[Value, Node] = {}
    needed: set[Node] = set()

    def take(node: Node) -> None:
        waiting = [node]
        while waiting:
            current = waiting.pop()
            if current not in needed:
                needed.add(current)
                waiting += [movable[value] for value in current.inputs if value in movable]

    for node in nodes[first:]:
        stays = bool(node.graphs or registry.mutated(node) or registry.is_random(node))
        for value in node.inputs:
            stays = stays or value in fixed or state_of.get(value, value) in written
        if stays:
            fixed.update(node.results)
        elif node.op == CHECK:
            take(node)
        else:
            movable.update(dict.fromkeys(node.results, node))
        written.update(state_of.get(value, value) for value in registry.mutated(node))
        if node.graphs:
            written.update(graph.states)
    moved = [node for node in nodes[first:] if node in needed]
    others = [node for node in nodes[first:] if node not in needed]
    return graph.with_nodes((*nodes[:first], *moved, *others))


class _Checker(Rewriter):
    """Adds the checks of a graph.

    Args:
        inputs: those of a call, which the host compares if they are there; None in a sub-graph.
    """

    def __init__(self, graph: Graph, traits: DeviceTraits, inputs: _Inputs | None) -> None:
        super().__init__(graph, traits)
        self._inputs, self._ranges = inputs, ValueRanges(graph)
        self._moving = changing(graph.nodes)
        # A sub-graph, which is optimized once more by itself, has its checks by then.
        self._done = {_check_key(node.args) for node in graph.nodes if node.op == CHECK}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self.source = node.source
            if node.graphs:
                node = replace(node, args=tuple(map(self._inner, node.args)))
            elif node.op == FLEX:
                self._flex(node)
            else:
                for index, size, lowest in _indices(node):
                    self._check(node, index, size, lowest)
            self.keep(node)
        return self.finish()

    def _inner(self, arg: Arg) -> Arg:
        return _Checker(arg, self.traits, None).run() if isinstance(arg, Graph) else arg

    def _check(self, node: Node, index: Value, size: Size, lowest: Size) -> None:
        is_input = self._inputs is not None and self._inputs.find(index, size) is not None
        if (is_input and not self.traits.has(*EXTERNAL)) or self._is_safe(index, size, lowest):
            return
        args = (index, lowest, size, node.op, node.source, is_input)
        key = _check_key(args)
        check = Node(CHECK, args, (), node.source)
        if key not in self._done and refusal(check, self.traits) is None:  # else the CPU runs both
            self.keep(check)
        if index not in self._moving:
            self._done.add(key)

    def _is_safe(self, index: Value, size: Size, lowest: Size) -> bool:
        """Whether an index is known to be in range."""
        index_range = self._ranges.of(index)
        return index_range is not None and index_range.within(lowest, size)

    def _flex(self, node: Node) -> None:
        """Checks what the functions of a flex_attention gather by: computed once more, by operators.
        Indices that depend on both the query and the key are left out; they are as many as the
        scores."""
        if not node.tensors("buffers"):
            return
        first = len(self.nodes)
        composed(self, node)
        added = self.nodes[first:]
        del self.nodes[first:]
        makers = {value: producer for producer in added for value in producer.results}
        self._ranges.include(makers)
        for producer in added:
            for index, size, lowest in _indices(producer):
                broadcasts = any(
                    isinstance(size, int) and size == 1 for size in index.type.dims[-2:]
                )
                if broadcasts and not self._is_safe(index, size, lowest):
                    self._take(index, makers)
                    self._check(node, index, size, lowest)

    def _take(self, value: Value, makers: dict[Value, Node]) -> None:
        """Adds the nodes that make a value, once."""
        node = makers.get(value)
        if node is None:
            return
        for result in node.results:
            del makers[result]
        for before in node.inputs:
            self._take(before, makers)
        self.keep(node)


def _check_key(args: Sequence[Arg]) -> tuple[object, ...]:
    index, lowest, below = args[:3]
    return id(index), lowest, below


def _indices(node: Node) -> Iterator[tuple[Value, Size, Size]]:
    """The indices of a node: the tensor, the size that they are below, and the least index."""
    if node.op in _ALONG:
        x = node.args[0]
        assert isinstance(x, Value)
        dim = wrap(node.int("dim"), x.type.rank)
        size = x.type.dims[dim] if x.type.rank else 1
        yield from _checked(node.tensor("index"), size, node.op in _FROM_END)
    elif node.op in _BY_TENSORS:
        x, indices = node.args[0], node.args[1]
        assert isinstance(x, Value) and isinstance(indices, tuple)
        at = 0
        for index in indices:
            if not isinstance(index, Value):
                at += 1
            elif index.type.dtype in (DType.bool, DType.uint8):
                at += max(index.type.rank, 1)  # a mask
            else:
                yield from _checked(index, x.type.dims[at], True)
                at += 1
    elif node.op in _FLAT:
        x, index = node.args[0], node.args[1]
        assert isinstance(x, Value) and isinstance(index, Value)
        yield from _checked(index, _dims.product(x.type.dims), True)
    elif node.op == _ONE_HOT:
        yield from _checked(node.tensor("x"), node.size("num_classes"), False)
    elif node.op in _UNPOOLED:
        last = node.sizes("output_size")
        yield from _checked(node.tensor("indices"), _dims.product(last), False)
    elif node.op in _TABLES:
        yield from _checked(node.tensor("indices"), node.tensor("weight").type.dims[0], False)


def _checked(index: Value, size: Size, from_end: bool) -> Iterator[tuple[Value, Size, Size]]:
    count = index.type.numel
    if index.type.dtype in _INDICES and not (isinstance(count, int) and count == 0):
        yield index, size, -size if from_end else 0

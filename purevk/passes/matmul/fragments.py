"""Matmuls of constant weights read both operands in the order of the fragments of matrix cores, where
what makes their rows can write it: a norm, attention, or another such matmul."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Value
from purevk.ir import dims as _dims
from purevk.ops.attention.attention import HEADS_LAST, writes_blocks
from purevk.ops.attention.attention import NAME as ATTENTION
from purevk.ops.matmul.fragments import BLOCK, blocks_type, right_blocks, tile_of
from purevk.ops.matmul.fragments import NAME as FRAGMENTS
from purevk.ops.matmul.fragments import NORM as NORM_BLOCKS
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.ops.reduce.normalization import NAME as NORM
from purevk.passes.rewrite import Rewriter, changing
from purevk.tuning import DeviceTraits

_VIEW, _PERMUTE = "aten.view.default", "aten.permute.default"


def order_for_fragments(graph: Graph, traits: DeviceTraits) -> Graph:
    """Has norms and matmuls write the order of fragments, for matmuls of constants that read it.

    A model with states is left alone: it decodes token by token too, by kernels that read the same
    weights in rows, and two copies of them would fill the memory.
    """
    if graph.states:
        return graph
    finder = _Finder(graph, traits)
    for node in graph.nodes:
        finder.look_at(node)
    if not finder.sources:
        return graph
    rewriter = Rewriter(graph)
    blocks: dict[Value, Value] = {}  # by what a norm or a matmul made before
    weights: dict[Value, Value] = {}
    gone: set[Value] = set()  # values in rows that nothing makes any more, and views of them
    for node in graph.nodes:
        current = rewriter.current(node)
        rewriter.source = node.source
        if node in finder.sources:
            _emit_matmul(rewriter, node, current, finder, blocks, weights)
        elif node in finder.readers and node.op == NORM:
            _emit_norm(rewriter, node, current, finder, blocks)
        elif node in finder.readers:
            _emit_attention(rewriter, node, current, blocks)
        elif node.op in (_VIEW, _PERMUTE) and node.tensor("x") in gone:
            gone.add(node.result)
        else:
            rewriter.keep(current)
        if node.results and node.result in blocks and node.result not in rewriter.replaced:
            gone.add(node.result)
    return rewriter.finish()


def constants_of(graph: Graph) -> set[Value]:
    """The constants of a graph, and what is made of them alone."""
    found = set(graph.constants)
    for node in graph.nodes:
        if node.inputs and all(each in found for each in node.inputs):
            found.update(node.results)
    return found


class _Finder:
    """Chooses matmuls.

    Attributes:
        sources: for each chosen matmul, the node that makes its rows in the order of fragments.
        readers: those of each such node that read this order.
    """

    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        self._traits = traits
        self._made, self._users = graph.producers(), graph.users()
        self._outputs = graph.output_values()
        self._written = changing(graph.nodes)
        # Of all nodes, since other readers of a value are looked at before their turn.
        self._constant = constants_of(graph)
        self.sources: dict[Node, Node] = {}
        self.readers: dict[Node, set[Node]] = {}

    def look_at(self, node: Node) -> None:
        """Looks at a node after all that it reads."""
        if node.op != MATMUL:
            return
        source = self._source(node.tensor("a"))
        if source is not None and self._takes(node):
            self.sources[node] = source
            self.readers.setdefault(source, set()).add(node)

    def needs_rows(self, node: Node) -> bool:
        """Whether anything reads a node's result as it was."""
        waiting, wanted = [node.result], self.readers.get(node, set())
        while waiting:
            value = waiting.pop()
            if value in self._outputs:
                return True
            for user in self._users.get(value, ()):
                if user.op in (_VIEW, _PERMUTE):
                    waiting.append(user.result)
                elif user not in wanted or value is not user.tensor("a") or _count(user, value) > 1:
                    return True
        return False

    def _source(self, rows: Value) -> Node | None:
        """What can make a matrix in the order of fragments; None if nothing can."""
        if rows.type.rank != 2:
            return None
        value, heads = self._origin(rows)
        node = self._made.get(value)
        if node is None or value in self._written or value.type.dtype is not rows.type.dtype:
            return None
        if heads:
            return node if self._attends(node, rows) else None
        if value.type.dims[-1] != rows.type.dims[-1]:
            return None
        if node.op == NORM and node.int("count") == 1 and value.type.rank > 1:
            return node
        return node if node in self.sources and self._is_read_alike(node, rows) else None

    def _origin(self, rows: Value) -> tuple[Value, bool]:
        """What a matrix is a view of, and whether the heads of that come to lie side by side."""
        value = rows
        while (node := self._made.get(value)) is not None and node.op == _VIEW:
            value = node.tensor("x")
        if node is not None and node.op == _PERMUTE and tuple(node.ints("dims")) == HEADS_LAST:
            return node.tensor("x"), True
        return value, False

    def _attends(self, node: Node, rows: Value) -> bool:
        """Whether attention can write a matrix, with the heads of a row side by side, that matmuls
        alone read."""
        if node.op != ATTENTION or node.result.type.dtype is not node.tensor("q").type.dtype:
            return False
        batches, heads, queries, width = node.result.type.dims
        return (
            rows.type.dims == (batches * queries, heads * width)
            and writes_blocks(self._traits, node)
            and self._is_read_alike(node, rows)
        )

    def _is_read_alike(self, node: Node, rows: Value) -> bool:
        """Whether matmuls that read the order of fragments alone read a node's result, all of them as
        the matrix `rows`. Its kernel writes one order."""
        waiting, origin = [node.result], self._origin(rows)
        while waiting:
            value = waiting.pop()
            if value in self._outputs:
                return False
            for user in self._users.get(value, ()):
                if user.op in (_VIEW, _PERMUTE):
                    waiting.append(user.result)
                elif (
                    user.op != MATMUL
                    or value is not user.tensor("a")
                    or value.type.dims != rows.type.dims
                    or self._origin(value) != origin
                    or _count(user, value) > 1
                    or not self._takes(user)
                ):
                    return False
        return True

    def _takes(self, node: Node) -> bool:
        """Whether the kernel that reads fragments is the one for a matmul."""
        a, b, bias = node.tensor("a").type, node.tensor("b").type, node.optional_tensor("bias")
        if a.rank != 2 or b.rank != 2 or a.dtype is not b.dtype or not b.is_static:
            return False
        if self._written & set(node.inputs):
            return False
        if node.tensor("b") not in self._constant or (bias is not None and bias.type.rank != 1):
            return False
        if node.result.type.dtype not in (a.dtype, DType.float32):
            return False
        (rows, terms), columns = a.dims, _dims.specialize(b.dims[1])
        fits = columns % BLOCK == 0 and _dims.specialize(terms) % BLOCK == 0
        return fits and tile_of(self._traits, a.dtype, rows, columns, terms) is not None


def _count(node: Node, value: Value) -> int:
    return sum(each is value for each in node.inputs)


def _emit_matmul(
    rewriter: Rewriter,
    node: Node,
    current: Node,
    finder: _Finder,
    blocks: dict[Value, Value],
    weights: dict[Value, Value],
) -> None:
    weight = current.tensor("b")
    if weight not in weights:
        weights[weight] = right_blocks(rewriter, weight)
    onward, result = node in finder.readers, node.result.type
    made = rewriter.emit(
        FRAGMENTS,
        blocks[finder.sources[node].result],
        weights[weight],
        current.tensor("a").type.dims[0],
        current.optional_tensor("bias"),
        onward,
        current.arg("epilogue"),
        current.arg("extras"),
        # An epilogue that only converts has no step that says so.
        results=(blocks_type(result.dtype, *result.dims) if onward else result,),
    )
    if onward:
        blocks[node.result] = made
    else:
        rewriter.replace(node, made)


def _emit_attention(
    rewriter: Rewriter, node: Node, current: Node, blocks: dict[Value, Value]
) -> None:
    names = ("q", "k", "v", "mask", "scale", "causal", "start", "length", "functions", "sizes")
    given = [current.arg(name) for name in (*names, "extras", "limits")]
    blocks[node.result] = rewriter.emit(ATTENTION, *given, True)


def _emit_norm(
    rewriter: Rewriter, node: Node, current: Node, finder: _Finder, blocks: dict[Value, Value]
) -> None:
    plain, result = finder.needs_rows(node), node.result.type
    names = ("x", "weight", "bias", "eps", "rms")
    given = [current.arg(name) for name in names]
    rows = _dims.product(result.dims[:-1])
    types = (blocks_type(result.dtype, rows, result.dims[-1]), *((result,) if plain else ()))
    made = rewriter.emit_all(
        NORM_BLOCKS, *given, plain, current.arg("epilogue"), current.arg("extras"), results=types
    )
    blocks[node.result] = made[0]
    if plain:
        rewriter.replace(node, made[1])

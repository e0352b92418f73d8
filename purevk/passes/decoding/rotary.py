"""Recognizes rotary embeddings by halves in plain operators, `x * cos + cat(-x2, x1) * sin` or
`cat(x1 * cos - x2 * sin, x2 * cos + x1 * sin)`, and joins those of queries and keys with the writes to
a cache that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Value, values_in
from purevk.ops import registry
from purevk.ops.attention.cache import WRITE_ROWS
from purevk.ops.attention.rotary import HALVES
from purevk.ops.attention.rotary_cache import NAME as ROTATE_TO_CACHE
from purevk.ops.shapes import wrap
from purevk.passes.decoding.heads import swaps_heads
from purevk.passes.matching import Matcher, Pattern, Var, Via, op
from purevk.passes.rewrite import Rewriter, changing, each_node, reader_counts
from purevk.tuning import DeviceTraits

_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
_SPLIT, _SLICE = "aten.split_with_sizes.default", "aten.slice.Tensor"
_CONVERT, _VIEW = "aten._to_copy.default", "aten.view.default"
_LAST = ("aten.add.Tensor", "aten.cat.default", _CONVERT)
_SWAP = (0, 2, 1, 3)  # [B, S, H, D] to [B, H, S, D] and back


# -- recognition ---------------------------------------------------------------------------------
class _Rotation(NamedTuple):
    """What turns, the cosines, the sines, and the dim of x along which these have rows. The angles
    have the width of x, or half of it."""

    x: Value
    cos: Value
    sin: Value
    rows: int


def find_rotary(graph: Graph, traits: DeviceTraits) -> Graph:
    """Replaces a rotation by one node, for x [B, H, S, D] or [B, S, H, D], or without B, and angles
    of S and D alone.

    What is rotated in float32 between conversions from a dtype and back to it is read and written in
    this dtype.
    """
    matcher = Matcher(graph)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        match = _rotation(matcher, node.result) if node.op in _LAST else None
        if match is None:
            return None
        x, cos, sin = map(rewriter.resolve, (match.x, match.cos, match.sin))
        dims = x.type.dims
        if x.type.rank == 3:
            x = rewriter.emit(_VIEW, x, (1, *dims))
        turned = match.rows == len(dims) - 2
        if turned:
            x = rewriter.aten.permute(x, _SWAP)
        size, width = x.type.dims[1], cos.type.dims[-1]
        tables = [rewriter.emit(_VIEW, table, (size, width)) for table in (cos, sin)]
        if width != dims[-1]:
            tables = [_doubled(rewriter, table) for table in tables]
        result = rewriter.emit(HALVES, x, *tables, 0)
        if turned:
            result = rewriter.aten.permute(result, _SWAP)
        return result if len(dims) == 4 else rewriter.emit(_VIEW, result, dims)

    return each_node(graph, visit)


def _doubled(rewriter: Rewriter, table: Value) -> Value:
    """A table with its columns twice."""
    rows, columns = table.type.dims
    table = rewriter.emit(_VIEW, table, (rows, 1, columns))
    table = rewriter.aten.expand(table, (rows, 2, columns))
    return rewriter.aten.reshape(table, (rows, 2 * columns))


def _half(number: int) -> Callable[[Matcher, Value], Value | None]:
    """What gives x for its first or second half along the last dim."""

    def whole_of(matcher: Matcher, value: Value) -> Value | None:
        node = matcher.producer(value, _SPLIT, _SLICE)
        if node is None:
            return None
        x, width, half = node.tensor("x"), node.inputs[0].type.dims[-1], value.type.dims[-1]
        if not isinstance(width, int) or not isinstance(half, int) or width != 2 * half:
            return None
        if wrap(node.int("dim"), x.type.rank) != x.type.rank - 1:
            return None
        if node.op == _SPLIT:
            return x if len(node.results) == 2 and node.results[number] is value else None
        start = node.optional_size("start") or 0
        if node.int("step") != 1 or not isinstance(start, int):
            return None
        return x if start in (number * half, number * half - width) else None

    return whole_of


def _joins_last(cat: Node) -> bool:
    rank = cat.result.type.rank
    return wrap(cat.int("dim"), rank) == rank - 1


def _times(x: Pattern, y: Pattern) -> Pattern:
    return op("aten.mul.Tensor", x=x, y=y, swap=True)


_X, _COS, _SIN = Var("x"), Var("cos"), Var("sin")
_FIRST, _SECOND = Via(_half(0), _X), Via(_half(1), _X)
_NEGATED = op("aten.neg.default", x=_SECOND)
_CROSSED = op("aten.cat.default", tensors=(_NEGATED, _FIRST), when=_joins_last)
_ADD, _SUB = "aten.add.Tensor", "aten.sub.Tensor"
_WHOLE = op(_ADD, x=_times(_X, _COS), y=_times(_CROSSED, _SIN), alpha=1, swap=True)
_LEFT = op(_SUB, x=_times(_FIRST, _COS), y=_times(_SECOND, _SIN), alpha=1)
_RIGHT = op(_ADD, x=_times(_SECOND, _COS), y=_times(_FIRST, _SIN), alpha=1, swap=True)
_JOINED = op("aten.cat.default", tensors=(_LEFT, _RIGHT), when=_joins_last)


def _rotation(matcher: Matcher, result: Value) -> _Rotation | None:
    """The rotation that a value is the result of."""
    cast = matcher.producer(result, _CONVERT)
    if cast is None:
        return _plain_rotation(matcher, result)
    value, dtype = cast.tensor("x"), result.type.dtype
    if dtype not in _FLOATS or matcher.readers[value] != 1:
        return None
    match = _plain_rotation(matcher, value)
    widened = None if match is None else matcher.producer(match.x, _CONVERT)
    if match is None or widened is None or match.x.type.dtype is not DType.float32:
        return None
    x = widened.tensor("x")
    return match._replace(x=x) if x.type.dtype is dtype else None


def _plain_rotation(matcher: Matcher, result: Value) -> _Rotation | None:
    """The same without conversions, if the kernel takes these types and sizes."""
    parts = 1 if matcher.producer(result, _ADD) else 2  # of the width, which the angles have
    match = matcher.match(_WHOLE if parts == 1 else _JOINED, result)
    if match is None:
        return None
    x, cos, sin = (match.value(name) for name in ("x", "cos", "sin"))
    rank = x.type.rank
    if rank not in (3, 4) or cos.type.dims != sin.type.dims or cos.type.rank > rank:
        return None
    if result.type != x.type or any(v.type.dtype not in _FLOATS for v in (x, cos, sin)):
        return None
    dims = (*([1] * (rank - cos.type.rank)), *cos.type.dims)
    if dims[-1] * parts != x.type.dims[-1]:
        return None
    for rows in (rank - 2, rank - 3):
        others = (d for d in range(rank - 1) if d != rows)
        if dims[rows] == x.type.dims[rows] and all(dims[d] == 1 for d in others):
            return _Rotation(x, cos, sin, rows)
    return None


# -- with a cache --------------------------------------------------------------------------------
class _Group(NamedTuple):
    """The nodes that one dispatch runs: rotations of queries and of keys, and the writes of these and
    of values to their caches."""

    queries: Node
    keys: Node
    write_keys: Node
    write_values: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.queries, self.keys, self.write_keys, self.write_values)


def rotate_to_caches(graph: Graph, traits: DeviceTraits) -> Graph:
    """Rotations of queries and keys by the same angles, and the writes of the keys and of values at
    the same positions, become one node, where the last of them was."""
    groups = _groups(graph)
    if not groups:
        return graph
    position = {node: at for at, node in enumerate(graph.nodes)}
    last = {max(group.nodes, key=position.__getitem__): group for group in groups}
    inside = {node for group in groups for node in group.nodes}
    # Nobody else reads the view of the rotated keys that is written.
    inside |= {*_views_of(graph, [group.keys.result for group in groups])}
    # Views of what moves to a later node are made again where they are read.
    late = _views_of(graph, [group.queries.result for group in groups])
    rewriter = Rewriter(graph)
    waiting: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        if node in late:
            waiting.setdefault(late[node], []).append(node)
            if late[node] in rewriter.replaced:
                rewriter.keep(rewriter.current(node))
            continue
        if node not in inside:
            rewriter.keep(rewriter.current(node))
            continue
        group = last.get(node)
        if group is None:
            continue
        _emit(rewriter, group)
        for view in waiting.get(group.queries.result, ()):
            rewriter.keep(rewriter.current(view))
    return rewriter.finish()


def _views_of(graph: Graph, values: list[Value]) -> dict[Node, Value]:
    """The nodes that view some values, or views of them, with the values."""
    of = {value: value for value in values}
    stores: dict[Node, Value] = {}
    for node in graph.nodes:
        if registry.is_view(node) and node.inputs[0] in of:
            stores[node] = of[node.inputs[0]]
            of.update(dict.fromkeys(node.results, of[node.inputs[0]]))
    return stores


def _emit(rewriter: Rewriter, group: _Group) -> None:
    rewriter.source = " | ".join(node.source for node in group.nodes)
    resolve, dim = rewriter.resolve, group.write_keys.int("dim")
    values = resolve(group.write_values.tensor("value"))
    if dim == 2:
        values = rewriter.aten.permute(values, _SWAP)
    result = rewriter.emit(
        ROTATE_TO_CACHE,
        resolve(group.queries.tensor("x")),
        resolve(group.keys.tensor("x")),
        values,
        resolve(group.queries.tensor("cos")),
        resolve(group.queries.tensor("sin")),
        group.queries.size("start"),
        group.write_keys.tensor("state"),
        group.write_values.tensor("state"),
        dim,
        resolve(group.write_keys.tensor("index")),
    )
    rewriter.replace(group.queries, result)


def _groups(graph: Graph) -> list[_Group]:
    producers = graph.producers()
    readers = reader_counts(graph)
    writes = [node for node in graph.nodes if node.op == WRITE_ROWS]
    rotations = [node for node in graph.nodes if node.op == HALVES]
    if not (writes and rotations):
        return []
    order = _Order(graph)
    groups: list[_Group] = []
    grouped: set[Node] = set()
    for write in writes:
        keys = _rotated(producers, readers, write)
        if keys is None or write in grouped:
            continue
        for queries in rotations:
            if queries is keys or queries in grouped or not _turn_alike(queries, keys):
                continue
            for values_write in writes:
                group = _Group(queries, keys, write, values_write)
                if (
                    values_write in grouped
                    or not _write_alike(write, values_write)
                    or values_write is write
                ):
                    continue
                if order.can_join(group):
                    groups.append(group)
                    grouped.update(group.nodes)
                    break
            if write in grouped:
                break
    return groups


def _rotated(producers: dict[Value, Node], readers: dict[Value, int], write: Node) -> Node | None:
    """The rotation whose result alone a node writes to a cache, with rows where the cache has them."""
    value, dim = write.tensor("value"), write.int("dim")
    if value.type.rank != 4 or dim not in (1, 2) or readers[value] != 1:
        return None
    node = producers.get(value)
    if dim == 2:
        if node is None or readers.get(node.inputs[0]) != 1 or not swaps_heads(node):
            return None
        node = producers.get(node.inputs[0])
    if node is None or node.op != HALVES:
        return None
    full = node.tensor("cos").type.dims[1] == node.tensor("x").type.dims[3]
    return node if full else None


def _turn_alike(queries: Node, keys: Node) -> bool:
    """Whether two rotations are by the same angles, and of the same rows."""
    q, k = queries.tensor("x").type, keys.tensor("x").type
    return (
        all(queries.tensor(name) is keys.tensor(name) for name in ("cos", "sin"))
        and queries.size("start") == keys.size("start")
        and q.dims[:2] == k.dims[:2]
        and q.dims[3] == k.dims[3]
    )


def _write_alike(first: Node, second: Node) -> bool:
    """Whether two nodes write rows at the same positions of caches of the same sizes."""
    return (
        first.tensor("index") is second.tensor("index")
        and first.int("dim") == second.int("dim")
        and first.tensor("value").type.dims == second.tensor("value").type.dims
        and first.tensor("state") is not second.tensor("state")
        and first.tensor("state").type.dims == second.tensor("state").type.dims
    )


class _Order:
    """Tells which nodes of a graph can run later."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = graph.nodes
        self._position = {node: at for at, node in enumerate(graph.nodes)}
        self._views = [node for node in graph.nodes if registry.is_view(node)]
        self._changing = changing(graph.nodes)

    def can_join(self, group: _Group) -> bool:
        """Whether all nodes can run where the last one does: none between the first and the last
        reads what they make or write, and none writes what they read."""
        places = [self._position[node] for node in group.nodes]
        states = {group.write_keys.tensor("state"), group.write_values.tensor("state")}
        touched = {group.queries.result, group.keys.result, *states}
        for node in self._views:
            if node.inputs[0] in touched:
                touched.update(node.results)
        for node in self._nodes[min(places) : max(places)]:
            if node in group.nodes or registry.is_view(node):
                continue
            if node.graphs or touched & set(values_in(node.args)):
                return False
        # The rotations read no state: a write between them and the last node would change it.
        inputs = {group.queries.tensor("x"), group.keys.tensor("x")}
        inputs |= {group.queries.tensor("cos"), group.queries.tensor("sin")}
        inputs |= {group.write_values.tensor("value"), group.write_keys.tensor("index")}
        return not inputs & self._changing

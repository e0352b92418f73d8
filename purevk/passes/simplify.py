"""Takes out what does nothing: no-op copies, chains of views, equal nodes, nodes that nobody reads,
and tensors without elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from purevk.dtypes import DType
from purevk.ir import Arg, Constant, Dim, Graph, Guard, Node, Symbol, SymbolSource, Value, dims_in
from purevk.ir import dims as _dims
from purevk.ir import guards as _guards
from purevk.ops import registry
from purevk.ops.shapes import wrap
from purevk.passes.rewrite import Rewriter, changing, each_node, reader_counts
from purevk.tuning import DeviceTraits

_COPIES = {"aten.alias.default", "aten._to_copy.default", "aten.dropout.default"}
_ORDER = {name: n for n, name in enumerate(("bool", "uint8", "int8", "int16", "int32", "int64"))}


def drop_no_ops(graph: Graph, traits: DeviceTraits) -> Graph:
    """Copies that change nothing, views of views, casts there and back."""
    producers: dict[Value, Node] = {}
    copies = _copies_of_what_changes(graph)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        result = None if copies.intersection(node.results) else _simplify(rewriter, node, producers)
        for new_node in rewriter.nodes[-2:] if result is not None else (node,):
            for value in new_node.results:
                if value not in copies:
                    producers[value] = new_node
        return result

    return each_node(graph, visit)


def _copies_of_what_changes(graph: Graph) -> set[Value]:
    """Results of copies (also of those that convert) of a state that is written while the copy is
    still read."""
    moving = changing(graph.nodes)
    if not moving:
        return set()
    position = {node: at for at, node in enumerate(graph.nodes)}
    writes = [at for node, at in position.items() if registry.mutated(node)]
    users, outputs = graph.users(), graph.output_values()
    outputs |= {source.value for source in graph.symbols.values() if source.value is not None}

    def last_read(value: Value) -> int:
        """The position of the last node that reads a value, or a copy or a view of it."""
        if value in outputs:
            return len(graph.nodes)
        last = -1
        for node in users.get(value, []):
            follows = node.op in _COPIES or registry.is_view(node)
            last = max(
                last, position[node], *(last_read(result) for result in node.results if follows)
            )
        return last

    return {
        node.result
        for node, at in position.items()
        if node.op in _COPIES
        and node.tensor("x") in moving
        and any(at < write <= last_read(node.result) for write in writes)
    }


def _simplify(rewriter: Rewriter, node: Node, producers: dict[Value, Node]) -> Value | None:
    if not node.args or not isinstance(node.args[0], Value) or len(node.results) != 1:
        return None
    source, result = node.args[0], node.result
    if node.op == "aten.alias.default":
        return source
    if node.op == "aten.dropout.default" and not node.bool("train"):
        return source
    if node.op == "aten._to_copy.default":
        if source.type.dtype is result.type.dtype:
            return source
        before = producers.get(source)
        if before is None or before.op != node.op:
            return None
        inner = before.tensor("x")
        if not _holds(source.type.dtype, inner.type.dtype):
            return None
        if inner.type.dtype is result.type.dtype:
            return inner
        return rewriter.emit(node.op, inner, result.type.dtype)
    if node.op == "aten.expand.default" and _same(source, result):
        return source
    if registry.is_reshape(node):
        before = producers.get(source)
        if before is not None and before.op == "aten.view.default":
            source = before.tensor("x")
        if _same(source, result):
            return source
        if source is not node.args[0] or node.op != "aten.view.default":
            return rewriter.aten.view(source, result.type.dims)
        return None
    if node.op in ("aten.transpose.int", "aten.t.default", "aten.numpy_T.default"):
        order = list(range(source.type.rank))
        if node.op != "aten.transpose.int":
            order.reverse()
        elif order:
            a, b = (wrap(node.int(name), source.type.rank) for name in ("dim0", "dim1"))
            order[a], order[b] = order[b], order[a]
        return rewriter.aten.permute(source, tuple(order))
    if node.op == "aten.permute.default":
        return _permute(rewriter, node, producers)
    if node.op == "aten.slice.Tensor" and _same(source, result) and node.int("step") == 1:
        return source
    return None


def _permute(rewriter: Rewriter, node: Node, producers: dict[Value, Node]) -> Value | None:
    source = node.tensor("x")
    order = tuple(wrap(d, source.type.rank) for d in node.ints("dims"))
    before = producers.get(source)
    if before is not None and before.op == node.op:
        inner = tuple(wrap(d, source.type.rank) for d in before.ints("dims"))
        source, order = before.tensor("x"), tuple(inner[d] for d in order)
        if order == tuple(range(len(order))):
            return source
        return rewriter.emit(node.op, source, order)
    if order == tuple(range(len(order))):
        return source
    moved = [
        d for d in order if not (isinstance(source.type.dims[d], int) and source.type.dims[d] == 1)
    ]
    if moved == sorted(moved):
        return rewriter.aten.view(source, node.result.type.dims)
    return None


def _same(a: Value, b: Value) -> bool:
    return a.type.rank == b.type.rank and all(
        type(x) is type(y) and _dims.same(x, y) for x, y in zip(a.type.dims, b.type.dims)
    )


def _holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of `narrow` is kept by a conversion to `wide`."""
    if wide is narrow or narrow is DType.bool:
        return True
    if wide.is_float and narrow.is_float:
        return wide.itemsize > narrow.itemsize
    if wide.is_int and narrow.is_int:
        return _ORDER[wide.name] > _ORDER[narrow.name] and not (
            wide is DType.int8 and narrow is DType.uint8
        )
    return False


def _key(arg: Arg) -> object:
    """Equal for equal arguments. Numbers of different types differ, and so do 0.0 and -0.0."""
    kind = type(arg)
    if kind is Value:
        return id(arg)
    if kind is tuple:
        return tuple([_key(item) for item in cast("tuple[Arg, ...]", arg)])
    if kind is int or kind is bool:
        return kind, arg
    return (kind, repr(arg)) if isinstance(arg, (int, float)) else arg


def merge_equal(graph: Graph, traits: DeviceTraits) -> Graph:
    """Nodes with the same operator and arguments are computed once."""
    seen: dict[object, tuple[Value, ...]] = {}
    moving = changing(graph.nodes)
    measured = {source.value for source in graph.unbacked.values() if source.dim is not None}

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        definition = registry.find(node.op)
        if (
            definition is None
            or registry.mutated(node)
            or registry.is_random(node)
            or not moving.isdisjoint(node.inputs)
            or not node.results
        ):
            return None
        if measured and any(value in measured for value in node.results):
            return None
        key = (node.op, _key(node.args), tuple([value.type.dtype for value in node.results]))
        if key in seen:
            return seen[key]
        seen[key] = node.results
        return None

    return each_node(graph, visit)


def share_cats(graph: Graph, traits: DeviceTraits) -> Graph:
    """A concatenation whose first operands are those of an earlier one starts with its result.

    Where every layer reads all layers before it, each layer then copies two tensors.
    """
    seen: dict[tuple[tuple[Value, ...], int], Value] = {}
    moving = changing(graph.nodes)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node.op != "aten.cat.default" or any(value in moving for value in node.inputs):
            return None
        values = node.tensors("tensors")
        dim = wrap(node.int("dim"), node.result.type.rank)
        if any(value.type.rank != node.result.type.rank for value in values):
            return None  # torch leaves out empty tensors of rank 1
        result: Value | None = None
        for count in range(len(values) - 1, 1, -1):
            first = seen.get((values[:count], dim))
            if first is not None and first.type.dtype is node.result.type.dtype:
                result = rewriter.aten.cat((first, *values[count:]), node.int("dim"))
                break
        seen[values, dim] = node.result if result is None else result
        return result

    return each_node(graph, visit)


def drop_unused(graph: Graph, traits: DeviceTraits) -> Graph:
    """Drops nodes that write nothing and whose results nobody reads, and unbacked symbols that
    nobody needs. Calls check relations, and guards of what was decided: they need its symbols."""
    unbacked = graph.unbacked
    needed = set(graph.output_values())
    seen: set[Symbol] = set()

    def mention(*args: Arg) -> None:
        for symbol in set().union(*map(_dims.symbols, dims_in(args))) - seen if unbacked else ():
            seen.add(symbol)
            source = unbacked.get(symbol)
            if source is not None and source.value is not None:
                needed.add(source.value)

    mention(*graph.outputs, *(value.type.dims for value in needed))
    if unbacked:
        checked = _guards.decided_symbols().union(
            *(guard.symbols for guard, _ in graph.checks if not _is_of_sizes(guard, unbacked))
        )
        mention(*(Dim.of(symbol) for symbol in checked if symbol in unbacked))
    live: list[Node] = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.results) or registry.mutated(node) or not node.results:
            live.append(node)
            needed.update(node.inputs)
            if unbacked:
                mention(*node.args, *(value.type.dims for value in (*node.inputs, *node.results)))
    nodes = tuple(reversed(live))
    read = {value for node in nodes for value in node.inputs} | graph.output_values()
    read |= {
        source.value
        for symbol, source in unbacked.items()
        if symbol in seen and source.value is not None
    }
    gone = set(unbacked) - seen
    return graph.with_nodes(
        nodes,
        constants={value: data for value, data in graph.constants.items() if value in read},
        symbols={symbol: source for symbol, source in graph.symbols.items() if symbol not in gone},
        checks=tuple(check for check in graph.checks if not check[0].symbols & gone),
    )


def _is_of_sizes(guard: Guard, unbacked: Mapping[Symbol, SymbolSource]) -> bool:
    """Whether a guard says only that a size of a tensor is not negative, as torch.export asserts of
    each."""
    sizes = all(symbol in unbacked and unbacked[symbol].dim is not None for symbol in guard.symbols)
    return sizes and (guard.left, guard.op) == (0, "<=") and _dims.range_of(guard.right)[0] >= 0


# Operators with a flag (its position) that asks for some of the results, and which results these are.
_WANTED = {"aten._linalg_svd.default": (2, (0, 2)), "aten._linalg_eigh.default": (2, (1,))}


def drop_unread(graph: Graph, traits: DeviceTraits) -> Graph:
    """Asks operators for no results that nobody reads and that cost."""
    if all(node.op not in _WANTED for node in graph.nodes):
        return graph
    counts = reader_counts(graph)

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        flag, dims = _WANTED.get(node.op, (0, ()))
        if not dims or not node.args[flag] or any(counts.get(node.results[n], 0) for n in dims):
            return None
        return rewriter.emit_all(node.op, *node.args[:flag], False, *node.args[flag + 1 :])

    return each_node(graph, visit)


def drop_empty(graph: Graph, traits: DeviceTraits) -> Graph:
    """Tensors without elements become constants of no bytes. A tensor with a size that is known only
    at a call stays what it is."""
    constants = dict(graph.constants)

    def visit(rewriter: Rewriter, node: Node) -> list[Value] | None:
        empty = [value for value in node.results if _is_empty(value)]
        if not empty or registry.mutated(node):
            return None
        empties = {value: Value(rewriter.names.fresh("empty"), value.type) for value in empty}
        constants.update({value: Constant(memoryview(b"")) for value in empties.values()})
        if len(empty) < len(node.results):
            rewriter.keep(node)
        return [empties.get(value, value) for value in node.results]

    graph = each_node(graph, visit)
    return graph.with_nodes(graph.nodes, constants=constants)


def _is_empty(value: Value) -> bool:
    return value.type.is_static and 0 in value.type.dims


def static_value(constants: Mapping[Value, Constant], value: Value) -> float | int | bool | None:
    """The number in a constant of one element, or None."""
    constant = constants.get(value)
    if constant is None or any(isinstance(size, Dim) or size != 1 for size in value.type.dims):
        return None
    if value.type.dtype is DType.bfloat16 or not constant.known:
        return None
    number: float | int | bool = constant.array(value.type).reshape(-1)[0].item()
    return number

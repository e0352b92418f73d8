"""Checks that a graph keeps the grammar of `docs/ir.md`."""

from __future__ import annotations

from typing import Any

from purevk.errors import GraphError
from purevk.ir import dims as _dims
from purevk.ir.dims import Dim
from purevk.ir.graph import Graph, Node, values_in
from purevk.ir.types import Value


def verify(graph: Graph, after: str = "") -> None:
    """Raises `GraphError` with the first rule that the graph breaks.

    Rules: every value is defined before it is read, and once; names are unique; sizes are not
    negative and use only symbols that the graph knows; constants have the bytes that their type
    needs. Sub-graphs keep the same rules, and share no value with the graphs around them but
    constants and states.
    """

    def fail(what: str, where: str, why: str = "") -> None:
        raise GraphError(
            what, where=f"{graph.name}, {where}" + (f", after {after}" if after else ""), why=why
        )

    defined: set[Value] = set()
    names: set[str] = set()

    def define(value: Value, where: str) -> None:
        if value in defined:
            fail(f"{value!r} is defined twice", where)
        if value.name in names:
            fail(f"two values are named {value.name}", where)
        defined.add(value)
        names.add(value.name)
        for size in value.type.dims:
            if isinstance(size, int) and size < 0:
                fail(f"{value!r} has a negative size", where, str(value.type))
            unknown = _dims.symbols(size) - set(graph.symbols) - graph.outer
            if unknown:
                fail(
                    f"{value!r} uses the unknown symbols {sorted(map(str, unknown))}",
                    where,
                    str(value.type),
                )

    for value in graph.inputs:
        if isinstance(value, Value):
            define(value, "inputs")
    for value, constant in graph.constants.items():
        define(value, "constants")
        if not value.type.is_static or (constant.known and constant.nbytes < value.type.nbytes):
            fail(
                f"constant {value!r} does not have its bytes",
                "constants",
                f"{constant.nbytes} for {value.type}",
            )
    for value in graph.states:
        define(value, "states")
    for position, node in enumerate(graph.nodes):
        where = f"node {position} {node.op} ({node.source})"
        for value in node.inputs:
            if value not in defined:
                fail(f"{value!r} is read before it is defined", where)
        for value in node.results:
            define(value, where)
        _check_args(node.args, where, fail)
        for inner in node.graphs:
            if not inner.outer <= set(graph.symbols) | graph.outer:
                fail(f"sub-graph {inner.name} uses unknown symbols", where)
            verify(inner, after)
    for value in values_in(graph.outputs):
        if value not in defined:
            fail(f"{value!r} is returned but never defined", "outputs")
    for output in graph.outputs:
        if output is not None and not isinstance(output, (Value, Dim, bool, int, float, str)):
            fail(f"{output!r} is returned, which is no tensor and no number", "outputs")
        unknown = (
            _dims.symbols(output) - set(graph.symbols) - graph.outer
            if isinstance(output, Dim)
            else None
        )
        if unknown:
            fail(f"{output} is returned and uses unknown symbols", "outputs")
    _check_symbols(graph, defined, fail)
    _check_updates(graph, fail)


def _check_symbols(graph: Graph, defined: set[Value], fail: Any) -> None:
    """Each symbol is a size or an element of a value, or an integer among the inputs."""
    for symbol, source in graph.symbols.items():
        where = f"symbol {symbol}"
        if source.value is None:
            known = 0 <= source.element < len(graph.inputs)
            if not known or not isinstance(graph.inputs[source.element], Dim):
                fail(f"input {source.element} is no integer", where)
            continue
        if source.value not in defined:
            fail(f"{source.value!r} is never defined", where)
        type = source.value.type
        if source.dim is not None and not 0 <= source.dim < type.rank:
            fail(f"{source.value!r} has no dim {source.dim}", where, str(type))
        if source.dim is None and isinstance(type.numel, int):
            if not -type.numel <= source.element < type.numel:
                fail(f"{source.value!r} has no element {source.element}", where, str(type))


def _check_updates(graph: Graph, fail: Any) -> None:
    """The last outputs are the new elements of inputs, of the same type."""
    count = len(graph.outputs) - len(graph.updates)
    if count < 0 or len(set(graph.updates)) < len(graph.updates):
        fail(f"{len(graph.updates)} inputs are written", "updates", f"{len(graph.outputs)} outputs")
    for position, output in zip(graph.updates, graph.outputs[count:]):
        given = graph.inputs[position] if 0 <= position < len(graph.inputs) else None
        if not isinstance(given, Value) or not isinstance(output, Value):
            fail(f"input {position} is no tensor that a call can write", "updates")
        elif given.type.dtype is not output.type.dtype or given.type.rank != output.type.rank:
            fail(f"input {position} is {given.type}", "updates", f"it is given {output.type}")


def _check_args(args: tuple[Any, ...], where: str, fail: Any) -> None:
    for arg in args:
        if isinstance(arg, list):
            fail("an argument is a list", where, "lists of arguments are tuples")
        if isinstance(arg, tuple):
            _check_args(arg, where, fail)
        if isinstance(arg, Node):
            fail("an argument is a node", where)

"""The printed form of a graph, one node a line, for people: names and texts are `printable`."""

from __future__ import annotations

import textwrap
from typing import Any

from purevk.ir.graph import Graph, Node
from purevk.ir.types import Value
from purevk.plain_text import printable


def _arg(arg: Any) -> str:
    if isinstance(arg, Value):
        return repr(arg)
    if isinstance(arg, Graph):
        return f"@{arg.name}"
    if isinstance(arg, tuple):
        return "[" + ", ".join(_arg(item) for item in arg) + "]"
    if type(arg).__name__ == "Expression":
        names = [f"${n}" for n in range(len(arg.inputs) + len(arg.scalars))]
        body, outputs = arg.glsl(names[: len(arg.inputs)], names[len(arg.inputs) :])
        return f"{{{body} -> {', '.join(outputs)}}}"
    if type(arg).__name__ == "ScoreProgram":
        return _arg(arg.expression)
    return repr(arg)


def node_to_text(node: Node) -> str:
    """One node: its results with their types, the operator, the arguments, where it comes from;
    below it its sub-graphs, indented."""
    results = ", ".join(f"{value!r}: {value.type}" for value in node.results)
    text = f"{node.op}({', '.join(_arg(arg) for arg in node.args)})"
    line = (
        (f"{results} = " if results else "") + text + (f"  # {node.source}" if node.source else "")
    )
    graphs = (textwrap.indent(to_text(graph, "graph").rstrip("\n"), "  ") for graph in node.graphs)
    return printable("\n".join([line, *graphs]))


def to_text(graph: Graph, kind: str = "method") -> str:
    """The whole graph."""
    lines = [f"{kind} {graph.name}"]
    for symbol, source in graph.symbols.items():
        if source.value is None:
            origin = f"argument {source.element}"
        else:
            origin = f"{source.value!r}." + (
                f"size({source.dim})" if source.dim is not None else f"element({source.element})"
            )
        bound = f" <= {symbol.upper}" if symbol.is_size else ""
        lines.append(f"symbol {symbol}{bound} = {origin}")
    for value in graph.inputs:
        lines.append(
            f"input {value!r}: {value.type}" if isinstance(value, Value) else f"input {value!r}"
        )
    for value in graph.constants:
        lines.append(f"constant {value!r}: {value.type}")
    for value, first in graph.states.items():
        lines.append(f"state {value!r}: {value.type}" + (" = 0" if first is None else ""))
    lines += [node_to_text(node) for node in graph.nodes]
    lines.append("output " + ", ".join(_arg(output) for output in graph.outputs))
    lines += [f"update {graph.inputs[position]!r}" for position in graph.updates]
    return printable("\n".join(lines) + "\n")

"""A planned method as text, JSON or a Mermaid diagram: nodes, where they run, and the edges between
them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from purevk.ir import Graph, Node, Value, values_in
from purevk.ir import dims as _dims
from purevk.ir.host import HOST
from purevk.ir.printer import to_text
from purevk.lower.expression import Expression
from purevk.lower.lowering import Dispatch
from purevk.ops import registry
from purevk.plain_text import json_text, printable
from purevk.schedule.plan import Plan

_TITLES = {
    "load": "once, at load",
    "gpu": "on the device",
    "cpu": "on the CPU",
    "host": "control flow",
}
_MANY = 6  # operators of a chain, above which a label does not name each


class GraphDrawing:
    """The optimized graph of a method, as its plan runs it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __repr__(self) -> str:
        graph = self.plan.graph
        return printable(f"<graph of {graph.name}, {len(graph.nodes)} nodes; print() shows it>")

    def data(self) -> dict[str, Any]:
        """The graph as plain data.

        Returns:
            "name"; "symbols" (name: "min", "max"); "inputs", "outputs", "states" and "constants"
            ("id", "name", "type"); and "segments" in order: "id", "on" ("load": once, from
            constants alone; "gpu"; "cpu"; "host": control flow) and "nodes": "id", "operator",
            "label", "operators" (those of a fused chain), "source", "line" (in the user's code),
            "why" (of those on the CPU), "results" ("name", "type"), "constants" (those it reads, by
            name), "kernels", "dispatches" (the positions of its kernels in the call, or in what runs
            at load), "flops" and "bytes" (at the upper bounds of sizes), "graphs" (sub-graphs, each
            as here).
            "edges": "from", "to" (ids), "value", "type".
        """
        return _Collector(self.plan, "", self.plan.graph).data()

    def to_json(self, indent: int | None = 2) -> str:
        """`data` as JSON."""
        return json_text(self.data(), indent)

    def to_text(self) -> str:
        """The printed form of the graph, as docs/ir.md describes it."""
        return to_text(self.plan.graph)

    def to_mermaid(self, direction: str = "TD") -> str:
        """A Mermaid flowchart. Segments are boxes, and nodes name the weights that they read.

        Args:
            direction: of the flow: "TD" or "LR".
        """
        lines = [f"flowchart {direction}"]
        data = self.data()
        _draw(data, lines, 1)
        for on, colour in (
            ("load", "#eee"),
            ("gpu", "#dfe8ff"),
            ("cpu", "#ffe3d0"),
            ("host", "#fff3c4"),
        ):
            lines.append(f"  classDef {on} fill:{colour},stroke:#888,color:#111")
        return printable("\n".join(lines) + "\n")

    def __str__(self) -> str:
        return self.to_text()


class _Collector:
    """Collects what a drawing shows of a plan. `whole` is the graph of the method."""

    def __init__(self, plan: Plan, prefix: str, whole: Graph) -> None:
        self.plan, self.prefix, self.whole = plan, prefix, whole
        self.graph = plan.assignment.graph
        self.count = 0
        self.made: dict[Value, str] = {}  # ids by storage
        self.edges: list[dict[str, str]] = []

    def data(self) -> dict[str, Any]:
        graph = self.graph
        signature = graph.signature
        known = () if signature is None else signature.names
        inputs = [
            self._leaf("in", value, known[at] if at < len(known) else "")
            for at, value in enumerate(graph.inputs)
            if isinstance(value, Value)
        ]
        states = [self._leaf("state", value) for value in graph.states]
        segments = []
        once = list(dict.fromkeys(self.plan.once_of))
        if once:
            kernels = dict(_grouped(self.plan.once_of, self.plan.once))
            segments.append(
                self._segment(
                    "load", [self._node(node, "load", kernels.get(node, [])) for node in once]
                )
            )
        for step, (first, last) in zip(self.plan.steps, self.plan.ranges):
            on = step.runs_on
            kernels = dict(
                _grouped(self.plan.nodes_of[first:last], self.plan.dispatches[first:last], first)
            )
            segments.append(
                self._segment(
                    on,
                    [self._node(node, on, kernels.get(node, [])) for node in step.nodes],
                    len(segments),
                )
            )
        known = () if signature is None else signature.output_names
        outputs = [
            self._output(output, known[at] if at < len(known) else f"output_{at}")
            for at, output in enumerate(graph.outputs)
        ]
        return {
            "name": graph.name,
            "symbols": {
                symbol.name: {"min": symbol.lower, "max": symbol.upper} for symbol in graph.symbols
            },
            "inputs": inputs,
            "constants": [
                {"name": value.name, "type": str(value.type), "bytes": value.type.nbytes}
                for value in self.plan.graph.constants
            ],
            "states": states,
            "segments": segments,
            "outputs": outputs,
            "edges": self.edges,
        }

    def _id(self, kind: str) -> str:
        self.count += 1
        return f"{self.prefix}{kind}{self.count}"

    def _leaf(self, kind: str, value: Value, name: str = "") -> dict[str, Any]:
        self.made[value] = self._id(kind)
        return {"id": self.made[value], "name": name or value.name, "type": str(value.type)}

    def _segment(self, on: str, nodes: list[dict[str, Any]], number: int = 0) -> dict[str, Any]:
        return {"id": f"{self.prefix}segment{number}_{on}", "on": on, "nodes": nodes}

    def _storage(self, value: Value) -> Value:
        return self.plan.assignment.storages.get(value, value)

    def _node(self, node: Node, on: str, placed: list[tuple[int, Dispatch]]) -> dict[str, Any]:
        name = self._id("n")
        dispatches = [dispatch for _, dispatch in placed]
        reads = list(dict.fromkeys(node.inputs))
        constants = dict.fromkeys(
            s for s in map(self._storage, reads) if s in self.plan.graph.constants
        )
        for value in reads:
            self._edge(value, name)
        for value in node.results:
            self.made.setdefault(self._storage(value), name)
        for written in registry.mutated(node):
            target = self._storage(written)
            if target in self.graph.states:
                self.edges.append(
                    {"from": name, "to": self.made[target], "value": target.name, "type": "written"}
                )
        host = node.op == HOST
        operators = [_short(str(node.args[0]))] if host else list(_operators(node))
        return {
            "id": name,
            "operator": str(node.args[0]) if host else node.op,
            "label": _label(operators),
            "operators": operators,
            "source": node.source,
            "line": self.whole.lines_of(node.source),
            "why": str(node.args[1]) if host else None,
            "results": [{"name": value.name, "type": str(value.type)} for value in node.results],
            "constants": [value.name for value in constants],
            "kernels": [dispatch.kernel.template for dispatch in dispatches],
            "dispatches": [position for position, _ in placed],
            "flops": sum(_dims.hint(dispatch.flops) for dispatch in dispatches),
            "bytes": sum(_dims.hint(dispatch.nbytes) for dispatch in dispatches),
            "graphs": [
                _Collector(inner, f"{name}_{number}_", self.whole).data()
                for number, inner in enumerate(self.plan.inner.get(node, ()))
            ],
        }

    def _edge(self, value: Value, target: str) -> None:
        maker = self.made.get(self._storage(value))
        if maker is not None:
            self.edges.append(
                {"from": maker, "to": target, "value": value.name, "type": str(value.type)}
            )

    def _output(self, output: Any, name: str) -> dict[str, Any]:
        node = self._id("out")
        for value in values_in((output,)):
            self._edge(value, node)
        kind = str(output.type) if isinstance(output, Value) else "size"
        return {
            "id": node,
            "name": name,
            "type": kind,
        }


def _grouped(
    nodes: Sequence[Node], dispatches: Sequence[Dispatch], first: int = 0
) -> dict[Node, list[tuple[int, Dispatch]]]:
    """The dispatches of each node with their positions, which count from `first` on."""
    found: dict[Node, list[tuple[int, Dispatch]]] = {}
    for position, (node, dispatch) in enumerate(zip(nodes, dispatches), first):
        found.setdefault(node, []).append((position, dispatch))
    return found


def _operators(node: Node) -> Iterator[str]:
    """The operators that a node computes, fused ones included."""
    chains = [arg for arg in node.args if isinstance(arg, Expression)]
    if node.op != "purevk.pointwise" or not any(chain.names for chain in chains):
        yield _short(node.op)
    for chain in chains:
        yield from chain.names


def _short(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name


def operators_label(node: Node) -> str:
    """What a node computes, in a few words."""
    return _label([_short(str(node.args[0]))] if node.op == HOST else list(_operators(node)))


def _label(operators: list[str]) -> str:
    if len(operators) <= _MANY:
        return " + ".join(operators)
    return " + ".join(operators[: _MANY - 1]) + f" + {len(operators) - _MANY + 1} more"


# -- Mermaid -------------------------------------------------------------------------------------
def _draw(data: dict[str, Any], lines: list[str], depth: int) -> None:
    pad = "  " * depth
    for each in data["inputs"]:
        lines.append(
            f'{pad}{each["id"]}(["{_escaped(each["name"])}<br/>{_escaped(each["type"])}"])'
        )
    for each in data["states"]:
        lines.append(
            f'{pad}{each["id"]}[("{_escaped(each["name"])}<br/>{_escaped(each["type"])}")]'
        )
    number = 0
    for segment in data["segments"]:
        number += segment["on"] != "load"
        title = (
            _TITLES[segment["on"]]
            if segment["on"] == "load"
            else f"segment {number}: {_TITLES[segment['on']]}"
        )
        lines.append(f'{pad}subgraph {segment["id"]}["{_escaped(title)}"]')
        for node in segment["nodes"]:
            _draw_node(node, segment["on"], lines, depth + 1)
        lines.append(f"{pad}end")
    for each in data["outputs"]:
        lines.append(
            f'{pad}{each["id"]}(["{_escaped(each["name"])}<br/>{_escaped(each["type"])}"])'
        )
    for edge in dict.fromkeys((each["from"], each["to"], each["type"]) for each in data["edges"]):
        lines.append(f'{pad}{edge[0]} -->|"{_escaped(edge[2])}"| {edge[1]}')


def _draw_node(node: dict[str, Any], on: str, lines: list[str], depth: int) -> None:
    pad = "  " * depth
    parts = [node["label"]]
    if node["why"]:
        parts.append(node["why"])
    if node["constants"]:
        parts.append(
            f"reads {', '.join(node['constants'][:3])}"
            + (", ..." if len(node["constants"]) > 3 else "")
        )
    kernels = {name.rpartition("/")[2].removesuffix(".comp") for name in node["kernels"]} - {
        "pointwise",
        *node["operators"],
    }
    parts.append(", ".join(sorted(kernels)))
    text = "<br/>".join(_escaped(part) for part in parts if part)
    shape = ('[["', '"]]') if on == "cpu" else ('["', '"]')
    lines.append(f"{pad}{node['id']}{shape[0]}{text}{shape[1]}:::{on}")
    for number, graph in enumerate(node["graphs"]):
        lines.append(f'{pad}subgraph {node["id"]}_graph{number}["{_escaped(graph["name"])}"]')
        _draw(graph, lines, depth + 1)
        lines.append(f"{pad}end")
        lines.append(f"{pad}{node['id']} -.- {node['id']}_graph{number}")


def _escaped(text: str) -> str:
    """Text within a quoted label. Characters with a meaning in Mermaid or HTML become entities."""
    return re.sub(
        r"[^\w .,:;+*/()\[\]{}=!?%-]", lambda match: f"#{ord(match[0])};", text.replace("\n", " ")
    )

"""A method lowered for a device but not loaded onto it: where each node runs, memory, kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from purevk.frontends.files import ModelFile
from purevk.frontends.importer import InputSizes
from purevk.ir import Graph, Node, Value
from purevk.ir import dims as _dims
from purevk.ir.expected import Expected
from purevk.program.leaves import Leaves
from purevk.program.specs import ArgumentSpec
from purevk.program.variants.lowering import lower_graph
from purevk.report.words import choice_rows
from purevk.schedule.plan import Lowered, Plan
from purevk.tuning import DeviceTraits
from purevk.tuning.choices import Choice, RecordedChoices


def lower(
    program: ModelFile,
    method: str,
    traits: DeviceTraits,
    sizes: InputSizes | None = None,
    leaves: Leaves | None = None,
    expected: Mapping[str, Expected] | None = None,
) -> Lowered:
    """Lowers a method of an open file, for its exported bounds or for the sizes of a call. Needs no
    device.

    Args:
        leaves: the constants and states that lowerings of the program share, if they do.
        expected: as for `lower_graph`.

    Raises:
        UnsupportedProgramError, FileFormatError: as `purevk.load` does.
    """

    def imported() -> Graph:
        graph = program.graph(method, sizes)
        return graph if leaves is None else leaves.share(method, graph)

    return lower_graph(imported, traits, expected)


# -- inputs and outputs --------------------------------------------------------------------------
def describe(specs: Sequence[ArgumentSpec]) -> list[dict[str, Any]]:
    """Inputs or outputs: "name", "kind" ("tensor", "integer", "fixed" or "unused"), "dtype", "dims"
    (integers, or expressions over symbols as text), and the "value" of fixed ones."""
    return [
        {
            "name": spec.name,
            "kind": spec.kind,
            "dtype": spec.dtype,
            "dims": [size if isinstance(size, int) else str(size) for size in spec.sizes]
            if spec.kind == "tensor"
            else None,
            "value": spec.value,
        }
        for spec in specs
    ]


def type_text(data: dict[str, Any]) -> str:
    """The same as text: "float32[1, s0]"."""
    if data["kind"] == "tensor":
        return f"{data['dtype']}[{', '.join(map(str, data['dims']))}]"
    return repr(data["value"]) if data["kind"] == "fixed" else str(data["kind"])


def size_symbols(graph: Graph) -> dict[str, dict[str, int | None]]:
    """The symbols in the inputs' sizes with their bounds, both included. A "max" of None: there is
    none."""
    found: dict[str, dict[str, int | None]] = {}
    for value in graph.inputs:
        if isinstance(value, Value):
            for symbol in sorted(
                {s for size in value.type.dims for s in _dims.symbols(size)}, key=lambda s: s.name
            ):
                stated = graph.ranges.get(symbol, (max(symbol.lower, 1), symbol.upper))
                found[symbol.name] = {"min": stated[0], "max": stated[1]}
    return found


# -- where nodes run -----------------------------------------------------------------------------
def segments_data(plan: Plan) -> list[dict[str, Any]]:
    """The segments in order: "on" is "gpu" (with counts of nodes and dispatches) or "cpu" (with
    operator and why)."""
    found: list[dict[str, Any]] = []
    for step, (first, last) in zip(plan.steps, plan.ranges):
        if step.on_device:
            found.append({"on": "gpu", "nodes": len(step.nodes), "dispatches": last - first})
        elif step.runs_on == "host":
            found.append({"on": "host", **control_data(step.nodes[0])})
        else:
            found.append({"on": "cpu", **host_data(step.nodes[0])})
    return found


def control_data(node: Node) -> dict[str, Any]:
    """Control flow or a seed, which are the host's. As `host_data`, and "graphs": the names of its
    sub-graphs."""
    return {
        "operator": node.op,
        "why": "control flow" if node.graphs else "random operators draw a seed at each run",
        "source": node.source,
        "results": [str(value.type) for value in node.results],
        "graphs": [graph.name for graph in node.graphs],
    }


def host_data(node: Node) -> dict[str, Any]:
    """A node that runs on the CPU: operator, why, source, and its results as text."""
    return {
        "operator": node.args[0],
        "why": node.args[1],
        "source": node.source,
        "results": [str(value.type) for value in node.results],
    }


def node_rows(plan: Plan, choices: RecordedChoices | None = None) -> list[dict[str, Any]]:
    """What runs, in order, as `_rows`, with the "line" of each node in the user's code, and "choices"
    as `choice_rows` has them, if they were recorded."""
    by_node = choices.by_node if choices else {}
    rows = _rows(plan, by_node)
    for row in rows:
        row["line"] = plan.graph.lines_of(row["source"])
        row["choices"] = choice_rows(row.get("choices", ()))
    return rows


def _rows(
    plan: Plan, choices: Mapping[object, Mapping[str, Choice]], depth: int = 0
) -> list[dict[str, Any]]:
    """What runs, in order, one row each. "on" is "load" (once, from constants alone), "gpu", "cpu"
    or "host" (control flow, seeds). The rows of its sub-graphs follow, with a larger "depth"."""
    rows: list[dict[str, Any]] = [
        {
            "on": "load",
            "operator": label_operator(d.label),
            "source": label_source(d.label),
            "results": [],
            "dispatches": 1,
            "templates": [d.kernel.template],
            "why": None,
        }
        for d in plan.once
    ]
    for row in rows:
        row["depth"] = depth
    for step, (first, last) in zip(plan.steps, plan.ranges):
        if step.runs_on == "host":
            data = control_data(step.nodes[0])
            rows.append({"on": "host", "dispatches": 0, "templates": [], "depth": depth, **data})
            for inner in plan.inner.get(step.nodes[0], ()):
                rows.append(
                    {
                        "on": "",
                        "operator": inner.graph.name,
                        "source": "",
                        "results": [],
                        "dispatches": 0,
                        "templates": [],
                        "why": "sub-graph",
                        "depth": depth + 1,
                    }
                )
                rows += _rows(inner, choices, depth + 2)
            continue
        if not step.on_device:
            data = host_data(step.nodes[0])
            rows.append({"on": "cpu", "dispatches": 0, "templates": [], "depth": depth, **data})
            continue
        made: dict[Node, list[str]] = {node: [] for node in step.nodes}
        for at in range(first, last):
            made[plan.nodes_of[at]].append(plan.dispatches[at].kernel.template)
        for node, templates in made.items():
            rows.append(
                {
                    "on": "gpu",
                    "operator": node.op,
                    "source": node.source,
                    "results": [str(v.type) for v in node.results],
                    "dispatches": len(templates),
                    "templates": templates,
                    "why": None,
                    "depth": depth,
                    "choices": tuple(choices.get(node, {}).values()),
                }
            )
    return rows


def label_operator(label: str) -> str:
    """The operator of a dispatch's label."""
    return label.partition(" @ ")[0]


def label_source(label: str) -> str:
    """Where in the file the operator of a dispatch's label is."""
    return label.partition(" @ ")[2]


def user_operators(label: str) -> list[str]:
    """The operators of the user's program that a dispatch computes, as its label names them: `roll` of
    "purevk.map @ blocks.0.roll_1"."""
    parts = [part.split(" ")[-1] for part in label_source(label).split(" + ")]
    # "aten.add.Tensor" has the overload last, "blocks.0.add_1" the number of the node.
    names = [
        part.split(".")[1] if part.startswith("aten.") else part.rpartition(".")[2]
        for part in parts
    ]
    return list(dict.fromkeys(name for part in names if (name := re.sub(r"_\d+$", "", part))))


def host_nodes(plan: Plan) -> list[Node]:
    """The nodes that run on the CPU, in order, also those of sub-graphs."""
    return [step.nodes[0] for each in plan.nested() for step in each.steps if step.runs_on == "cpu"]

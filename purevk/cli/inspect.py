"""`purevk inspect`: what is in a file, and where each node runs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

from purevk import pte
from purevk.cli.command import pick_method
from purevk.cli.machine import Target, device_line
from purevk.cli.output import Output, count, error_data, size
from purevk.errors import InputError, PurevkError
from purevk.frontends.files import ModelFile, open_file
from purevk.frontends.saved import SavedProgram
from purevk.graph import report
from purevk.graph.drawing import GraphDrawing
from purevk.ir import Graph, Value
from purevk.program.specs import input_specs, output_specs
from purevk.pte import types as P
from purevk.report import lowered
from purevk.report.words import guard_in_words, kernel_line, problem_line
from purevk.tuning.choices import RecordedChoices

_MANY = 6  # delegates, above which they are not listed one by one


def collect(args: argparse.Namespace) -> dict[str, Any]:
    if args.format is not None:
        return _drawing(args)
    with open_file(args.model, args.data) as program:
        names = program.methods
        if args.method is not None and args.method not in names:
            raise InputError(
                f"there is no method {args.method!r}",
                where=program.name,
                why=f"methods: {', '.join(names)}",
            )
        with Target(args) as target:
            methods = [
                _method(program, name, target, args)
                for name in names
                if args.method in (None, name)
            ]
            return {
                "file": _file(program),
                "device": target.data(),
                "methods": methods,
                "torch_installed": importlib.util.find_spec("torch") is not None,
                "ok": all(method["error"] is None for method in methods),
            }


def _drawing(args: argparse.Namespace) -> dict[str, Any]:
    with open_file(args.model, args.data) as program, Target(args) as target:
        name = pick_method(program.methods, args.method, program.name)
        drawing = GraphDrawing(lowered.lower(program, name, target.traits).plan)
        forms = {"text": drawing.to_text, "json": drawing.to_json, "mermaid": drawing.to_mermaid}
        return {"method": name, "format": args.format, "drawing": forms[args.format]()}


def _file(opened: ModelFile) -> dict[str, Any]:
    program = opened.content
    data = {
        "path": opened.name,
        "kind": opened.kind,
        "bytes": program.source.size,
        "methods": list(opened.methods),
    }
    if not isinstance(program, pte.Program):
        data |= {"named_data": None, "data_files": []}
    if isinstance(program, SavedProgram):
        data |= {"producer": program.producer, "tensor_bytes": program.tensor_bytes}
    if not isinstance(program, pte.Program):
        return data
    return data | {
        "named_data": {
            "keys": len(program.named),
            "bytes": sum(program.segments[index].size for index in set(program.named.values())),
        },
        "data_files": [
            {
                "path": file.name,
                "keys": len(file.entries),
                "bytes": sum(entry.size for entry in file.entries.values()),
            }
            for file in program.data_files
        ],
    }


def _in_pte(program: pte.Program, plan: P.ExecutionPlan) -> dict[str, Any]:
    """What a .pte file holds of a method."""
    calls = [call for chain in plan.chains for call in chain.instructions]
    delegates = [_delegate(program, delegate) for delegate in plan.delegates]
    called = Counter(call.delegate_index for call in calls if isinstance(call, P.DelegateCall))
    kernels = Counter(
        str(plan.operators[call.op_index]) for call in calls if isinstance(call, P.KernelCall)
    )
    return {
        "file_nodes": {
            "delegate_calls": called.total(),
            "kernel_calls": kernels.total(),
            "nodes": kernels.total()
            + sum(delegates[index]["operators"] or 0 for index in called.elements()),
            "kernels": dict(sorted(kernels.items())),
        },
        "delegates": delegates,
    }


def _add_names(
    rows: list[dict[str, Any]], opened: ModelFile, method: str, args: argparse.Namespace
) -> None:
    """Adds the lines and parameters that an ETRecord knows."""
    from purevk.report.etdump import delegate_calls
    from purevk.report.etrecord import known_nodes, lines_of, parameters_of, read_etrecord

    record = read_etrecord(Path(args.etrecord), method)
    calls = delegate_calls(args.model, args.data, method)
    assert isinstance(opened.content, pte.Program)  # else the calls were refused
    node_table = known_nodes(record, opened.content, method)
    for row in rows:
        row["line"] = lines_of(row["source"], calls, record, node_table)
        row["parameters"] = parameters_of(row["source"], calls, node_table)


def _method(
    opened: ModelFile, name: str, target: Target, args: argparse.Namespace
) -> dict[str, Any]:
    data: dict[str, Any] = {"name": name, "file_nodes": None, "delegates": [], "error": None}
    if isinstance(opened.content, pte.Program):
        data |= _in_pte(opened.content, opened.content.method(name))
    choices = RecordedChoices(target.traits.choices)
    try:
        traits = dataclasses.replace(target.traits, choices=choices)
        lowered_method = lowered.lower(opened, name, traits)
    except PurevkError as error:
        return {**data, "error": error_data(error)}
    run = lowered_method.plan
    segments = lowered.segments_data(run)
    limit = None if target.context is None else target.context.device.limits.max_buffer_memory
    data |= {
        "inputs": lowered.describe(input_specs(lowered_method.graph)),
        "outputs": lowered.describe(output_specs(lowered_method.graph)),
        "sizes": lowered.size_symbols(lowered_method.graph),
        "guards": list(dict.fromkeys(map(guard_in_words, lowered_method.guards))),
        "nodes": len(lowered_method.graph.nodes),
        "dispatches": sum(len(part.dispatches) for part in run.nested()),
        "dispatches_at_load": sum(len(part.once) for part in run.nested()),
        "segments": segments,
        "cpu_nodes": [lowered.host_data(node) for node in lowered.host_nodes(run)],
        "memory": report.memory_data(run, target.unified, limit),
        "kernels": report.kernels_data(run),
        "constant": _constants(lowered_method.graph),
    }
    if args.node_table or args.etrecord is not None:
        data["node_table"] = rows = lowered.node_rows(run, choices)
        if args.etrecord is not None:
            _add_names(rows, opened, name, args)
    if args.graph:
        from purevk.ir.printer import to_text

        data["graph"] = to_text(lowered_method.graph)
    return data


def _constants(graph: Graph) -> list[str] | None:
    """The results of a method that computes nothing; None for other methods."""
    if graph.inputs or graph.nodes or not graph.outputs:
        return None
    return [str(value.type) if isinstance(value, Value) else str(value) for value in graph.outputs]


def _delegate(program: pte.Program, delegate: P.Delegate) -> dict[str, Any]:
    data: dict[str, Any] = {
        "backend": delegate.id,
        "bytes": len(program.delegate_data(delegate)),
        "operators": None,
        "constants": None,
        "constant_bytes": None,
    }
    if delegate.id == P.VULKAN_BACKEND:
        graph = program.vulkan_graph(delegate)
        data["operators"], data["constants"] = len(graph.chain), len(graph.constants)
        data["constant_bytes"] = sum(constant.length for constant in graph.constants)
    return data


# -- for people ----------------------------------------------------------------------------------
def show(data: dict[str, Any], out: Output) -> None:
    if "drawing" in data:
        out.raw(data["drawing"].rstrip("\n"))
        return
    file = data["file"]
    out.heading(file["path"])
    named = file["named_data"]
    out.pairs(
        [
            ("size", size(file["bytes"])),
            ("methods", ", ".join(file["methods"])),
            ("written by", file.get("producer")),
            ("tensors", size(file["tensor_bytes"]) if "tensor_bytes" in file else None),
            (
                "named data",
                f"{count(named['keys'], 'key')}, {size(named['bytes'])}"
                if named and named["keys"]
                else None,
            ),
            *[
                (
                    "data file",
                    f"{entry['path']}: {count(entry['keys'], 'key')}, {size(entry['bytes'])}",
                )
                for entry in file["data_files"]
            ],
            ("device", device_line(data["device"])),
        ]
    )
    for method in data["methods"]:
        _show_method(method, out, data["torch_installed"])


def _show_method(method: dict[str, Any], out: Output, torch_installed: bool) -> None:
    if method.get("constant"):  # files of language models have a dozen of these
        out.line(f"method {method['name']}: {', '.join(method['constant'])} (constant)")
        return
    out.heading(f"method {method['name']}")
    if method["error"] is not None:
        error = method["error"]
        out.pairs([("in the file", _in_file(method))])
        out.line(f"  cannot run: {error['what']}", "bold red")
        out.pairs(
            [
                ("where", error["where"] or None),
                ("why", error["why"] or None),
                ("next", error["next"] or None),
            ],
            4,
        )
        _show_delegates(method, out)
        return
    segments = method["segments"]
    gpu, cpu, control = (
        sum(segment["on"] == name for segment in segments) for name in ("gpu", "cpu", "host")
    )
    memory = method["memory"]
    once = method["dispatches_at_load"]
    out.pairs(
        [
            *[(_named("input", value), lowered.type_text(value)) for value in method["inputs"]],
            *[(_named("output", value), lowered.type_text(value)) for value in method["outputs"]],
            *[(f"size {name}", _bounds(bounds)) for name, bounds in method["sizes"].items()],
            ("lowered for", ", ".join(method["guards"]) or None),
            ("in the file", _in_file(method)),
            (
                "here",
                f"{count(method['dispatches'], 'dispatch')} a call"
                + (f", {once} once at load" if once else "")
                + f" ({count(method['nodes'], 'node')} in the graph)",
            ),
            (
                "segments",
                f"{gpu} on the GPU"
                + (f", {cpu} on the CPU between them" if cpu else "")
                + (f", {count(control, 'step')} of control flow" if control else ""),
            ),
            (
                "memory",
                f"{size(memory['planned'])} for intermediate tensors (separately {size(memory['naive'])}, at least"
                f" {size(memory['lower_bound'])})",
            ),
            (
                "",
                f"{size(memory['weights'])} weights, {size(memory['state'])} state, {size(memory['inputs'])} inputs,"
                f" {size(memory['outputs'])} outputs",
            ),
        ]
    )
    _show_delegates(method, out)
    if method["kernels"]:
        out.table(
            [
                "template",
                ("dispatches", "r"),
                ("at load", "r"),
                ("pipelines", "r"),
                ("modules", "r"),
            ],
            [
                [k["template"], k["dispatches"], k["at_load"] or None, k["pipelines"], k["modules"]]
                for k in method["kernels"]
            ],
            title="kernels",
        )
    _show_cpu(method["cpu_nodes"], out, torch_installed)
    if "node_table" in method:
        _show_nodes(method["node_table"], out)
        _show_choices(method["node_table"], out)
    if "graph" in method:
        out.heading("graph")
        out.raw(method["graph"].rstrip())


def _named(kind: str, data: dict[str, Any]) -> str:
    """The heading of an input or output: "input x", or "input 2" if it has no name."""
    name = str(data["name"])
    return name.replace("_", " ") if name.startswith(f"{kind}_") else f"{kind} {name}"


def _bounds(data: dict[str, Any]) -> str:
    if data["max"] is None:
        return f"{data['min']} or more"
    return f"{data['min']} to {data['max']}"


def _in_file(method: dict[str, Any]) -> str | None:
    nodes = method["file_nodes"]
    if nodes is None:
        return None
    return (
        f"{count(nodes['nodes'], 'node')}: {count(nodes['delegate_calls'], 'delegate call')},"
        f" {count(nodes['kernel_calls'], 'kernel call')} between them"
    )


def _show_delegates(method: dict[str, Any], out: Output) -> None:
    if len(method["delegates"]) > _MANY:
        for backend in sorted({delegate["backend"] for delegate in method["delegates"]}):
            group = [delegate for delegate in method["delegates"] if delegate["backend"] == backend]
            operators, constants, nbytes = (
                sum(delegate[key] or 0 for delegate in group)
                for key in ("operators", "constants", "constant_bytes")
            )
            summary = (
                f": {count(operators, 'operator')}, {count(constants, 'constant')} of {size(nbytes)}"
                if operators
                else ""
            )
            out.heading(f"{count(len(group), 'delegate')} of {backend}{summary}")
    elif method["delegates"]:
        out.table(
            ["delegate", ("bytes", "r"), ("operators", "r"), ("constants", "r"), ("of bytes", "r")],
            [
                [
                    f"{n}: {d['backend']}",
                    size(d["bytes"]),
                    d["operators"],
                    d["constants"],
                    size(d["constant_bytes"]),
                ]
                for n, d in enumerate(method["delegates"])
            ],
            title="delegates",
        )


def _show_cpu(nodes: list[dict[str, Any]], out: Output, torch_installed: bool) -> None:
    if not nodes:
        out.heading("every node runs on the GPU")
        return
    grouped = Counter((node["operator"], node["why"]) for node in nodes)
    first = {(node["operator"], node["why"]): node["source"] for node in reversed(nodes)}
    out.table(
        ["operator", ("nodes", "r"), "why", "first in the file"],
        [[name, number, why, first[name, why]] for (name, why), number in grouped.most_common()],
        title=f"on the CPU: {count(len(nodes), 'node')}",
    )
    if not torch_installed:
        out.line("  torch, which runs these, is not installed: pip install torch", "yellow")


def _show_nodes(rows: list[dict[str, Any]], out: Output) -> None:
    with_lines = any(row["line"] for row in rows)
    out.table(
        [
            ("#", "r"),
            ("on", "w"),
            ("operator", "c"),
            ("result", "c"),
            ("kernels", "c"),
            ("source", "p"),
            *([("line", "p")] if with_lines else []),
        ],
        [
            [
                n,
                row["on"],
                "  " * row["depth"] + row["operator"],
                "; ".join(row["results"]),
                "; ".join(
                    name.rpartition("/")[2].removesuffix(".comp") for name in row["templates"]
                )
                or row["why"]
                or "none: a view",
                row["source"],
                *([row["line"]] if with_lines else []),
            ]
            for n, row in enumerate(rows)
        ],
        styled=1,
        title="nodes",
    )


def _show_choices(rows: list[dict[str, Any]], out: Output) -> None:
    """The kernels that were chosen from several, once for equal problems."""
    nodes: dict[str, list[int]] = {}
    choices: dict[str, dict[str, Any]] = {}
    for n, row in enumerate(rows):
        for choice in row["choices"]:
            choices[choice["problem"]] = choice
            nodes.setdefault(choice["problem"], []).append(n)
    if not choices:
        return
    out.heading("choices of kernels")
    for problem, choice in choices.items():
        cost = f", which costs {choice['cost']:.3g}" if choice["cost"] else ""
        kernel = "none" if choice["kernel"] is None else kernel_line(choice["kernel"])
        out.line(f"  #{', '.join(map(str, nodes[problem]))}: {problem_line(problem)}")
        out.line(f"    {kernel}{cost}")
        for other in choice["others"]:
            number = f" ({other['count']})" if other["count"] > 1 else ""
            out.line(f"    not {other['kernel']}{number}: {other['why']}", "dim")

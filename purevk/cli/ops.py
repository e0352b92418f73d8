"""`purevk ops`: the operators with a kernel, and which nodes of a model would run where."""

from __future__ import annotations

import argparse
import fnmatch
from collections import Counter
from typing import Any

from purevk.cli.machine import Target, device_line
from purevk.cli.output import Output, count, error_data
from purevk.errors import InputError, PurevkError
from purevk.frontends.files import ModelFile, open_file
from purevk.ops import registry


def collect(args: argparse.Namespace) -> dict[str, Any]:
    if args.check:
        return _check(args)
    entries = [entry for entry in operators() if _fits(entry, args.pattern)]
    if not entries:
        raise InputError(
            f"no operator fits {args.pattern!r}",
            why="the operators with a definition are searched, by all of their names",
            next="`purevk ops` lists them; one without a definition runs on the CPU through torch",
        )
    return {"operators": entries}


def operators() -> list[dict[str, Any]]:
    """All operator definitions: "operator", "names" (other names), "form" ("pointwise", "view",
    "rewrite", "kernel" or "cpu"), "epilogue" (whether its kernel also runs the pointwise operators
    that follow)."""
    return [
        {
            "operator": definition.name,
            "names": list(definition.names),
            "form": "cpu" if definition.form is None else type(definition.form).__name__.lower(),
            "epilogue": bool(getattr(definition.form, "epilogue", False)),
        }
        for definition in registry.definitions()
    ]


def _fits(entry: dict[str, Any], pattern: str | None) -> bool:
    if pattern is None:
        return True
    glob = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    return any(
        fnmatch.fnmatchcase(name, glob) for name in (entry["operator"], *entry.get("names", ()))
    )


def _check(args: argparse.Namespace) -> dict[str, Any]:
    methods: list[dict[str, Any]] = []
    with open_file(args.check, args.data, check=False) as program, Target(args) as target:
        for name in program.methods:
            try:
                methods.append(
                    {
                        "name": name,
                        "operators": [
                            entry
                            for entry in _where(program, name, target.traits)
                            if _fits(entry, args.pattern)
                        ],
                        "error": None,
                    }
                )
            except PurevkError as error:
                methods.append({"name": name, "operators": [], "error": error_data(error)})
        return {
            "file": program.name,
            "device": target.data(),
            "methods": methods,
            "ok": all(method["error"] is None for method in methods),
        }


def _where(program: ModelFile, method: str, traits: Any) -> list[dict[str, Any]]:
    """For each operator of a method, by the front end's name: where it runs (GPU or CPU), why, and
    the number of nodes."""
    from purevk.passes.pipeline import phases

    graph = program.graph(method)
    for pass_ in phases(traits)[0].passes:  # the last of them wraps what the device cannot run
        graph = pass_(graph, traits)
    counts: Counter[tuple[str, str, str]] = Counter()
    for node in graph.nodes:
        if node.op == "purevk.host":
            counts[str(node.args[0]), "cpu", str(node.args[1])] += 1
        else:
            counts[node.op, "gpu", ""] += 1
    return [
        {"operator": name, "on": on, "why": why or None, "nodes": number, "form": _form(name)}
        for (name, on, why), number in sorted(
            counts.items(), key=lambda item: (item[0][1], item[0][0])
        )
    ]


def _form(name: str) -> str | None:
    definition = registry.find(name)
    if definition is None or definition.form is None:
        return None
    return type(definition.form).__name__.lower()


# -- for people ----------------------------------------------------------------------------------
def show(data: dict[str, Any], out: Output) -> None:
    if "methods" not in data:
        rows = data["operators"]
        out.table(
            [("operator", "w"), ("form", "w"), "other names"],
            [
                [
                    _short(row["operator"]),
                    row["form"] + " +" * row["epilogue"],
                    ", ".join(map(_short, row["names"])),
                ]
                for row in rows
            ],
        )
        notes = (
            "+: takes pointwise operators that follow into its kernel; names without their .default"
        )
        out.line(f"{count(len(rows), 'operator')}; {notes}", "dim")
        return
    out.pairs([("file", data["file"]), ("device", device_line(data["device"]))], indent=0)
    for method in data["methods"]:
        if method["error"] is not None:
            out.heading(f"method {method['name']}: {method['error']['what']}")
            out.pairs(
                [("why", method["error"]["why"] or None), ("next", method["error"]["next"] or None)]
            )
            continue
        rows = method["operators"]
        total = {on: sum(row["nodes"] for row in rows if row["on"] == on) for on in ("gpu", "cpu")}
        out.table(
            ["operator", ("nodes", "r"), ("on", "w"), ("form", "w"), "why"],
            [[row["operator"], row["nodes"], row["on"], row["form"], row["why"]] for row in rows],
            styled=2,
            title=f"method {method['name']}: {total['gpu']} nodes on the GPU, {total['cpu']} on the CPU",
        )


def _short(name: str) -> str:
    return name.removesuffix(".default")

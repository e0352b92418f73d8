"""`purevk bisect`: finds the node, pass or device feature that makes results differ."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from purevk.checking.bisect import Bisection
from purevk.checking.check import states_of
from purevk.cli.command import pick_method
from purevk.cli.inputs import make_inputs
from purevk.cli.machine import device_data, device_line, open_context
from purevk.cli.output import Output
from purevk.progress import Steps


def collect(args: argparse.Namespace) -> dict[str, Any]:
    import purevk

    with open_context(args) as context, Steps() as steps:
        steps("loading")
        program = purevk.load(args.model, args.data, context=context, progress=steps.phase)
        name = pick_method(program.methods, args.method, program.name)
        method = program.method(name)
        variant = method.variants[0]
        call = variant.read(make_inputs(method.graph, args, f"{program.name}, method {name}"))
        call.checked = False
        refused = variant.choose(call)
        if refused is not None:
            raise refused
        states = states_of(call.chosen.imported, program.states)
        variant.run(call)  # finds the data-dependent sizes
        steps("comparing")
        with Bisection(
            context, call.chosen.imported, call.arrays, states, steps.phase
        ) as bisection:
            verdict = bisection.run()
        return {
            "device": device_data(context.device),
            "method": name,
            "ok": verdict.kind == "none",
            **dataclasses.asdict(verdict),
        }


def show(data: dict[str, Any], out: Output) -> None:
    out.pairs([("device", device_line(data["device"])), ("method", data["method"])], indent=0)
    out.line()
    rows = [
        [trial["what"], trial["without"], trial["difference"] or "agrees"]
        for trial in data["trials"]
    ]
    out.table([("compared", "w"), ("without", "w"), ("result", "w")], rows)
    if data["unchecked"]:
        out.line()
        out.line("Without a reference in eager torch:")
        for operator, reason in data["unchecked"].items():
            out.line(f"  {operator}: {reason}")
    out.line()
    for line in _conclusion(data):
        out.line(line)


def _conclusion(data: dict[str, Any]) -> list[str]:
    if data["kind"] == "none":
        if data["random"]:
            return [
                "No node differs. Some results are random, so the program as a whole was not compared."
            ]
        return ["No difference found."]
    passes, features = ", ".join(data["passes"]), ", ".join(data["features"])
    lines = {
        "node": ["The culprit is an operator: it differs when it runs by itself."],
        "pass": [f"The culprit is a pass: {passes}"],
        "feature": [f"The culprit is a device feature, or a kernel that uses it: {features}"],
        "nodes": ["The culprit is a required pass, or a kernel that runs several nodes."],
    }[data["kind"]]
    lines += [f"  {line}" for text in data["nodes"] for line in text.splitlines()]
    lines.append(f"  {data['difference']}")
    if passes:
        lines.append(f"It agrees with PUREVK_SKIP_PASSES={','.join(data['passes'])}")
    if features:
        lines.append(f"It agrees with PUREVK_DISABLE={','.join(data['features'])}")
    return lines

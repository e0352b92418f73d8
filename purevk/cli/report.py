"""`purevk report`: writes a page about a model."""

from __future__ import annotations

import argparse
import os
from typing import Any

from purevk.cli.inputs import make_inputs
from purevk.cli.machine import Target, device_line
from purevk.cli.output import Output, check_output, output_file, size
from purevk.errors import InputError
from purevk.frontends.files import open_file
from purevk.progress import Steps
from purevk.report.contents import DeviceParts, MethodParts, contents
from purevk.report.lowered import lower
from purevk.report.page import page


def collect(args: argparse.Namespace) -> dict[str, Any]:
    check_output(args.output, "the page")
    with Target(args) as target, Steps() as steps:
        if target.context is None:
            parts, text = _without_device(args, target)
        else:
            parts, text = _on_device(args, target, steps)
        encoded = text.encode()
        with output_file(args.output, "the page") as file:
            file.write(encoded)
        return {
            "device": target.data(),
            "methods": [part.name for part in parts],
            "timed": [part.name for part in parts if part.timings is not None],
            "why_untimed": {part.name: part.why_untimed for part in parts if part.why_untimed},
            "output": args.output,
            "bytes": len(encoded),
        }


def _without_device(args: argparse.Namespace, target: Target) -> tuple[list[MethodParts], str]:
    with open_file(args.model, args.data) as opened:
        names = _names(opened.methods, args.method, opened.name)
        parts = []
        for name in names:
            method = lower(opened, name, target.traits)
            parts.append(MethodParts(name, method.graph, method.plan, method.guards, {}))
        device = DeviceParts("a typical desktop GPU", None, "", target.unified, None)
        return parts, page(contents(os.path.basename(opened.name), parts, device, {}))


def _on_device(
    args: argparse.Namespace, target: Target, steps: Steps
) -> tuple[list[MethodParts], str]:
    import purevk
    from purevk.program.pages import method_parts, page_of

    assert target.context is not None
    steps("loading")
    with purevk.load(
        args.model, args.data, context=target.context, progress=steps.phase
    ) as program:
        names = _names(program.methods, args.method, program.name)
        calls = {}
        if not args.no_times:
            for name in names:
                method = program.method(name)
                inputs = make_inputs(method.graph, args, f"{program.name}, method {name}")
                calls[name] = method.serving_flat(inputs)
        parts = []
        for name in names:
            steps(f"method {name}")
            parts += method_parts(program, [name], calls, steps.phase)
        steps("measuring the limits of the device" if calls else "making the page")
        return parts, page_of(program, parts, args.remeasure)


def _names(methods: Any, name: str | None, where: str) -> list[str]:
    names = list(methods)
    if name is None:
        return names
    if name not in names:
        raise InputError(
            f"there is no method {name!r}", where=where, why=f"methods: {', '.join(names)}"
        )
    return [name]


# -- for people ----------------------------------------------------------------------------------
def show(data: dict[str, Any], out: Output) -> None:
    out.pairs(
        [
            ("device", device_line(data["device"])),
            ("methods", ", ".join(data["methods"])),
            ("page", f"{data['output']} ({size(data['bytes'])}; open it in a browser)"),
        ],
        indent=0,
    )
    for name, why in data["why_untimed"].items():
        out.line(f"{name} was not timed: {why}", "yellow")

"""`purevk run`: runs a method once and shows its outputs."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from purevk.cli.command import pick_method
from purevk.cli.inputs import as_array, make_inputs
from purevk.cli.machine import device_data, device_line, open_context
from purevk.cli.output import Output, check_output, duration, output_file
from purevk.schedule.plan import count_steps


def collect(args: argparse.Namespace) -> dict[str, Any]:
    import purevk

    if args.output:
        check_output(args.output, "the outputs")
    with open_context(args) as context:
        start = time.perf_counter()
        program = purevk.load(args.model, args.data, context=context)
        loaded = time.perf_counter()
        name = pick_method(program.methods, args.method, program.name)
        method = program.method(name)
        inputs = make_inputs(method.graph, args, f"{program.name}, method {name}")
        began = time.perf_counter()
        results = method.run_flat(inputs)
        ended = time.perf_counter()
        outputs = [
            as_array(result) for result in (results if isinstance(results, tuple) else (results,))
        ]
        data = {
            "device": device_data(context.device),
            "method": name,
            "load_seconds": loaded - start,
            "run_seconds": ended - began,
            "inputs": [
                {"name": spec.name, **_tensor(as_array(result))}
                for spec, result in zip(method.inputs, inputs, strict=True)
            ],
            "outputs": [
                {"name": spec.name, **_tensor(array)}
                for spec, array in zip(method.outputs, outputs, strict=True)
            ],
            "cpu_nodes": count_steps([method.executable.plan])["cpu_nodes"],
            "written": args.output,
        }
    if args.output:
        _write(args.output, outputs)
    return data


def _tensor(value: Any) -> dict[str, Any]:
    """dtype and shape, and min, max and mean of the finite elements. "not_finite" counts the
    others."""
    if not isinstance(value, np.ndarray):
        return {"dtype": type(value).__name__, "shape": None, "value": value}
    finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value
    wide = finite.astype(np.float64)
    return {
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "min": float(wide.min()) if wide.size else None,
        "max": float(wide.max()) if wide.size else None,
        "mean": float(wide.mean()) if wide.size else None,
        "not_finite": int(value.size - finite.size),
    }


def _write(path: str, outputs: list[Any]) -> None:
    named: dict[str, Any] = {
        f"output_{n}": np.asarray(array) for n, array in enumerate(outputs) if array is not None
    }
    with output_file(path, "the outputs") as file:
        np.savez(file, **named)


def show(data: dict[str, Any], out: Output) -> None:
    out.pairs(
        [
            ("device", device_line(data["device"])),
            ("method", data["method"]),
            ("load", duration(data["load_seconds"])),
            ("run", duration(data["run_seconds"])),
        ],
        indent=0,
    )
    rows = [
        [kind, tensor["name"], *_cells(tensor)]
        for kind in ("input", "output")
        for tensor in data[f"{kind}s"]
    ]
    out.line()
    out.table(
        ["", "name", ("dtype", "w"), "shape", ("min", "r"), ("max", "r"), ("mean", "r")], rows
    )
    for output in data["outputs"]:
        if output.get("not_finite"):
            out.line(
                f"{output['name']} has {output['not_finite']} elements that are infinite or no numbers",
                "bold red",
            )
    if data["written"]:
        out.line(f"written to {data['written']}")


def _cells(data: dict[str, Any]) -> list[Any]:
    if data["shape"] is None:
        return [data["dtype"], "", "", "", data["value"]]
    numbers = [None if data[key] is None else f"{data[key]:.5g}" for key in ("min", "max", "mean")]
    return [data["dtype"], str(data["shape"]), *numbers]

"""`purevk bench`: loading cold and warm, times of calls, and a profile by operator."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from purevk import knobs
from purevk.cli.command import pick_method
from purevk.cli.inputs import make_inputs
from purevk.cli.machine import device_data, device_line, open_context
from purevk.cli.output import Output, count, duration
from purevk.cli.profile import measure, show_profile
from purevk.cli.stopwatch import Stopwatch
from purevk.errors import PurevkError
from purevk.progress import Progress, Steps
from purevk.schedule.plan import count_steps
from purevk.whole_file import temporary_folder

_WARM_CALLS = 3
_CHILD_SECONDS = 1800
_PACKAGES = str(Path(__file__).parents[2])  # the child imports the same purevk
_CHILD = (
    f"import sys; sys.path.insert(0, {_PACKAGES!r}); from purevk.cli import main; sys.exit(main())"
)
# Drivers' own caches, which must be as cold as purevk's. Each takes a folder.
_DRIVER_CACHES = ("MESA_SHADER_CACHE_DIR", "__GL_SHADER_DISK_CACHE_PATH")


def collect(args: argparse.Namespace) -> dict[str, Any]:
    with Steps() as steps:
        return _bench_model(args, steps)


def _bench_model(args: argparse.Namespace, steps: Steps) -> dict[str, Any]:
    import purevk

    began = time.perf_counter()
    with open_context(args) as context:
        opened = time.perf_counter()
        steps("loading")
        program = purevk.load(args.model, args.data, context=context, progress=steps.phase)
        loaded = time.perf_counter()
        name = pick_method(program.methods, args.method, program.name)
        method = program.method(name)
        inputs = make_inputs(method.graph, args, f"{program.name}, method {name}")
        start = time.perf_counter()
        method.run_flat(inputs)
        report, counts = program.report(), count_steps([method.executable.plan])
        data: dict[str, Any] = {
            "device": device_data(context.device),
            "method": name,
            "inputs": [
                list(operand.shape) if hasattr(operand, "shape") else operand for operand in inputs
            ],
            "dispatches": counts["dispatches"],
            "segments": counts["segments"],
            "cpu_nodes": counts["cpu_nodes"],
            "load": {
                "device_seconds": opened - began,
                "load_seconds": loaded - opened,
                "phases": report["seconds"],
                "kernels": report["kernels"],
                "first_call_seconds": time.perf_counter() - start,
            },
        }
        if args.load_only:
            return data
        steps("timing")
        data["calls"] = _time_calls(
            lambda: method.run_flat(inputs), context.device, args.runs, args.seconds, steps.phase
        )
        if args.profile:
            data["profile"] = measure(method, inputs, context, args, steps)[0]
    if not args.no_load:
        data["cold"], data["warm"] = _loads(args, steps)
    return data


def _time_calls(
    call: Callable[[], Any], device: Any, runs: int | None, seconds: float, progress: Progress
) -> dict[str, Any]:
    """Times calls one by one.

    Returns:
        "runs", and in seconds "median", "p95", "min", "mean"; medians of the parts: "device"
        (submitting and waiting), "fallback" (operators on the CPU) and "host" (the rest: checks,
        copies, recording).
    """
    for _ in range(_WARM_CALLS):
        call()
    totals: list[float] = []
    parts: dict[str, list[float]] = {"device": [], "fallback": [], "host": []}
    with Stopwatch(device) as watch:
        end = time.perf_counter() + seconds
        while len(totals) < (runs or 2) or (runs is None and time.perf_counter() < end):
            if runs is not None:
                progress("calls", len(totals), runs)
            else:
                elapsed = seconds - end + time.perf_counter()
                progress("seconds of calls", int(elapsed), max(math.ceil(seconds), 1))
            watch.reset()
            start = time.perf_counter()
            call()
            total = time.perf_counter() - start
            totals.append(total)
            parts["device"].append(watch.device)
            parts["fallback"].append(watch.fallback)
            parts["host"].append(total - watch.device - watch.fallback)
    return {
        "runs": len(totals),
        "median": statistics.median(totals),
        "p95": percentile(totals, 95),
        "min": min(totals),
        "mean": statistics.fmean(totals),
        **{name: statistics.median(values) for name, values in parts.items()},
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(max(-int(-len(ordered) * percent // 100) - 1, 0), len(ordered) - 1)]


# -- loading in processes of their own -----------------------------------------------------------
def _loads(args: argparse.Namespace, steps: Steps) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loads the model in two new processes, with an empty cache and with the cache that the first
    one left."""
    with temporary_folder("purevk-bench-") as folder:
        steps("cold start, in a process of its own")
        cold = _load_once(args, folder)
        steps("warm start, in a process of its own")
        return cold, _load_once(args, folder)


def _load_once(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    command = [
        sys.executable,
        "-c",
        _CHILD,
        "bench",
        args.model,
        "--load-only",
        "--json",
        f"--seed={args.seed}",
    ]
    for name, values in (("--data", args.data), ("--input", args.input)):
        command += [part for value in values for part in (name, value)]
    command += [part for name, number in args.size for part in ("--size", f"{name}={number}")]
    for name, value in (("--method", args.method), ("--device", args.device)):
        command += [name, value] if value is not None else []
    changes = {name: str(folder / "driver") for name in _DRIVER_CACHES}
    changes |= {
        knobs.CACHE.name: str(folder / "purevk"),
        knobs.PROGRESS.name: "0",
    }
    (folder / "driver").mkdir(exist_ok=True)
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            env=knobs.child_environment(changes),
            capture_output=True,
            text=True,
            timeout=_CHILD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise PurevkError(
            f"loading took more than {_CHILD_SECONDS} s", where=args.model, next="try --no-load"
        ) from None
    seconds = time.perf_counter() - start
    try:
        result = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise PurevkError(
            "loading in a process of its own failed", where=args.model, why=lines[-1]
        ) from None
    if "error" in result:
        error = result["error"]
        raise PurevkError(error["what"], where=error["where"], why=error["why"], next=error["next"])
    return {**result["load"], "process_seconds": seconds}


# -- for people ----------------------------------------------------------------------------------
def show(data: dict[str, Any], out: Output) -> None:
    out.pairs(
        [
            ("device", device_line(data["device"])),
            ("method", data["method"]),
            ("inputs", ", ".join(map(str, data["inputs"]))),
            (
                "runs as",
                f"{count(data['dispatches'], 'dispatch')} in {count(data['segments'], 'segment')},"
                f" {count(data['cpu_nodes'], 'node')} on the CPU",
            ),
        ],
        indent=0,
    )
    loads: list[tuple[str, Any]] = [(name, data[name]) for name in ("cold", "warm") if name in data]
    loads = loads or [("this process", data["load"])]
    out.table(
        [
            "",
            ("device", "r"),
            ("load", "r"),
            ("first call", "r"),
            ("process", "r"),
            ("compiled", "r"),
            ("cached", "r"),
        ],
        [
            [
                name,
                duration(row["device_seconds"]),
                duration(row["load_seconds"]),
                duration(row["first_call_seconds"]),
                duration(row.get("process_seconds")),
                row["kernels"]["compiled"],
                row["kernels"]["cached"],
            ]
            for name, row in loads
        ],
        title="loading",
    )
    if "calls" in data:
        _show_calls(data["calls"], out)
    if "profile" in data:
        show_profile(data["profile"], out)


def _show_calls(calls: dict[str, Any], out: Output) -> None:
    out.table(
        [
            ("median", "r"),
            ("p95", "r"),
            ("min", "r"),
            ("on the device", "r"),
            ("CPU operators", "r"),
            ("host", "r"),
        ],
        [[duration(calls[key]) for key in ("median", "p95", "min", "device", "fallback", "host")]],
        title=f"{count(calls['runs'], 'call')}",
    )

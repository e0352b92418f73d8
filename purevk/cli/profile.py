"""`purevk profile`: the time of every dispatch of a call, and a trace of a call for Perfetto."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from purevk.cli.command import pick_method
from purevk.cli.inputs import as_elements, make_inputs
from purevk.cli.machine import device_data, device_line, open_context
from purevk.cli.output import Output, check_output, count, duration, error_data, output_file
from purevk.cli.stopwatch import Span, Stopwatch
from purevk.errors import DeviceError, InputError
from purevk.progress import Steps
from purevk.report.lowered import label_source
from purevk.report.timings import (
    CallTimings,
    Timing,
    host_table,
    least_seconds,
    limits_for,
    table,
    time_call,
)

_WARM_CALLS = 3
_SHOWN = 4  # operators of the user's program that a row names
_HOST, _DEVICE, _CALLS, _QUEUE, _KERNELS = 1, 2, 1, 1, 2  # processes and threads of a trace


def collect(args: argparse.Namespace) -> dict[str, Any]:
    import purevk

    for path, subject in ((args.trace, "the trace"), (args.etdump, "the ETDump")):
        if path is not None:
            check_output(path, subject)
    with open_context(args) as context, Steps() as steps:
        steps("loading")
        program = purevk.load(args.model, args.data, context=context, progress=steps.phase)
        name = pick_method(program.methods, args.method, program.name)
        method = program.method(name)
        inputs = make_inputs(method.graph, args, f"{program.name}, method {name}")
        steps("timing a call")
        for _ in range(_WARM_CALLS):
            method.run_flat(inputs)
        with Stopwatch(context.device) as watch:
            start = time.perf_counter()
            method.run_flat(inputs)
            call = Span("call", start, time.perf_counter())
            spans = list(watch.spans)
        profile, timed = measure(method, inputs, context, args, steps)
        data: dict[str, Any] = {
            "device": device_data(context.device),
            "method": name,
            "call_seconds": call.end - call.start,
            "profile": profile,
            "next": next_steps(profile, call.end - call.start, args.model),
            "trace": None,
            "etdump": None,
        }
        if args.trace is not None:
            if profile["error"] is not None:
                raise InputError(
                    "there is no trace", where=args.trace, why=profile["error"]["what"]
                )
            title = f"{program.name}: {name}"
            trace_ = trace(context.device.name, title, call, spans, timed.dispatches, timed.order)
            with output_file(args.trace, "the trace") as file:
                file.write(json.dumps(trace_).encode())
            data["trace"] = args.trace
        if args.etdump is not None:
            _write_etdump(args, name, timed.dispatches, data)
        return data


def _write_etdump(
    args: argparse.Namespace, method: str, timings: Sequence[Timing], data: dict[str, Any]
) -> None:
    """Writes the times for executorch's Inspector."""
    from purevk.report.etdump import delegate_calls, etdump

    error = data["profile"]["error"]
    if error is not None:
        raise InputError("there are no times", where=args.etdump, why=error["what"])
    calls = delegate_calls(args.model, args.data, method)
    dump = etdump(timings, calls, method, data["call_seconds"])
    with output_file(args.etdump, "the ETDump") as file:
        file.write(dump)
    data["etdump"] = args.etdump


def measure(
    method: Any, inputs: Sequence[Any], context: Any, args: argparse.Namespace, steps: Steps
) -> tuple[dict[str, Any], CallTimings]:
    """Times every dispatch of a method: the rows of a profile, as `table` and `host_table` make them,
    and the timings. "error" says why there are none."""
    try:
        arrays = [as_elements(operand) for operand in inputs]
        steps("profile")
        timed = time_call(method.executable, arrays, progress=steps.phase)
    except DeviceError as error:
        none = {"error": error_data(error), "limits": None, "rows": [], "on_cpu": [], "by": args.by}
        return none, CallTimings([], [], [])
    timings = timed.dispatches
    steps("measuring the limits of the device")
    limits = limits_for(context, timings, args.remeasure)
    rows = table(timings, args.by, limits)
    for row in rows if args.by == "dispatch" else ():
        row["line"] = method.graph.lines_of(label_source(row["label"]))
    profile = {
        "error": None,
        "by": args.by,
        **least_seconds(timings, limits),
        "limits": {
            "bytes_per_second": limits.bytes_per_second,
            "flops_per_second": limits.flops_per_second,
        },
        "rows": rows,
        "on_cpu": host_table(timed.on_cpu),
    }
    return profile, timed


def next_steps(profile: Mapping[str, Any], call_seconds: float, model: str) -> list[str]:
    """What could make a call faster, for what takes its time.

    Args:
        profile: as `measure` gives it.
        model: the path, for commands.
    """
    if profile["error"] is not None:
        return []
    kernels, steps = profile["measured"], []
    on_cpu = sum(row["seconds"] for row in profile["on_cpu"])
    if profile["on_cpu"]:
        calls = sum(row["calls"] for row in profile["on_cpu"])
        steps.append(
            f"{count(calls, 'operator')} on the CPU, {duration(on_cpu)} and copies: `purevk inspect"
            f" {model}` says why (docs/extending.md: kernels of your own)"
        )
    host = call_seconds - kernels - on_cpu
    if host > call_seconds / 2:
        steps.append(
            f"the host takes {duration(host)} of {duration(call_seconds)}: program.submit prepares the"
            " next call meanwhile, and out= saves memory for results (docs/calling.md)"
        )
    memory = sum(row["seconds"] for row in profile["rows"] if row["bound"] == "memory")
    if memory > kernels / 2:
        steps.append(
            f"{100 * memory / kernels:.0f}% of the kernels' time is memory-bound: on GPUs, half"
            " precision and quantized weights move fewer bytes"
        )
    if profile["roofline"] < 0.6 * kernels:
        steps.append(
            f"`purevk tune {model}` measures the kernels that could run, and keeps the fastest"
        )
    return [*steps, "docs/help/performance.md has more"]


def trace(
    device: str,
    title: str,
    call: Span,
    spans: Sequence[Span],
    timings: Sequence[Timing],
    order: Sequence[int],
) -> dict[str, Any]:
    """A call in the Trace Event Format, which Perfetto and chrome://tracing show.

    The host's spans are those of one call. The kernels are timed one by one, in calls of their own:
    those of a segment follow one another from its submission on, and the queue's span is their sum.
    `order` has the numbers of the segments as they are submitted, those in loops several times.
    """
    events: list[dict[str, Any]] = []

    def name(process: int, thread: int | None, text: str) -> None:
        kind = "process_name" if thread is None else "thread_name"
        events.append(
            {"ph": "M", "name": kind, "pid": process, "tid": thread or 0, "args": {"name": text}}
        )

    def add(
        process: int, thread: int, text: str, start: float, seconds: float, **args: Any
    ) -> None:
        events.append(
            {
                "ph": "X",
                "name": text,
                "cat": "kernel" if (process, thread) == (_DEVICE, _KERNELS) else "purevk",
                "pid": process,
                "tid": thread,
                "ts": 1e6 * start,
                "dur": 1e6 * seconds,
                "args": args,
            }
        )

    name(_HOST, None, "host")
    name(_HOST, _CALLS, "call")
    name(_DEVICE, None, device)
    name(_DEVICE, _QUEUE, "queue")
    name(_DEVICE, _KERNELS, "kernels")
    add(_HOST, _CALLS, title, 0.0, call.end - call.start)
    for span in spans:
        add(_HOST, _CALLS, span.name, span.start - call.start, span.end - span.start)
    submitted = [span.end - call.start for span in spans if span.name == "submit"]
    segments = {
        number: list(group) for number, group in groupby(timings, lambda timing: timing.segment)
    }
    free = 0.0
    for number, segment in enumerate(order):
        members = segments[segment]
        start = max(submitted[number] if number < len(submitted) else 0.0, free)
        seconds = sum(member.seconds for member in members)
        add(_DEVICE, _QUEUE, f"segment {segment}", start, seconds, dispatches=len(members))
        free = start
        for member in members:
            more = {"template": member.template, "bytes": member.nbytes, "flops": member.flops}
            add(_DEVICE, _KERNELS, member.label, free, member.seconds, **more)
            free += member.seconds
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"kernels": "each timed alone, in other calls than that of the host"},
    }


# -- for people ----------------------------------------------------------------------------------
def show(data: dict[str, Any], out: Output) -> None:
    out.pairs(
        [
            ("device", device_line(data["device"])),
            ("method", data["method"]),
            ("a call", duration(data["call_seconds"])),
        ]
    )
    show_profile(data["profile"], out)
    if data["next"]:
        out.heading("next")
    for step in data["next"]:
        out.line(f"  {step}")
    if data["trace"] is not None:
        out.line(f"trace: {data['trace']} (open it at ui.perfetto.dev or chrome://tracing)")
    if data["etdump"] is not None:
        out.line(f"ETDump: {data['etdump']} (executorch.devtools.Inspector(etdump_path=...))")


def _named(row: dict[str, Any]) -> str:
    """A row by the operators of the user's program, and the kernel in brackets."""
    operators = row["operators"]
    names = ", ".join(operators[:_SHOWN]) + (", ..." if len(operators) > _SHOWN else "")
    return f"{names} ({row['label']})" if names else str(row["label"])


def show_profile(profile: dict[str, Any], out: Output) -> None:
    """Prints what `measure` gives."""
    if profile["error"] is not None:
        out.heading("profile")
        out.line(f"  {profile['error']['what']}", "yellow")
        return
    limits, single = profile["limits"], profile["by"] == "dispatch"
    columns = [("time", "r"), ("share", "r"), ("GB/s", "r"), ("GFLOP/s", "r"), ("of limit", "r")]
    rows = [
        [
            row["label"] if single else _named(row),
            row["calls"],
            duration(row["seconds"]),
            f"{100 * row['share']:.1f}%",
            _rate(row["bytes_per_second"]),
            _rate(row["flops_per_second"]),
            _share(row),
        ]
        for row in profile["rows"]
    ]
    whole = (
        f"{100 * profile['roofline'] / profile['measured']:.0f}%  " if profile["measured"] else None
    )
    rows.append(
        [
            "all",
            sum(row["calls"] for row in profile["rows"]),
            duration(profile["measured"]),
            None,
            None,
            None,
            whole,
        ]
    )
    if single:
        lines = [row["line"] or None for row in profile["rows"]]
        rows = [[row[0], *row[2:], line] for row, line in zip(rows, (*lines, None), strict=True)]
        columns += [("line", "w")] if any(lines) else []
        rows = rows if any(lines) else [row[:-1] for row in rows]
    names = [(profile["by"], "c"), *([] if single else [("calls", "r")]), *columns]
    out.table(names, rows[:-1], title="profile, each dispatch alone", total=rows[-1])
    if profile["on_cpu"]:
        rows = [[row["label"], row["calls"], duration(row["seconds"])] for row in profile["on_cpu"]]
        columns = [("operator", "c"), ("calls", "r"), ("time", "r")]
        out.table(columns, rows, title="on the CPU, without copies to it and back")
    out.line(
        f"limits measured on this device: {limits['bytes_per_second'] / 1e9:.1f} GB/s,"
        f" {limits['flops_per_second'] / 1e9:.0f} GFLOP/s (float32, without matrix cores)."
        " of limit: the shortest time that the limits allow, divided by the time taken (above 100%:"
        " data came from caches, the kernel used matrix cores, or the device was busy when its limits"
        " were measured: --remeasure); m: memory-bound, a: compute-bound",
        "dim",
    )


def _rate(per_second: float | None) -> str | None:
    return None if per_second is None else f"{per_second / 1e9:.{1 if per_second < 1e11 else 0}f}"


def _share(row: dict[str, Any]) -> str | None:
    return (
        None if row["limit_share"] is None else f"{100 * row['limit_share']:.0f}% {row['bound'][0]}"
    )

"""What programs show in a browser and in notebooks: a page, and a summary."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from purevk import generators
from purevk.graph.call import Call
from purevk.graph.context import Context
from purevk.graph.executable import Observation
from purevk.graph.limits import DeviceLimits
from purevk.graph.unbacked import Replan
from purevk.ir import Node, Value
from purevk.program.variants.specialization import Specialization
from purevk.progress import Progress
from purevk.report.contents import DeviceParts, MethodParts, contents
from purevk.report.page import framed, page, summary_html
from purevk.report.timings import limits_for, time_dispatches
from purevk.report.words import size_text

if TYPE_CHECKING:
    from purevk.program.program import Program

_CALLS = 5
_MOST_IN_NOTEBOOK = 4 << 20  # bytes of a page: a notebook keeps it with each output that shows it


def program_page(
    program: Program, method: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """The page of `Program.report_html`."""
    names = list(program.methods) if method is None else [program.method(method).name]
    calls = {}
    if args or kwargs:
        timed = method or "forward"
        calls[timed] = program.method(timed).serving(args, kwargs)
    return page_of(program, method_parts(program, names, calls))


def method_parts(
    program: Program,
    names: Sequence[str],
    calls: Mapping[str, tuple[Specialization, Sequence[Any]]],
    progress: Progress | None = None,
) -> list[MethodParts]:
    """Methods of a program, for a page.

    Args:
        program: what has them.
        names: of the methods.
        calls: what serves a call of a method, and the inputs, to time its dispatches with.
        progress: as for `time_call`.
    """
    parts = []
    for name in names:
        chosen, arrays = calls.get(name, (program.method(name).specializations[0], None))
        parts.append(_parts(program, name, chosen, arrays, progress))
    return parts


def page_of(program: Program, parts: Sequence[MethodParts], remeasure: bool = False) -> str:
    """The page of methods of a program.

    Args:
        remeasure: whether to measure the limits of the device also if they are known. If no method
            was timed, the page has none.
    """
    context = program.context
    timings = [timing for part in parts for timing in part.timings or ()]
    limits = limits_for(context, timings, remeasure) if timings else None
    specs = dict.fromkeys(spec for part in parts for spec in part.plan.kernels)
    device = device_parts(context, limits)
    return page(contents(program.name, parts, device, context.kernels.spirv(specs)))


def device_parts(context: Context, limits: DeviceLimits | None = None) -> DeviceParts:
    """The device of a context."""
    device = context.device
    return DeviceParts(
        name=device.name,
        kind=device.kind,
        driver=device.driver,
        unified=device.is_unified,
        max_arena=device.limits.max_buffer_memory,
        limits=limits,
    )


def _parts(
    program: Program,
    name: str,
    chosen: Specialization,
    arrays: Sequence[Any] | None,
    progress: Progress | None,
) -> MethodParts:
    executable = chosen.executable
    untimed = MethodParts(name, chosen.graph, executable.plan, chosen.guards, {})
    if arrays is None:
        return untimed
    if not program.context.device.features.timestamp:
        return replace(untimed, why_untimed="the device has no timestamps")
    env = chosen.environment(arrays)
    tensors = {
        value: np.ascontiguousarray(array)
        for value, array in zip(chosen.graph.inputs, arrays)
        if isinstance(value, Value)
    }
    with program.held():
        states = dict(program.state)
        drawn = generators.states(executable.generators)
        try:
            timings = time_dispatches(executable, arrays, progress=progress)
            calls = []
            for _ in range(_CALLS):
                observation = Observation()
                executable.observe(observation)
                start = time.perf_counter()
                executable.run(Call(tensors, dict(env)))
                calls.append((time.perf_counter() - start, observation.on_cpu))
        except Replan:
            return replace(
                untimed, why_untimed="a size that follows from data needs another lowering"
            )
        finally:
            executable.observe(None)
            generators.restore(drawn)
            program.state.update(states)
    whole, on_cpu = sorted(calls, key=lambda call: call[0])[_CALLS // 2]
    hosted: dict[Node, float] = {}
    for node, seconds in on_cpu:
        hosted[node] = hosted.get(node, 0.0) + seconds
    return replace(
        untimed,
        sizes={symbol.name: value for symbol, value in env.items()},
        timings=timings,
        host_seconds=hosted,
        whole_call=whole,
    )


def program_output(program: Program, closed: bool) -> str:
    """What a notebook shows of a program: its page, without times, and the summary. The summary
    alone if the program is closed, or if the page is too large."""
    title = f"Program {program.name}"
    if closed:
        return summary_html(title, [("state", "closed")])
    rows = _summary(program)
    text = page_of(program, method_parts(program, list(program.methods), {}))
    size = len(text.encode())
    if size > _MOST_IN_NOTEBOOK:
        to_file = 'pathlib.Path("report.html").write_text(program.report_html(), encoding="utf-8")'
        why = f"{size_text(size)} are too much for a notebook. {to_file} writes a file"
        return summary_html(title, [*rows, ("page", why)])
    line = f"{title} on {program.device.name}"
    return framed(text, line, summary_html(title, rows))


def _summary(program: Program) -> list[tuple[str, str]]:
    """A program's methods, device and memory."""
    report, memory = program.report(), program.memory
    rows = [("device", str(report["device"]))]
    for name, method in program.methods.items():
        inputs, outputs = (", ".join(map(str, names)) for names in (method.inputs, method.outputs))
        rows.append((f"method {name}", f"({inputs}) -> ({outputs})"))
    return [
        *rows,
        ("dispatches", str(report["dispatches"])),
        ("segments on the GPU", str(report["segments"])),
        ("nodes on the CPU", str(report["cpu_nodes"])),
        ("weights", size_text(memory.weights)),
        ("temporary", size_text(memory.planned)),
    ]

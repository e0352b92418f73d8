"""`purevk tune`: measures the kernels that a model could run, and keeps the fastest."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

from purevk.cli.command import pick_method
from purevk.cli.inputs import as_array, as_elements, make_inputs
from purevk.cli.machine import device_data, device_line, open_context
from purevk.cli.output import Output, count, duration
from purevk.dtypes import DType
from purevk.errors import PurevkError
from purevk.generators import manual_seed
from purevk.graph.context import Context
from purevk.graph.limits import warm_up
from purevk.graph.tuned import keep_answers
from purevk.progress import Steps
from purevk.report.timings import time_dispatches
from purevk.report.words import kernel_line, problem_line
from purevk.tuning import Choices, question

_Kernel = TypeVar("_Kernel")
_GAIN = 0.95  # a kernel that takes more than this part of the default's time is not worth it
_SETTLE = 0.1  # seconds of work on a GPU before what counts
_WARM_UP = 0.5  # of other work before that: its clocks have fallen while kernels were made
_LIMITS = {False: 1e-3, True: 5e-2}
"""How far results may be off, relative to the largest element: in float32, and with halves."""


class Trial(Choices):
    """Takes the candidate of a number for each problem, or the default where there are fewer, and
    notes who asked.

    Attributes:
        asked: the candidates of each question, the default first.
        by_node: the questions of each node.
    """

    def __init__(self, number: int, most: int) -> None:
        super().__init__()
        self.asked: dict[str, list[str]] = {}
        self.by_node: dict[object, set[str]] = {}
        self._number, self._most, self._node = number, most, None

    def take(self, kind: str, problem: object, candidates: Iterable[_Kernel]) -> _Kernel:
        name = question(kind, problem)
        choices = list(dict.fromkeys(candidates))[: self._most]
        self.asked[name] = [str(choice) for choice in choices]
        self.by_node.setdefault(self._node, set()).add(name)
        return choices[self._number if self._number < len(choices) else 0]

    def begin(self, node: Any) -> None:
        self._node = node


@dataclasses.dataclass
class Round:
    """A call with some choices: its outputs, and the seconds of the dispatches of each node in all."""

    outputs: list[Any]
    seconds: list[tuple[Any, float]]
    halves: bool

    @property
    def total(self) -> float:
        return sum(seconds for _, seconds in self.seconds)


def collect(args: argparse.Namespace) -> dict[str, Any]:
    with open_context(args) as context, Steps() as steps:
        if context.device.kind != "cpu":
            steps("warming up")
            warm_up(context, 2.0)
        asked, times, skipped, failed = _measure(context, args, steps)
        rows, chosen = [], {}
        for name, candidates in asked.items():
            least = {text: min(seconds) for text, seconds in times[name].items()}
            default = candidates[0]
            best = min(least, key=least.__getitem__)
            if least[best] > _GAIN * least[default]:
                best = default
            chosen[name] = None if best == default else best
            rows.append(
                {
                    "problem": name,
                    "candidates": len(candidates),
                    "default": default,
                    "default_seconds": least[default],
                    "best": best,
                    "best_seconds": least[best],
                }
            )
        data: dict[str, Any] = {
            "device": device_data(context.device),
            "problems": rows,
            "not_measured": skipped,
            "failed": failed,
            "kept": 0,
            "why": "",
            "persistent": False,
            "cache": str(context.cache.folder or ""),
        }
        data |= _judge(context, args, {k: v for k, v in chosen.items() if v is not None}, steps)
        if not data["why"]:
            keep_answers(context.kernels, chosen)
            data["kept"] = sum(answer is not None for answer in chosen.values())
        data["persistent"] = context.cache.persistent
    return data


def _measure(
    context: Context, args: argparse.Namespace, steps: Steps
) -> tuple[dict[str, list[str]], dict[str, dict[str, list[float]]], list[str], list[str]]:
    """Runs the model with the first candidate of each problem, with the second ones, and so on, and
    with the first ones again, which no candidate must beat only because the device was busy.

    Returns:
        The candidates of each problem; the seconds of each candidate; the problems without times:
        their nodes ask several questions, or do not run in a call; and the errors of rounds, whose
        candidates have no times.
    """
    times: dict[str, dict[str, list[float]]] = {}
    failed: list[str] = []

    def measure(number: int) -> dict[str, list[str]]:
        trial = Trial(number, args.candidates)
        try:
            run_ = _run(context, trial, args, steps)
        except PurevkError as error:
            if not number or context.lost:
                raise
            failed.append(f"{type(error).__name__}: {error.what}")
            return {}
        totals: dict[str, float] = {}
        for node, seconds in run_.seconds:
            names = trial.by_node.get(node, set())
            if len(names) == 1:
                (name,) = names
                totals[name] = totals.get(name, 0.0) + seconds
        for name, seconds in totals.items():
            choices = (asked or trial.asked).get(name)
            if choices:
                choice = choices[number if number < len(choices) else 0]
                times.setdefault(name, {}).setdefault(choice, []).append(seconds)
        return trial.asked

    asked: dict[str, list[str]] = {}
    steps("the default kernels")
    asked = measure(0)
    most = max((len(choices) for choices in asked.values()), default=1)
    for number in (*range(1, most), 0) if most > 1 else ():
        steps(f"candidate {number + 1} of {most}" if number else "the default kernels again")
        measure(number)
    timed = {name: choices for name, choices in asked.items() if choices[0] in times.get(name, ())}
    return timed, times, [name for name in asked if name not in timed], failed


def _run(context: Context, choices: Choices, args: argparse.Namespace, steps: Steps) -> Round:
    """Loads the model with some choices, and times a call."""
    import purevk

    before = context.traits
    context.traits = dataclasses.replace(before, choices=choices)
    try:
        with purevk.load(args.model, args.data, context=context, progress=steps.phase) as program:
            name = pick_method(program.methods, args.method, program.name)
            method = program.method(name)
            inputs = make_inputs(method.graph, args, f"{program.name}, method {name}")
            manual_seed(args.seed)
            results = method.run_flat(inputs)
            outputs = results if isinstance(results, tuple) else (results,)
            arrays = [as_elements(operand) for operand in inputs]
            settle = 0.0
            if context.device.kind != "cpu":
                warm_up(context, _WARM_UP)
                settle = _SETTLE
            timings = time_dispatches(method.executable, arrays, args.runs, settle, steps.phase)
            seconds = [(timing.node, timing.total) for timing in timings if timing.node is not None]
            types = [value.type.dtype for node, _ in seconds for value in node.results]
            halves = DType.float16 in types or DType.bfloat16 in types
            return Round([np.array(as_array(output)) for output in outputs], seconds, halves)
    finally:
        context.traits = before


def _judge(
    context: Context, args: argparse.Namespace, answers: dict[str, str], steps: Steps
) -> dict[str, Any]:
    """Runs the default and the chosen kernels in turns. "why" says why these are not kept."""

    def run(choices: Choices, kernels: str) -> Round:
        steps(f"comparing: {kernels} kernels")
        return _run(context, choices, args, steps)

    default = run(Choices(), "the default")
    before = after = default.total
    if not answers:
        return {"before_seconds": before, "after_seconds": after}
    tuned = run(Choices(lambda: answers), "the fastest")
    before = min(before, run(Choices(), "the default").total)
    after = min(tuned.total, run(Choices(lambda: answers), "the fastest").total)
    why = ""
    for number, (got, expected) in enumerate(zip(tuned.outputs, default.outputs, strict=True)):
        error = _error(got, expected)
        if not error <= _LIMITS[tuned.halves or default.halves]:
            why = f"result {number} differs by {error:.1e} of its largest element"
    if not why and after > before:
        why = "the model is not faster as a whole"
    return {"before_seconds": before, "after_seconds": after, "why": why}


def _error(got: Any, expected: Any) -> float:
    """The largest difference, relative to the largest finite element."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    first, two = got.astype(wide), expected.astype(wide)
    with np.errstate(all="ignore"):
        same = (first == two) | (np.isnan(first) & np.isnan(two))
        distance = np.where(same, 0.0, np.abs(first - two))
    if not distance.any():
        return 0.0
    finite = np.abs(two[np.isfinite(two)])
    scale = float(finite.max()) if finite.size else 0.0
    return float(distance.max()) / scale if scale else float("inf")


def show(data: dict[str, Any], out: Output) -> None:
    out.pairs([("device", device_line(data["device"]))], indent=0)
    out.line()
    out.table(
        ["problem", ("kernels", "r"), ("default", "r"), ("best", "r"), "best kernel"],
        [
            [
                problem_line(row["problem"]),
                row["candidates"],
                duration(row["default_seconds"]),
                duration(row["best_seconds"]),
                kernel_line(row["best"]) if row["best"] != row["default"] else "the default",
            ]
            for row in data["problems"]
        ],
    )
    out.line()
    if data["not_measured"]:
        out.line(f"{count(len(data['not_measured']), 'problem')} not measured alone", "dim")
    for error in data["failed"]:
        out.line(f"some candidates failed: {error}", "yellow")
    out.line(
        f"all dispatches: {duration(data['before_seconds'])} with the default kernels, "
        f"{duration(data['after_seconds'])} with the best"
    )
    if data["why"]:
        out.line(f"nothing is kept: {data['why']}", "yellow")
    elif not data["persistent"]:
        out.line("nothing was kept on disk", "yellow")
    else:
        out.line(f"{count(data['kept'], 'kernel')} kept in the cache {data['cache']}", "dim")

"""Timings as an ETDump, which executorch's Inspector reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from purevk import pte
from purevk.errors import FileFormatError, InputError, UnsupportedProgramError
from purevk.pte import types as P
from purevk.report.lowered import label_operator, label_source
from purevk.report.timings import Timing

_SOURCE = re.compile(r"(delegate (\d+)|[^#]+)#(\d+) ")


class Place(NamedTuple):
    """Where a node stands in a .pte file: the instruction of the method, and, in a delegate, the node
    of its graph."""

    instruction: int
    node: int | None


def places_of(source: str, calls: dict[int, int]) -> list[Place]:
    """The places of a node, in order; several if it stands for several.

    Args:
        source: of the node, such as "delegate 0#3 aten.add.Tensor + delegate 0#4 aten.mul.Tensor".
        calls: the instruction that calls each delegate, by its number.
    """
    found = []
    for text in re.split(r" [+|] ", source):
        match = _SOURCE.match(text + " ")
        if match is None:
            continue
        delegate, number = match[2], int(match[3])
        if delegate is None:
            found.append(Place(number, None))
        elif int(delegate) in calls:
            found.append(Place(calls[int(delegate)], number))
    return found


def delegate_calls(path: str | Path, data: Sequence[str | Path], method: str) -> dict[int, int]:
    """The instruction of a method that calls each delegate, by the number of the delegate.

    Raises:
        InputError: the file is no .pte file.
    """
    try:
        with pte.read_program(path, data) as program:
            plan = program.method(method)
            return {
                each.delegate_index: at
                for at, each in enumerate(plan.chains[0].instructions)
                if isinstance(each, P.DelegateCall)
            }
    except FileFormatError as error:
        raise InputError(
            "instructions and delegates are those of a .pte file",
            where=str(path),
            why=error.what,
            next="export the model with executorch, or use --trace",
        ) from error


def etdump(
    timings: Sequence[Timing], calls: dict[int, int], method: str, call_seconds: float
) -> bytes:
    """An ETDump with one run. The time of a kernel that computes several nodes is with the first of
    them. Kernels that no node of the file asks for, such as copies, have no instruction.

    Raises:
        UnsupportedProgramError: executorch is not installed.
    """
    try:
        from executorch.devtools.etdump import schema_flatcc as schema
        from executorch.devtools.etdump.serialize import serialize_to_etdump_flatcc
    except ImportError as error:
        raise UnsupportedProgramError(
            "an ETDump is written by executorch, which cannot be imported",
            why=str(error),
            next="pip install executorch, or write a trace with --trace",
        ) from error

    def event(name: str, place: Place | None, start: float, seconds: float) -> Any:
        nothing = place is None
        return schema.Event(
            profile_event=schema.ProfileEvent(
                name=name,
                chain_index=-1 if nothing else 0,
                instruction_id=-1 if place is None else place.instruction,
                delegate_debug_id_int=-1 if place is None or place.node is None else place.node,
                delegate_debug_id_str="",
                delegate_debug_metadata=None,
                start_time=round(1e9 * start),
                end_time=round(1e9 * (start + seconds)),
            ),
            allocation_event=None,
            debug_event=None,
        )

    events = [event("Method::execute", None, 0.0, call_seconds)]
    start, at = 0.0, 0
    while at < len(timings):  # a node may have several dispatches, one after the other
        label, seconds = timings[at].label, 0.0
        while at < len(timings) and timings[at].label == label:
            seconds += timings[at].total
            at += 1
        places = places_of(label_source(label), calls)
        name = label_operator(label)
        events.append(event(name, places[0] if places else None, start, seconds))
        start += seconds
    run = schema.RunData(name=method, bundled_input_index=-1, allocators=[], events=events)
    made: bytes = serialize_to_etdump_flatcc(schema.ETDumpFlatCC(version=0, run_data=[run]))
    return len(made).to_bytes(4, "little") + made  # the Inspector reads buffers with their size

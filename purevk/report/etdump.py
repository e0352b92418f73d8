"""Timings as an ETDump, which executorch's Inspector reads, and names from its ETRecord."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from purevk import pte
from purevk.errors import FileFormatError, InputError, UnsupportedProgramError
from purevk.frontends.torch.nodes import line_of
from purevk.pte import program as P
from purevk.report.lowered import label_operator, label_source
from purevk.report.timings import Timing

_MOST = 4  # lines of a delegate that are listed
_SOURCE = re.compile(r"(delegate (\d+)|[^#]+)#(\d+) ")


class Place(NamedTuple):
    """Where a node stands in a .pte file: the instruction of the method, and, in a delegate, the node
    of its graph."""

    instruction: int
    node: int | None


class Origin(NamedTuple):
    """What an ETRecord knows of a node: the path of its module, and the line in the user's code."""

    path: str
    line: str


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


def read_etrecord(path: Path, method: str) -> dict[int, list[Origin]]:
    """What an ETRecord, which executorch writes beside a .pte file, knows of each instruction.

    Of a delegate it is that of all its nodes. VulkanPartitioner numbers them anew, so that the debug
    handles of the single nodes are those of others.

    Raises:
        UnsupportedProgramError: executorch is not installed.
        FileFormatError: the file is no ETRecord.
    """
    try:
        from executorch.devtools import parse_etrecord
    except ImportError as error:
        raise UnsupportedProgramError(
            "an ETRecord is read by executorch, which cannot be imported",
            why=str(error),
            next="pip install executorch",
        ) from error
    try:
        record = parse_etrecord(str(path))
    except OSError:
        raise
    except Exception as error:
        raise FileFormatError(
            "this is no ETRecord",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            next="write it with generate_etrecord, or to_edge_transform_and_lower(..., generate_etrecord=True)",
        ) from error
    programs = record.edge_dialect_program
    program = programs.get(method) if isinstance(programs, dict) else programs
    origins: dict[int, list[Origin]] = {}
    for node in () if program is None else program.graph.nodes:
        for handle in _handles(node.meta.get("debug_handle")):
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            module = stack[-1][0] if stack else ""
            origin = Origin(module, line_of(node.meta.get("stack_trace") or ""))
            if origin not in origins.setdefault(handle, []):
                origins[handle].append(origin)
    found: dict[int, list[Origin]] = {}
    for at, handles in ((record._debug_handle_map or {}).get(method) or {}).items():
        mine = found.setdefault(int(at), [])
        for handle in _handles(handles):
            mine += [each for each in origins.get(handle, ()) if each not in mine]
    return found


def lines_of(source: str, calls: dict[int, int], known: dict[int, list[Origin]]) -> str:
    """The modules and lines of a node, or of the delegate that it is in, as text: "layers.0.fc,
    model.py:12, in forward"."""
    found = [
        ", ".join(filter(None, origin))
        for place in places_of(source, calls)
        for origin in known.get(place.instruction, ())
    ]
    unique = list(dict.fromkeys(found))
    more = f"; {len(unique) - _MOST} more" if len(unique) > _MOST else ""
    return "; ".join(unique[:_MOST]) + more


def _handles(value: Any) -> Iterator[int]:
    """The debug handles of a node: one, several, or none."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _handles(each)
    elif isinstance(value, int) and value:
        yield value

"""Saved programs that a test writes by hand, and what loading does with them before it needs a device."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from purevk.frontends import saved
from purevk.frontends.files import FileSource, open_file
from purevk.graph.context import typical_traits
from purevk.passes.pipeline import optimize
from purevk.schedule.planning import make_plan


def file_of(content: Mapping[str, Any], tensors: bytes = b"") -> bytes:
    """A .pvk file with a description and right checksums."""
    text = json.dumps(content).encode()
    start = saved.ALIGNMENT + len(tensors)
    head = saved._HEADER.pack(
        saved.MAGIC, saved.VERSION, 0, start + len(text), start, len(text), zlib.crc32(text)
    )
    head += saved._CHECK.pack(zlib.crc32(head))
    return head.ljust(saved.ALIGNMENT, b"\0") + tensors + text


def method_of(
    values: list[Any], nodes: list[Any], outputs: list[int], **changes: Any
) -> dict[str, Any]:
    """A method whose input is value 0."""
    graph = {
        "name": "forward",
        "inputs": [{"value": 0}],
        "constants": [],
        "states": [],
        "nodes": [
            [op, args, [{"value": n} for n in made], "line 1", ""] for op, args, made in nodes
        ],
        "outputs": [{"value": n} for n in outputs],
        "sources": [],
        "signature": None,
    }
    graph.update(changes)
    return {"symbols": [], "values": values, "graph": graph, "guards": [], "kept_guards": []}


def program_of(*args: Any, **changes: Any) -> bytes:
    methods = {"forward": method_of(*args, **changes)}
    return file_of({"producer": "test", "name": "test", "tensors": [], "methods": methods})


def lower(data: bytes) -> None:
    """What loading does before it needs a device."""
    with open_file(data) as file:
        for method in file.methods:
            graph = file.graph(method)
            with FileSource(file, method).reading():
                make_plan(optimize(graph, typical_traits()), typical_traits())

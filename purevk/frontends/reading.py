"""The boundary around everything that a file decides: whatever a damaged or hostile file makes the
code behind raise comes out as `FileFormatError`, with the operator and its place in the file."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np

from purevk import knobs
from purevk.errors import (
    FileFormatError,
    GraphError,
    KernelInterfaceError,
    PurevkError,
    ShapeError,
)
from purevk.ir import Graph, Node, Value

# What wrong data raises where code counts on a graph that keeps the rules.
_UNEXPECTED = (
    AssertionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
# Errors that a valid file never causes.
_OF_GRAPHS = (GraphError, KernelInterfaceError, ShapeError)
MOST_DIMS = 64  # of a tensor
NEXT = "the file is damaged, or purevk and its exporter disagree: copy or export it again"


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Within, errors that follow from the content of a file become `FileFormatError`. All other
    errors of purevk stay what they are. numpy warns of no number of the file.

    Args:
        where: the file, or the file and the method.
    """
    try:
        with np.errstate(all="ignore"):
            yield
    except _OF_GRAPHS as error:
        node = _node_of(error.__traceback__)
        raise FileFormatError(
            error.what, where=place_of(where, node) or error.where, why=error.why, next=NEXT
        ) from error
    except PurevkError:
        raise
    except _UNEXPECTED as error:
        node = _node_of(error.__traceback__)
        subject = "the file" if node is None else node.op
        raise FileFormatError(
            f"{subject} cannot be read",
            where=place_of(where, node),
            why=f"{type(error).__name__}: {str(error)[:200]}",
            next="free some memory" if isinstance(error, MemoryError) else NEXT,
        ) from error


def _node_of(trace: TracebackType | None) -> Node | None:
    """The node that the code worked on which raised an error: the one in the innermost frame that has
    one."""
    producer: Node | None = None
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            if isinstance(value, Node):
                producer = value
        trace = trace.tb_next
    return producer


def place_of(where: str, node: Node | None) -> str:
    """The place of a node in a file, for messages."""
    return where if node is None else f"{where}, {node.source} ({node.op})"


def check_nodes(count: int, where: str) -> None:
    """Compares the nodes of a graph that is being read with the limit that the knobs set."""
    _within(count, "nodes", knobs.LIMITS().nodes, "nodes", where)


def check_limits(graph: Graph, where: str) -> None:
    """Compares a graph with the limits that the knobs set for files.

    Raises:
        FileFormatError: it is larger.
    """
    nested = list(graph.nested())
    limits = knobs.LIMITS()
    check_nodes(sum(len(inner.nodes) for inner in nested), where)
    symbols = sum(len(inner.symbols) for inner in nested)
    _within(symbols, "symbols", limits.symbols, "symbols", where)
    for inner in nested:
        leaves = [value for value in inner.inputs if isinstance(value, Value)]
        for value in (*leaves, *inner.constants, *inner.states):
            _within_dims(value, where)
            nbytes = value.type.nbytes
            _within(nbytes, "tensor_bytes", limits.tensor_bytes, f"bytes of {value!r}", where)
        for node in inner.nodes:
            for value in node.results:
                _within_dims(value, where, node)
                if (nbytes := value.type.nbytes) > limits.tensor_bytes:
                    place = place_of(where, node)
                    _within(nbytes, "tensor_bytes", limits.tensor_bytes, "bytes of a result", place)


def _within_dims(value: Value, where: str, node: Node | None = None) -> None:
    if value.type.rank > MOST_DIMS:
        raise FileFormatError(
            f"{value.name} has {value.type.rank} dims",
            where=place_of(where, node),
            why=f"{MOST_DIMS} are accepted, as by torch and numpy",
            next="export the model again",
        )


def check_depth(content: Any, where: str) -> None:
    """Compares how deep lists and mappings are nested with the limit that the knobs set for files."""
    level, depth, limit = [content], 0, knobs.LIMITS().depth
    while level:
        _within(depth, "depth", limit, "levels of nesting", where)
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (list, dict))
        ]
        depth += 1


def _within(count: int, name: str, limit: int, what: str, where: str) -> None:
    if count > limit:
        raise FileFormatError(
            f"the program has {count} {what}",
            where=where,
            why=f"{limit} are accepted",
            next=f"raise {name} in {knobs.LIMITS.name} if you trust the file: {name}={count}",
        )

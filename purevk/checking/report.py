"""Makes the error of a difference, and writes the tensors of it to a file."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from purevk import knobs
from purevk.cache import default_cache
from purevk.checking.differences import Difference
from purevk.checking.walk import Found
from purevk.errors import DifferenceError
from purevk.ir import Node, Value
from purevk.ir.printer import node_to_text
from purevk.whole_file import make_private, replace_file


def node_error(found: Found, where: str) -> DifferenceError:
    """The error of a node that differs. `where`: the program and method."""
    node, difference = found.node, found.difference
    arrays: dict[str, np.ndarray] = {}
    for number, value in enumerate(node.inputs):
        if value in found.arrays:
            arrays[f"input_{number}"] = found.arrays[value]
        elif value in found.graph.constants:
            arrays[f"input_{number}"] = found.graph.constants[value].array(value.type)
        elif value in found.states:
            data = np.frombuffer(found.states[value], value.type.dtype.numpy)
            arrays[f"input_{number}"] = data.reshape([int(size) for size in value.type.dims])
    arrays |= _named("expected", found.expected) | _named("got", found.got)
    name = f"{found.graph.name}.{found.number}.{node.op}"
    path = save(name, arrays, node_to_text(node))
    return DifferenceError(
        f"node {found.number} of {found.graph.name} differs from eager torch: {node.op}",
        where=", ".join(part for part in (where, node.source) if part),
        why=f"{describe(node, found.arrays)}; {difference.text}",
        next=f"{_saved(path)}; `purevk bisect` finds whether a device feature or a pass matters",
        node=found.number,
        operator=node.op,
        source=node.source,
        largest=difference.largest,
        index=difference.index,
        path=path,
    )


def program_error(
    difference: Difference,
    name: str,
    where: str,
    expected: Sequence[Any],
    got: Sequence[Any],
    inputs: Sequence[Any],
) -> DifferenceError:
    """The error of an optimized program that differs although each of its nodes is right."""
    arrays = _named("input", inputs) | _named("expected", expected) | _named("got", got)
    path = save(f"{name}.program", arrays, "")
    return DifferenceError(
        f"each node of {name} is right by itself, but the optimized program differs from them",
        where=where,
        why=f"{difference.text}; a pass, or a kernel that runs several nodes, is wrong",
        next=f"{_saved(path)}; run `purevk bisect` to find the pass, and skip it with"
        " PUREVK_SKIP_PASSES",
        largest=difference.largest,
        index=difference.index,
        path=path,
    )


def describe(node: Node, arrays: Mapping[Value, np.ndarray]) -> str:
    """The types of a node, with the sizes of the call where they are known."""

    def shown(value: Value) -> str:
        if value not in arrays:
            return str(value.type)
        return f"{value.type.dtype.name}[{','.join(map(str, arrays[value].shape))}]"

    results = ", ".join(map(shown, node.results)) or "nothing"
    return f"it makes {results} from {', '.join(map(shown, node.inputs)) or 'no tensors'}"


def save(name: str, arrays: Mapping[str, np.ndarray], text: str) -> str:
    """Writes arrays to an .npz file in the folder PUREVK_DUMP, or else `check` in that of the cache.

    Returns:
        The path; "" if it cannot be written.
    """
    named: dict[str, Any] = {**arrays, "node": np.array(text)}
    try:
        folder = knobs.DUMP()
        if not folder:
            cache = default_cache().folder
            folder = str((cache or Path(tempfile.gettempdir()) / "purevk") / "check")
        path = Path(folder) / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}.npz"
        make_private(path.parent)
        with replace_file(path) as stream:
            np.savez(stream, **named)
    except OSError:
        return ""
    return str(path)


def _named(stem: str, arrays: Sequence[Any]) -> dict[str, np.ndarray]:
    return {
        f"{stem}_{number}": np.asarray(array)
        for number, array in enumerate(arrays)
        if array is not None
    }


def _saved(path: str) -> str:
    return f"the tensors are in {path}" if path else "the tensors could not be written"

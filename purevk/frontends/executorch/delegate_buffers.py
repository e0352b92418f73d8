"""The record of the buffers that a delegate gives new contents, in .pte files of
`PurevkPartitioner`. ExecuTorch's format has no field for it, so it is a string that no operator of
the graph takes. Other runtimes ignore it."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.errors import FileFormatError
from purevk.pte import values as V
from purevk.pte import vkgraph as vk

_KEY = "purevk.buffers:"


def write(constants: Sequence[int | None]) -> str:
    """The record of the constants that the first outputs of a graph go to. None: an output that goes
    to a buffer which the graph does not read."""
    return _KEY + ",".join("" if constant is None else str(constant) for constant in constants)


def find(graph: vk.VkGraph) -> list[int | None] | None:
    """What `write` was given, if the graph has a record.

    Raises:
        FileFormatError: the record is damaged.
    """
    for value in reversed(graph.values):
        if isinstance(value, V.String) and value.value.startswith(_KEY):
            return [_constant(graph, key) for key in value.value.removeprefix(_KEY).split(",")]
    return None


def _constant(graph: vk.VkGraph, text: str) -> int | None:
    if not text:
        return None
    number = int(text) if text.isdecimal() and len(text) < 10 else len(graph.values)
    value = graph.values[number] if number < len(graph.values) else None
    if not isinstance(value, vk.VkTensor) or not value.is_constant:
        raise FileFormatError(
            f"the record of buffers names {text}, which is no constant",
            next="the file is damaged: copy or export it again",
        )
    return number

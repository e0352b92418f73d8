"""Which values of a .ptn graph share memory, and when each is read last."""

from __future__ import annotations

import bisect
from collections.abc import Collection

from purevk.pte.native import NativeGraph, argument_names

_MOST_NAMES = 3  # of a memory: a write hides up to two


class SharedMemory:
    """The names of each memory, those first that are read last.

    Args:
        graph: what is walked: its nodes are named by their numbers.
    """

    def __init__(self, graph: NativeGraph) -> None:
        self._last_read = {
            name: at
            for at, node in enumerate(graph.nodes)
            for argument in node.arguments
            for name in argument_names(argument.value)
        } | dict.fromkeys(graph.outputs, len(graph.nodes))
        self._owners: dict[str, str] = {}
        self._names: dict[str, list[tuple[int, str]]] = {}

    def add(self, name: str, alias_of: str = "") -> None:
        """A value that is there from now on, and the one whose memory it shares."""
        owner = self._owners[name] = self.owner(alias_of or name)
        names = self._names.setdefault(owner, [])
        bisect.insort(names, (-self._last_read.get(name, -1), name))
        del names[_MOST_NAMES:]

    def owner(self, name: str) -> str:
        """The first value with the memory of a value."""
        return self._owners.get(name, name)

    def read_after(self, name: str, at: int, hidden: Collection[str]) -> list[str]:
        """Names of the same memory that nodes after number `at`, or the method's caller, read, except
        up to two that are `hidden`. Of many, some."""
        names = self._names.get(self.owner(name), ())
        return sorted(alias for last, alias in names if -last > at and alias not in hidden)

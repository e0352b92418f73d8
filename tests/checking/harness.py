"""Defects for the debug modes to find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from purevk.ir import Graph, Node
from purevk.ops import registry
from purevk.tuning import DeviceTraits


@contextmanager
def redefined(name: str, form: Any) -> Iterator[None]:
    """An operator with another form."""
    good = registry.find(name)
    assert good is not None
    registry.unregister(name)
    registry.register(dataclasses.replace(good, form=form))
    try:
        yield
    finally:
        registry.unregister(name)
        registry.register(good)


Pass = Callable[[Graph, DeviceTraits], Graph]


def breaking(good: Pass, op: str, before: str) -> Pass:
    """A pass that also swaps the operands of an operator whose result another operator reads."""

    def broken(graph: Graph, traits: DeviceTraits) -> Graph:
        graph = good(graph, traits)
        users = graph.users()

        def swapped(node: Node) -> Node:
            readers = users.get(node.results[0], []) if node.results else []
            if node.op != op or not any(reader.op == before for reader in readers):
                return node
            left, right, *rest = node.args
            return dataclasses.replace(node, args=(right, left, *rest))

        return graph.with_nodes([swapped(node) for node in graph.nodes])

    broken.__name__ = good.__name__
    return broken

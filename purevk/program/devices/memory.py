"""How much memory devices have, and how much programs need for their weights."""

from __future__ import annotations

from typing import Any

from purevk.frontends.files import ModelFile
from purevk.graph.context import Context
from purevk.program.devices.cuts import read_leaves


def free_bytes(context: Context, local: bool = True) -> int:
    """The bytes that programs may still take of the memory that is local to a device, or of the
    memory of the host that it reads."""
    device = context.device
    return sum(
        max(budget - used, 0)
        for heap, (used, budget) in zip(device.physical.heaps, device.allocator.budget())
        if heap.device_local == local
    )


def weight_bytes(opened: ModelFile) -> int:
    """The bytes of the constants and states of all methods of a file; what methods share counts
    once."""
    leaves: dict[Any, int] = {}
    for method in opened.methods:
        graph = opened.graph(method)
        leaves.update(read_leaves(graph, graph.nodes))
    return sum(leaves.values())

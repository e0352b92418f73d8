"""How much memory devices have, and how much programs need for their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from purevk.graph.context import Context

if TYPE_CHECKING:
    from purevk.frontends.files import ModelFile


@dataclass(frozen=True)
class Heap:
    """A heap of memory: whether it is local to the device, and its bytes, all and those that programs
    may still take."""

    local: bool
    size: int
    free: int

    def __str__(self) -> str:
        kind = "device" if self.local else "host"
        return f"{self.free / 1e6:.1f} of {self.size / 1e6:.1f} MB free on the {kind}"


def heaps_of(context: Context) -> tuple[Heap, ...]:
    """The heaps of a device."""
    device = context.device
    return tuple(
        Heap(heap.device_local, heap.size, max(budget - used, 0))
        for heap, (used, budget) in zip(device.physical.heaps, device.allocator.budget())
    )


def free_bytes(context: Context, local: bool = True) -> int:
    """The bytes that programs may still take of the memory that is local to a device, or of the
    memory of the host that it reads."""
    return sum(heap.free for heap in heaps_of(context) if heap.local == local)


def weight_bytes(opened: ModelFile) -> int:
    """The bytes of the constants and states of all methods of a file; what methods share counts
    once."""
    from purevk.program.devices.cuts import read_leaves  # it imports all operators

    leaves: dict[Any, int] = {}
    for method in opened.methods:
        graph = opened.graph(method)
        leaves.update(read_leaves(graph, graph.nodes))
    return sum(leaves.values())

"""Where intermediate tensors lie: from sizes and lifetimes to offsets. A pure function; no device
is needed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 256  # bytes; no device asks more of a storage buffer


@dataclass(frozen=True)
class Block:
    """Bytes that must be kept from step `first` to step `last`, both included."""

    key: Hashable
    nbytes: int
    first: int
    last: int

    def overlaps(self, other: Block) -> bool:
        """Whether both are needed at some step."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class MemoryPlan:
    """Offsets of blocks in arenas.

    Attributes:
        offsets: (arena, offset in bytes) of each block.
        arenas: bytes of each arena.
        naive: bytes if each block had its own memory.
        lower_bound: the most bytes that are needed at one step; no plan can do with less.
    """

    offsets: Mapping[Hashable, tuple[int, int]]
    arenas: tuple[int, ...]
    naive: int
    lower_bound: int

    @property
    def planned(self) -> int:
        """Bytes of all arenas."""
        return sum(self.arenas)


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-max(nbytes, 1) // alignment) * alignment


def plan(
    blocks: Sequence[Block], alignment: int = ALIGNMENT, max_arena: int | None = None
) -> MemoryPlan:
    """Assigns offsets so that no blocks overlap in both time and space.

    Greedy best fit: the largest block first, into the smallest gap between the blocks already
    placed that are needed at the same time ("greedy by size", Pisarchyk and Lee, "Efficient Memory
    Management for Deep Neural Net Inference", 2020).

    Args:
        blocks: what needs memory.
        alignment: offsets and sizes are multiples of it.
        max_arena: bytes of the largest arena, None for no limit. A block larger than it gets an
            arena of its own.
    """
    sizes = {block.key: _aligned(block.nbytes, alignment) for block in blocks}
    order = sorted(blocks, key=lambda block: (-sizes[block.key], block.first, str(block.key)))
    arenas: list[list[tuple[int, Block]]] = []
    offsets: dict[Hashable, tuple[int, int]] = {}
    for block in order:
        size = sizes[block.key]
        chosen: tuple[int, int] | None = None
        for number, placed in enumerate(arenas):
            offset = _best_gap(placed, block, size, sizes, max_arena)
            if offset is not None:
                chosen = (number, offset)
                break
        if chosen is None:
            arenas.append([])
            chosen = (len(arenas) - 1, 0)
        placed = arenas[chosen[0]]
        placed.append((chosen[1], block))
        placed.sort(key=lambda item: item[0])
        offsets[block.key] = chosen
    extents = tuple(max(offset + sizes[block.key] for offset, block in placed) for placed in arenas)
    return MemoryPlan(offsets, extents, sum(sizes.values()), _peak(blocks, sizes))


def _best_gap(
    placed: Sequence[tuple[int, Block]],
    block: Block,
    size: int,
    sizes: Mapping[Hashable, int],
    limit: int | None,
) -> int | None:
    best: tuple[int, int] | None = None  # (bytes left over, offset)
    end = 0
    for offset, other in placed:
        if not block.overlaps(other):
            continue
        gap = offset - end
        if gap >= size and (best is None or gap - size < best[0]):
            best = (gap - size, end)
        end = max(end, offset + sizes[other.key])
    if best is not None:
        return best[1]
    return end if limit is None or end + size <= limit else None


def _peak(blocks: Sequence[Block], sizes: Mapping[Hashable, int]) -> int:
    changes: dict[int, int] = {}
    for block in blocks:
        changes[block.first] = changes.get(block.first, 0) + sizes[block.key]
        changes[block.last + 1] = changes.get(block.last + 1, 0) - sizes[block.key]
    now = peak = 0
    for step in sorted(changes):
        now += changes[step]
        peak = max(peak, now)
    return peak

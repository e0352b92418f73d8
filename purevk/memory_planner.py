"""Where intermediate tensors lie: from sizes and lifetimes to offsets. A pure function; no device
is needed."""

from __future__ import annotations

import bisect
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


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """The bytes that a tensor takes: at least one unit of the alignment."""
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
    sizes = {block.key: aligned(block.nbytes, alignment) for block in blocks}
    order = sorted(blocks, key=lambda block: (-sizes[block.key], block.first, str(block.key)))
    steps = max((block.last for block in blocks), default=0) + 1
    arenas: list[_Arena] = []
    offsets: dict[Hashable, tuple[int, int]] = {}
    for block in order:
        size = sizes[block.key]
        chosen: tuple[int, int] | None = None
        for number, arena in enumerate(arenas):
            offset = _best_gap(arena.needed_with(block), size, max_arena)
            if offset is not None:
                chosen = (number, offset)
                break
        if chosen is None:
            arenas.append(_Arena(steps))
            chosen = (len(arenas) - 1, 0)
        arenas[chosen[0]].place(block, chosen[1], chosen[1] + size)
        offsets[block.key] = chosen
    extents = tuple(arena.nbytes for arena in arenas)
    return MemoryPlan(offsets, extents, sum(sizes.values()), _peak(blocks, sizes))


class _Arena:
    """The bytes that placed blocks take, found by the steps at which they are needed.

    Attributes:
        nbytes: up to the end of the last block.
    """

    def __init__(self, steps: int) -> None:
        self.nbytes = 0
        self._leaves = 1 << (steps - 1).bit_length()
        # A segment tree: a block is kept at the few nodes that together span its steps.
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._by_start: list[tuple[int, int, int]] = []  # step, offset, end

    def place(self, block: Block, offset: int, end: int) -> None:
        self.nbytes = max(self.nbytes, end)
        bisect.insort(self._by_start, (block.first, offset, end))
        low, high = block.first + self._leaves, block.last + self._leaves + 1
        while low < high:
            if low & 1:
                self._spans.setdefault(low, []).append((offset, end))
                low += 1
            if high & 1:
                high -= 1
                self._spans.setdefault(high, []).append((offset, end))
            low >>= 1
            high >>= 1

    def needed_with(self, block: Block) -> list[tuple[int, int]]:
        """Offset and end of the blocks that are needed at a step of this one, by offset."""
        start = bisect.bisect_left(self._by_start, (block.first + 1,))
        found = [
            (offset, end)
            for _, offset, end in self._by_start[
                start : bisect.bisect_left(self._by_start, (block.last + 1,), start)
            ]
        ]
        node = block.first + self._leaves
        while node:
            found += self._spans.get(node, ())
            node >>= 1
        found.sort()
        return found


def _best_gap(taken: Sequence[tuple[int, int]], size: int, limit: int | None) -> int | None:
    best: tuple[int, int] | None = None  # (bytes left over, offset)
    end = 0
    for offset, other_end in taken:
        gap = offset - end
        if gap >= size and (best is None or gap - size < best[0]):
            best = (gap - size, end)
        end = max(end, other_end)
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

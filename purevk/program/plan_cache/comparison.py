"""Which bytes of files a plan depends on, and their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from purevk.mapped import pieces


def digest(files: Sequence[memoryview], skipped: Sequence[Sequence[tuple[int, int]]]) -> str:
    """The SHA-256 of the bytes of files without some ranges, which are sorted."""
    made = hashlib.sha256()
    for file, ranges in zip(files, skipped, strict=True):
        at = 0
        for first, size in ranges:
            for piece in pieces(file[at:first]):
                made.update(piece)
            at = max(at, first + size)
        for piece in pieces(file[at:]):
            made.update(piece)
        made.update(len(file).to_bytes(8, "little"))
    return made.hexdigest()


def without(
    ranges: Iterable[tuple[int, int]], read: Iterable[Sequence[int]]
) -> list[tuple[int, int]]:
    """The bytes of ranges, (first byte, bytes), that were not read: as such ranges, sorted and
    apart."""
    ends = [(first, 1, 0) for first, size in ranges if size]
    ends += [(first + size, -1, 0) for first, size in ranges if size]
    for first, size in read:
        ends += [(first, 0, 1), (first + size, 0, -1)]
    found: list[tuple[int, int]] = []
    inside = taken = start = 0
    for at, change, change_taken in sorted(ends):
        if inside and not taken and at > start:
            if found and sum(found[-1]) == start:
                found[-1] = (found[-1][0], at - found[-1][0])
            else:
                found.append((start, at - start))
        inside, taken, start = inside + change, taken + change_taken, at
    return found

"""Which bytes of files a plan depends on, and their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from purevk.mapped import pieces


def digest(files: Sequence[memoryview], skipped: Sequence[Sequence[tuple[int, int]]]) -> str:
    """The SHA-256 of the bytes of files without some ranges, which are sorted."""
    hasher = hashlib.sha256()
    for file, ranges in zip(files, skipped, strict=True):
        at = 0
        for first, size in ranges:
            for piece in pieces(file[at:first]):
                hasher.update(piece)
            at = max(at, first + size)
        for piece in pieces(file[at:]):
            hasher.update(piece)
        hasher.update(len(file).to_bytes(8, "little"))
    return hasher.hexdigest()


def without(
    ranges: Iterable[tuple[int, int]], read: Iterable[Sequence[int]]
) -> list[tuple[int, int]]:
    """The bytes of ranges, (first byte, bytes), that were not read: as such ranges, sorted and
    apart."""
    ends = [(first, 1, 0) for first, size in ranges if size]
    ends += [(first + size, -1, 0) for first, size in ranges if size]
    for first, size in read:
        ends += [(first, 0, 1), (first + size, 0, -1)]
    skipped: list[tuple[int, int]] = []
    inside = end = start = 0
    for at, change, change_taken in sorted(ends):
        if inside and not end and at > start:
            if skipped and sum(skipped[-1]) == start:
                skipped[-1] = (skipped[-1][0], at - skipped[-1][0])
            else:
                skipped.append((start, at - start))
        inside, end, start = inside + change, end + change_taken, at
    return skipped

"""Invariants of the suballocator, under random sequences of calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purevk.api.memory import FreeList, align_up

SIZE = 4096
CALLS = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(1, 700),
        st.sampled_from([1, 3, 4, 16, 64, 256, 1000]),
        st.integers(0, 99),
    ),
    max_size=60,
)


def check(ranges: FreeList) -> None:
    pieces = [(offset, size, True) for offset, size in ranges.used.items()]
    pieces += [(offset, size, False) for offset, size in ranges.free_ranges]
    pieces.sort()
    end, was_free = 0, False
    for offset, size, used in pieces:
        assert size > 0
        assert offset == end, "pieces overlap or leave a hole"
        assert used or not was_free, "two free neighbours were not joined"
        end, was_free = offset + size, not used
    assert end == ranges.size


@settings(deadline=None, derandomize=True)
@given(CALLS)
def test_pieces_tile_the_block(calls: list[tuple[bool, int, int, int]]) -> None:
    ranges = FreeList(SIZE)
    live: list[int] = []
    for allocate, size, alignment, which in calls:
        if allocate or not live:
            offset = ranges.allocate(size, alignment)
            if offset is None:
                fits = [
                    start
                    for start, length in ranges.free_ranges
                    if align_up(start, alignment) + size <= start + length
                ]
                assert not fits, "refused although it fits"
            else:
                assert offset % alignment == 0
                assert ranges.used[offset] == size
                live.append(offset)
        else:
            ranges.free(live.pop(which % len(live)))
        check(ranges)
    for offset in live:
        ranges.free(offset)
    assert ranges.free_ranges == [(0, SIZE)]


def test_best_fit_takes_the_smallest_hole() -> None:
    ranges = FreeList(100)
    first, _, third, _ = (ranges.allocate(size) for size in (30, 5, 10, 5))
    ranges.free(first)
    ranges.free(third)
    assert ranges.allocate(9) == third


def test_freeing_twice_is_refused() -> None:
    ranges = FreeList(100)
    offset = ranges.allocate(10)
    ranges.free(offset)
    with pytest.raises(KeyError):
        ranges.free(offset)


@pytest.mark.parametrize(("size", "alignment"), [(0, 1), (-4, 1), (4, 0)])
def test_sizes_must_be_positive(size: int, alignment: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        FreeList(100).allocate(size, alignment)


@pytest.mark.parametrize(
    ("value", "alignment", "expected"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (5, 3, 6)]
)
def test_align_up(value: int, alignment: int, expected: int) -> None:
    assert align_up(value, alignment) == expected

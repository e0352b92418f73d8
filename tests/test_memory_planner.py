"""Invariants of the memory planner."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from purevk.memory_planner import ALIGNMENT, Block, plan


@st.composite
def block_lists(draw: st.DrawFn) -> list[Block]:
    count = draw(st.integers(0, 40))
    blocks = []
    for key in range(count):
        first = draw(st.integers(0, 30))
        blocks.append(
            Block(key, draw(st.integers(0, 5000)), first, first + draw(st.integers(0, 12)))
        )
    return blocks


def _size(block: Block, alignment: int) -> int:
    return -(-max(block.nbytes, 1) // alignment) * alignment


@settings(deadline=None)
@given(block_lists(), st.sampled_from([1, 16, 64, ALIGNMENT]), st.sampled_from([None, 4096, 20000]))
def test_blocks_needed_together_do_not_overlap(
    blocks: list[Block], alignment: int, max_arena: int | None
) -> None:
    made = plan(blocks, alignment, max_arena)
    assert set(made.offsets) == {block.key for block in blocks}
    for block in blocks:
        arena, offset = made.offsets[block.key]
        assert offset % alignment == 0
        assert 0 <= offset and offset + _size(block, alignment) <= made.arenas[arena]
        for other in blocks:
            if (
                other.key < block.key
                and block.overlaps(other)
                and made.offsets[other.key][0] == arena
            ):
                start = made.offsets[other.key][1]
                assert (
                    offset + _size(block, alignment) <= start
                    or start + _size(other, alignment) <= offset
                )


@settings(deadline=None)
@given(block_lists(), st.sampled_from([16, ALIGNMENT]))
def test_one_arena_is_between_the_lower_bound_and_the_naive_sum(
    blocks: list[Block], alignment: int
) -> None:
    made = plan(blocks, alignment)
    assert len(made.arenas) <= 1
    assert made.lower_bound <= made.planned <= made.naive
    assert made.naive == sum(_size(block, alignment) for block in blocks)
    steps = range(max((block.last for block in blocks), default=0) + 1)
    peak = max(
        (sum(_size(b, alignment) for b in blocks if b.first <= step <= b.last) for step in steps),
        default=0,
    )
    assert made.lower_bound == peak


@settings(deadline=None)
@given(block_lists())
def test_arenas_keep_their_limit_unless_one_block_is_larger(blocks: list[Block]) -> None:
    made = plan(blocks, 16, 2048)
    for number, size in enumerate(made.arenas):
        inside = [block for block in blocks if made.offsets[block.key][0] == number]
        assert (
            size <= 2048
            or len(inside) == 1
            or all(_size(b, 16) == size for b in inside)
            or any(_size(b, 16) > 2048 for b in inside)
        )


def test_a_chain_needs_two_buffers() -> None:
    chain = [Block(n, 1024, n, n + 1) for n in range(50)]
    made = plan(chain)
    assert made.planned == made.lower_bound == 2048
    assert made.naive == 50 * 1024


def test_disjoint_lifetimes_share() -> None:
    made = plan([Block("a", 1000, 0, 3), Block("b", 900, 4, 6), Block("c", 10, 7, 7)])
    assert made.planned == 1024 and {offset for _, offset in made.offsets.values()} == {0}


def test_nothing_to_plan() -> None:
    assert plan([]).planned == 0


def _offsets_by_search(blocks: list[Block], alignment: int) -> dict[object, int]:
    """The same rule for one arena, with a look at all placed blocks."""
    order = sorted(blocks, key=lambda b: (-_size(b, alignment), b.first, str(b.key)))
    placed: list[tuple[int, Block]] = []
    for block in order:
        gaps, end = [], 0
        for offset, other in sorted(placed, key=lambda item: item[0]):
            if block.overlaps(other):
                if offset - end >= _size(block, alignment):
                    gaps.append((offset - end, end))
                end = max(end, offset + _size(other, alignment))
        placed.append((min(gaps)[1] if gaps else end, block))
    return {block.key: offset for offset, block in placed}


@settings(deadline=None)
@given(block_lists(), st.sampled_from([16, ALIGNMENT]))
def test_the_smallest_gap_is_taken(blocks: list[Block], alignment: int) -> None:
    made = plan(blocks, alignment)
    offsets = {key: offset for key, (_, offset) in made.offsets.items()}
    assert offsets == _offsets_by_search(blocks, alignment)


def test_time_grows_with_the_blocks_that_are_needed_together() -> None:
    """A look at all blocks for each took 25 s for so many."""
    blocks = [Block(key, 512 << (key % 3), key, key + 1 + key % 7) for key in range(20_000)]
    start = time.process_time()
    made = plan(blocks)
    assert time.process_time() - start < 5
    assert made.planned < 40 << 10

"""Where barriers stand between dispatches, against a record of who read and wrote each byte. No
device."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from purevk.graph.compute_graph import ComputeGraph

BYTES = 24


def barriers(dispatches: list[Any], firsts: list[int]) -> list[bool]:
    graph: Any = ComputeGraph.__new__(ComputeGraph)
    graph.dispatches = tuple(dispatches)
    graph.cuts = [SimpleNamespace(first=first) for first in firsts]
    graph.memory = SimpleNamespace(range_of=lambda binding: binding.range)
    needed: list[bool] = graph._hazards()
    return needed


def random_dispatch(rng: random.Random) -> Any:
    """One to four bindings of ranges of two buffers, written or read."""
    bindings = []
    for _ in range(rng.randint(1, 4)):
        offset = rng.randrange(BYTES - 1)
        nbytes = rng.randint(1, min(6, BYTES - offset))
        buffer = SimpleNamespace(number=rng.randrange(2))
        range_of = SimpleNamespace(buffer=buffer, offset=offset, nbytes=nbytes)
        bindings.append(SimpleNamespace(range=range_of, write=rng.random() < 0.4))
    return SimpleNamespace(bindings=bindings)


def expected(dispatches: list[Any], firsts: list[int]) -> list[bool]:
    read: set[tuple[int, int]] = set()
    written: set[tuple[int, int]] = set()
    needed = []
    for number, dispatch in enumerate(dispatches):
        if number in firsts:  # the host waits between segments
            read, written = set(), set()
        touched = [
            (binding.write, {(span.buffer.number, span.offset + n) for n in range(span.nbytes)})
            for binding in dispatch.bindings
            for span in [binding.range]
        ]
        needed.append(any(touch & written or (write and touch & read) for write, touch in touched))
        if needed[-1]:
            read, written = set(), set()
        for write, touch in touched:
            (written if write else read).update(touch)
    return needed


def test_a_barrier_stands_where_bytes_are_touched_again() -> None:
    """After a write before a read or write of the same bytes, after a read before a write; between
    segments and between reads there is none."""
    rng = random.Random(5)
    for _ in range(300):
        dispatches = [random_dispatch(rng) for _ in range(rng.randint(1, 12))]
        firsts = [0, *sorted(rng.sample(range(len(dispatches)), rng.randint(0, 1)))]
        assert barriers(dispatches, firsts) == expected(dispatches, firsts)

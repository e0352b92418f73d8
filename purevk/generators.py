"""Where random operators get their seeds.

Each run of a graph with random operators draws a seed of 63 bits from a generator: one that the
model passes (`generator=`), or the default one. The default generator is that of torch if the
process has imported torch. Otherwise it is purevk's own, which gives the seeds that torch's would.
So `torch.manual_seed` holds for purevk, and eager torch and purevk advance one generator.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from purevk import knobs
from purevk.errors import InputError

DEFAULT = 0  # names the default generator
_lock = threading.Lock()
_passed: dict[int, Any] = {}  # generators that models pass, by the numbers that name them


class _Own:
    """The default generator of a process without torch: MT19937, seeded and read as torch does.

    Attributes:
        first: what it was seeded with.
        seeds: how many were drawn since.
        touched: whether torch's generator would begin elsewhere.
    """

    def __init__(self) -> None:
        seed = knobs.SEED()
        self.seed(int.from_bytes(os.urandom(8), "little") if seed is None else seed)
        self.touched = seed is not None

    def seed(self, seed: int) -> None:
        self.first, self.seeds, self.touched = seed % 2**64, 0, True
        self._bits = np.random.RandomState(seed % 2**32)

    def draw(self) -> int:
        self.seeds, self.touched = self.seeds + 1, True
        words = np.frombuffer(self._bits.bytes(8), np.uint32)
        return (int(words[0]) << 32 | int(words[1])) & (2**63 - 1)

    def state(self) -> Any:
        return self.first, self.seeds, self.touched, self._bits.get_state()

    def restore(self, state: Any) -> None:
        self.first, self.seeds, self.touched, bits = state
        self._bits.set_state(bits)


_own: _Own | None = None


def _mine() -> _Own:
    global _own
    if _own is None:
        _own = _Own()
    return _own


def _torchs() -> Any:
    """torch's default generator, or None if nobody has imported torch.

    It goes on where purevk's own is, unless the caller has seeded it. torch seeds it at random, with
    64 bits, so that a seed of 32 bits is the caller's.
    """
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    own = _mine()
    if generator is not None and own.touched:
        if generator.initial_seed() >= 2**32:
            generator.manual_seed(own.first)
            for _ in range(own.seeds):
                _drawn(generator)
        own.touched = False
    return generator


def _drawn(generator: Any) -> int:
    torch: Any = sys.modules["torch"]
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


def manual_seed(seed: int) -> None:
    """Seeds the generator that random operators (dropout, rand, ...) draw from: the default one of
    torch if the process has imported torch, where this is `torch.manual_seed(seed)`. The results
    after it are the same with and without torch."""
    with _lock:
        if _torchs() is not None:
            sys.modules["torch"].manual_seed(seed)
        else:
            _mine().seed(int(seed))


def number_of(generator: Any) -> int:
    """The number that names a `torch.Generator` in a graph. It is random: a graph that is saved and
    loaded elsewhere does not name another generator by accident."""
    with _lock:
        for number, passed in _passed.items():
            if passed is generator:
                return number
        number = int.from_bytes(os.urandom(8), "little") % 2**62 + 1
        _passed[number] = generator
        return number


def _find(number: int) -> Any:
    """A generator of torch, or None for purevk's own."""
    if number == DEFAULT:
        return _torchs()
    if number not in _passed:
        raise InputError(
            "a random operator has a generator that this process does not know",
            why="the module was compiled with generator=..., and a file keeps no generator",
            next="leave out generator=..., and seed with torch.manual_seed or purevk.manual_seed",
        )
    return _passed[number]


def draw(number: int) -> np.ndarray:
    """A seed from a generator, as two words of 32 bits, the lower one first."""
    with _lock:
        generator = _find(number)
        seed = _mine().draw() if generator is None else _drawn(generator)
    return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)


def states(numbers: Iterable[int]) -> list[Any]:
    """The states of generators, for `restore`."""
    generators = [(number, _find(number)) for number in numbers]
    return [
        (number, _mine().state() if generator is None else generator.get_state())
        for number, generator in generators
    ]


def restore(saved: Iterable[Any]) -> None:
    """Sets generators back to the states that `states` gave."""
    for number, state in saved:
        generator = _find(number)
        if generator is None:
            _mine().restore(state)
        else:
            generator.set_state(state)

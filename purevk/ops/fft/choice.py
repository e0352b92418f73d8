"""How the kernel of Fourier transforms goes through a row: its stages, and who works on it."""

from __future__ import annotations

import functools
from typing import NamedTuple

from purevk.tuning import DeviceTraits

_ODD = (3, 5, 7, 11, 13)
_VALUES = 16  # elements that an invocation keeps in registers
_FEW_VALUES = 4  # ... of a device whose driver compiles unrolled code slowly
_INVOCATIONS = 256  # of a workgroup, if its rows are short
_POOL = 20480  # bytes of shared memory, so that a multiprocessor holds several workgroups
_NEIGHBOURS = 64  # bytes that neighbouring invocations read or write together, at least


@functools.lru_cache(maxsize=4096)
def radices_of(length: int, most: int = _VALUES) -> tuple[int, ...] | None:
    """The radices of the stages of a transform; None if the length has other prime factors.

    Args:
        most: the largest power of 2 among them, 4 or 16.
    """
    twos, rest = 0, length
    while rest % 2 == 0:
        twos, rest = twos + 1, rest // 2
    odd: list[int] = []
    for prime in _ODD:
        while rest % prime == 0:
            odd.append(prime)
            rest //= prime
    if rest != 1:
        return None
    each = most.bit_length() - 1
    even = [most] * (twos // each) + [1 << twos % each] * (twos % each != 0)
    if most == 16 and len(even) > 1 and even[-1] in (2, 4):
        # 16 x 2 and 16 x 4 are 8 x 4 and 8 x 8: fewer registers, as many stages.
        even[-2:] = [8, even[-1] * 2]
    return (*even, *reversed(odd)) or (1,)


def _values_of(traits: DeviceTraits) -> int:
    return _VALUES if traits.profile.prefers_unrolled_code else _FEW_VALUES


def stages_of(traits: DeviceTraits, length: int) -> tuple[int, ...] | None:
    """The radices of the stages on a device; None if the length has other prime factors."""
    return radices_of(length, _values_of(traits))


class Work(NamedTuple):
    """A transform of rows that fit a workgroup.

    Attributes:
        radices: of the stages.
        threads: invocations per row.
        rows: rows of a workgroup.
        halves: real and imaginary parts go through shared memory one after the other.
    """

    radices: tuple[int, ...]
    threads: int
    rows: int
    halves: bool

    @property
    def length(self) -> int:
        return _product(self.radices)

    @property
    def counts(self) -> tuple[int, ...]:
        """For each stage, the butterflies of an invocation."""
        return tuple(-(-self.length // (radix * self.threads)) for radix in self.radices)

    @property
    def values(self) -> int:
        """The elements that an invocation keeps."""
        return max(count * radix for count, radix in zip(self.counts, self.radices))

    def stages(self) -> str:
        """The text of the macro STAGES."""
        (first, *rest), (count, *counts) = self.radices, self.counts
        text, last, before, product = f"FFT_FIRST({first}, {count})", (first, count), 1, first
        for radix, each in zip(rest, counts):
            text += f" FFT_NEXT({radix}, {each}, {product}, {last[0]}, {last[1]}, {before})"
            last, before, product = (radix, each), product, product * radix
        return f"{text} FFT_LAST({last[0]}, {last[1]})"


def _product(numbers: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, numbers, 1)


@functools.lru_cache(maxsize=4096)
def _threads(length: int, radices: tuple[int, ...], values: int) -> int:
    """Invocations per row that leave few of them without a butterfly, each with at least about as
    many elements."""
    least = -(-length // values)

    def idle(threads: int) -> int:
        return sum(-(-length // (radix * threads)) * radix * threads for radix in radices)

    return min(range(least, 2 * least), key=lambda threads: (idle(threads), threads), default=1)


def _shared_bytes(length: int, rows: int, itemsize: int, halves: bool) -> int:
    padded = length + (length >> 4)
    return padded * rows * itemsize * (1 if halves else 2)


def choose(
    traits: DeviceTraits, length: int, itemsize: int, rows: int, columns: bool
) -> Work | None:
    """How a workgroup transforms rows; None if they are too long for it, or have no radices.

    Args:
        itemsize: bytes of a part of an element.
        rows: how many there are, at most.
        columns: neighbouring rows are neighbours in memory.
    """
    radices = stages_of(traits, length)
    if radices is None:
        return None
    values, most = _values_of(traits), min(traits.max_invocations, 1024)
    if length > values * most:
        return None
    threads = _threads(length, radices, values)
    limit = traits.max_shared_memory

    def fits(count: int, pool: int, halves: bool) -> bool:
        shared = 0 if len(radices) == 1 else _shared_bytes(length, count, itemsize, halves)
        return count * threads <= most and shared <= pool

    if not fits(1, limit, True):
        return None
    count, least = 1, _NEIGHBOURS // (2 * itemsize) if columns else 1
    while count < rows and fits(2 * count, min(limit, _POOL), False):
        if 2 * count * threads > _INVOCATIONS:
            break
        count *= 2
    while count < min(rows, least) and fits(2 * count, limit, True):
        count *= 2
    halves = not fits(count, limit if count == 1 else min(limit, 2 * _POOL), False)
    return Work(radices, threads, count, halves)


def split(traits: DeviceTraits, length: int, itemsize: int) -> tuple[int, int] | None:
    """The lengths of two passes for a row that is too long for a workgroup: the first of them fits
    one, and the second does if that is possible. None if no factor fits."""

    def fits(part: int) -> bool:
        return choose(traits, part, itemsize, 1 << 16, True) is not None

    factors = [
        divisor
        for divisor in _divisors(length)
        if divisor > 1 and divisor < length and fits(divisor)
    ]
    if not factors:
        return None
    both = [factor for factor in factors if fits(length // factor)]
    if both:
        first = min(both, key=lambda each: (abs(each - length // each), each))
        return first, length // first
    return max(factors), length // max(factors)


def _divisors(length: int) -> list[int]:
    found = [each for each in range(1, int(length**0.5) + 1) if length % each == 0]
    return sorted({*found, *(length // each for each in found)})

"""What sizes that no input brings are lowered for."""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Name = TypeVar("_Name")


@dataclass(frozen=True)
class Expected:
    """What a symbol that no input has as a size is lowered for: its upper bound, whether that is a
    guess, the value that open comparisons are answered for, and its lower bound, if that is a guess."""

    upper: int
    hint: int
    open: bool = False
    lower: int | None = None

    @staticmethod
    def below(upper: int, value: int, open: bool) -> Expected:
        """Guesses a lower bound, `value` at most, of a symbol with which sizes fall."""
        lower = upper - round_up(upper - value)
        return Expected(upper, (lower + upper) // 2, open, lower)


_expected: contextvars.ContextVar[Mapping[str, Expected]] = contextvars.ContextVar(
    "expected", default=types.MappingProxyType({})
)


# Sizes without a bound are planned for this at least, and for the next power of two, unless inputs
# would become much larger; 0: for the sizes of the example inputs.
ROUNDED = 64
FAR = 65  # as ROUNDED, however large inputs become: bounds that say little of the example
_FEW = 1 << 20  # bytes of an input that may be planned for whatever it has
_MUCH = 2  # times the bytes of an input
_rounded: contextvars.ContextVar[int] = contextvars.ContextVar("rounded", default=ROUNDED)


@contextlib.contextmanager
def rounding(least: int) -> Iterator[None]:
    """Inside, sizes without a bound are planned for `least`, as for ROUNDED."""
    token = _rounded.set(least)
    try:
        yield
    finally:
        _rounded.reset(token)


def planned_sizes(
    sizes: Mapping[_Name, int],
    nbytes: Callable[[Mapping[_Name, int]], Sequence[int]],
    most: int | None = None,
) -> Iterator[dict[_Name, int]]:
    """What memory can be planned for, for sizes without a bound that are `sizes` in the example, the
    largest first.

    Args:
        nbytes: the bytes of the inputs for such sizes.
        most: to what they are rounded at most, as for ROUNDED; None: as `rounding` says.
    """
    before = nbytes(sizes)
    most = _rounded.get() if most is None else most
    for least in (ROUNDED, 1):
        if least <= most:
            found = _apart(sizes, least)
            much = (now > max(_MUCH * b, _FEW) for b, now in zip(before, nbytes(found)))
            if most == FAR or not any(much):
                yield found
    yield dict(sizes)


def _apart(sizes: Mapping[_Name, int], least: int) -> dict[_Name, int]:
    """The sizes, rounded up. Those that differ in the example stay different, since by what memory is
    planned for is decided what is true of the sizes."""
    planned: dict[int, int] = {}
    for size in sorted(set(sizes.values())):
        power = found = round_up(size, least)
        while found in planned.values():
            found += max(power // 4, 1)
        planned[size] = found
    return {name: planned[size] for name, size in sizes.items()}


def round_up(number: int, least: int = ROUNDED) -> int:
    """The next power of two."""
    return max(least, 1 << max(number - 1, 0).bit_length())


@contextlib.contextmanager
def expecting(values: Mapping[str, Expected]) -> Iterator[None]:
    """Inside, the symbols of these names have these bounds and hints."""
    token = _expected.set({**_expected.get(), **values})
    try:
        yield
    finally:
        _expected.reset(token)


def expected(name: str) -> Expected | None:
    """What `expecting` says of a name."""
    return _expected.get().get(name)

"""What sizes that no input brings are lowered for."""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """What a symbol that no input has as a size is lowered for: its bound, whether that is a guess,
    and the value that open comparisons are answered for."""

    upper: int
    hint: int
    open: bool = False


_expected: contextvars.ContextVar[Mapping[str, Expected]] = contextvars.ContextVar(
    "expected", default=types.MappingProxyType({})
)


# Sizes without a bound are planned for this at least, and for the next power of two; 0: for the sizes of
# the example inputs.
ROUNDED = 64
_rounded: contextvars.ContextVar[int] = contextvars.ContextVar("rounded", default=ROUNDED)


@contextlib.contextmanager
def rounding(least: int) -> Iterator[None]:
    """Inside, sizes without a bound are planned for `least`, as for ROUNDED."""
    token = _rounded.set(least)
    try:
        yield
    finally:
        _rounded.reset(token)


def rounded(size: int) -> int:
    """What memory is planned for, for a size without a bound that is `size` in the example."""
    least = _rounded.get()
    return round_up(size, least) if least else size


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

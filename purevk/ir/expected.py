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

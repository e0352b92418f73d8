"""Values that a program and a Vulkan graph have in common: numbers, strings and lists of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_RANK = 64  # dims of a tensor; more is taken for damage (ExecuTorch itself stops at 16)


@dataclass(frozen=True, slots=True)
class Null:
    """None."""


class Int(NamedTuple):
    """An integer."""

    value: int


class Bool(NamedTuple):
    """True or False."""

    value: bool


class Double(NamedTuple):
    """A floating-point number."""

    value: float


class String(NamedTuple):
    """A string."""

    value: str


class IntList(NamedTuple):
    """Integers, in a Vulkan graph. A plan has `program.BoxedIntList` instead."""

    items: tuple[int, ...]


class DoubleList(NamedTuple):
    """Floating-point numbers."""

    items: tuple[float, ...]


class BoolList(NamedTuple):
    """Bools."""

    items: tuple[bool, ...]

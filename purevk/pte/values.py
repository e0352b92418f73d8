"""Values that a program and a Vulkan graph have in common: numbers, strings and lists of them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANK = 64  # dims of a tensor; more is taken for damage (ExecuTorch itself stops at 16)


@dataclass(frozen=True, slots=True)
class Null:
    """None."""


@dataclass(frozen=True, slots=True)
class Int:
    """An integer."""

    value: int


@dataclass(frozen=True, slots=True)
class Bool:
    """True or False."""

    value: bool


@dataclass(frozen=True, slots=True)
class Double:
    """A floating-point number."""

    value: float


@dataclass(frozen=True, slots=True)
class String:
    """A string."""

    value: str


@dataclass(frozen=True, slots=True)
class IntList:
    """Integers, in a Vulkan graph. A plan has `program.BoxedIntList` instead."""

    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DoubleList:
    """Floating-point numbers."""

    items: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BoolList:
    """Bools."""

    items: tuple[bool, ...]

"""Values that a program and a Vulkan graph have in common: numbers, strings and lists of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from purevk.pte.flatbuffer import Schema, Text, f64, flag, i64, numbers

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


NULL = Schema("Null", Null)
INT = Schema("Int", Int, int_val=i64())
BOOL = Schema("Bool", Bool, bool_val=flag())
DOUBLE = Schema("Double", Double, double_val=f64())
STRING = Schema("String", String, string_val=Text())
DOUBLE_LIST = Schema("DoubleList", DoubleList, items=numbers(f64()))
BOOL_LIST = Schema("BoolList", BoolList, items=numbers(flag()))

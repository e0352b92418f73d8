"""Relations of sizes that each call computes: truth values without guards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from purevk.ir.dims import Dim, Size, maximum, minimum, substitute
from purevk.ir.symbols import Symbol

_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


@dataclass(frozen=True, eq=False)
class Relation:
    """A comparison of sizes that each call makes: a truth value that is known only at a call."""

    left: Size
    op: str
    right: Size

    @property
    def settled(self) -> bool | Relation:
        """A bool where the bounds settle it, else itself. Notes no guard."""
        found = indicator(*self.sides)
        return found if isinstance(found, bool) else self

    @property
    def truth(self) -> Size:
        """1 if it holds, else 0."""
        found = indicator(*self.sides)
        return found if isinstance(found, Dim) else int(found)

    @property
    def sides(self) -> tuple[Size, str, Size]:
        return self.left, self.op, self.right

    def substituted(self, mapping: Mapping[Symbol, Size]) -> Relation:
        """The relation with symbols replaced; see `substitute`."""
        return Relation(substitute(self.left, mapping), self.op, substitute(self.right, mapping))

    def __invert__(self) -> Relation:
        return Relation(self.left, _OPPOSITE[self.op], self.right)

    def __bool__(self) -> bool:
        raise TypeError(f"{self.left} {self.op} {self.right} is known only at a call")


def indicator(left: Size, op: str, right: Size) -> bool | Size:
    """A comparison that no guard answers: a bool where the bounds settle it, else an expression
    that is 1 or 0 at a call."""
    if op in ("==", "!="):
        low, high = indicator(left, "<=", right), indicator(left, ">=", right)
        if low is False or high is False:
            same: bool | Size = False
        else:
            same = low if high is True else high if low is True else low * high
        return same if op == "==" else _invert(same)
    if op in ("<", "<="):
        left, right = right, left
    difference = left - right + (op in (">=", "<="))
    found = maximum(minimum(difference, 1), 0)
    return found if isinstance(found, Dim) else bool(found)


def _invert(answer: bool | Size) -> bool | Size:
    return 1 - answer if isinstance(answer, Dim) else not answer


def as_size(number: Any) -> Any:
    """A relation or a bool as 1 or 0; another number as it is."""
    if isinstance(number, Relation):
        return number.truth
    return int(number) if isinstance(number, bool) else number

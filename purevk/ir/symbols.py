"""Names for integers that a call brings."""

from __future__ import annotations

from dataclasses import dataclass

from purevk.plain_text import printable

UNBOUNDED = 2**31 - 1
_INT64 = 2**63 - 1


@dataclass(frozen=True)
class Bound:
    """A size that stays dynamic, with an upper bound of its own (None: there is none)."""

    upper: int | None


@dataclass(frozen=True)
class Symbol:
    """A name for an integer that a call brings, within [lower, upper].

    Attributes:
        is_size: False for values such as a position.
        unbacked: its value is known only during a call, such as how many elements of a mask are true.
        open: `upper` is a guess that a call may exceed; the method is then lowered again for more.
        open_below: `lower` is such a guess.
    """

    name: str
    upper: int = UNBOUNDED
    lower: int = 0
    is_size: bool = True
    unbacked: bool = False
    open: bool = False
    open_below: bool = False

    @property
    def hint(self) -> int:
        """The value that open comparisons are answered for."""
        return (self.lower + self.upper) // 2 if self.open_below else self.upper

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and largest value. A number without a bound may have 64 bits."""
        if self.is_size:
            return self.lower, self.upper
        lower = -_INT64 if self.lower == -UNBOUNDED else self.lower
        return lower, _INT64 if self.upper == UNBOUNDED else self.upper

    def __hash__(self) -> int:
        return hash(self.name)  # a call looks values up by symbols

    def __repr__(self) -> str:
        return printable(self.name)

"""Answers to comparisons that sizes at a call must repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from purevk.ir.dims import COMPARE, Size, decide, evaluate, notes, symbols
from purevk.ir.symbols import Symbol


@dataclass(frozen=True)
class Guard:
    """The answer given to a comparison that sizes at a call must repeat."""

    left: Size
    op: str
    right: Size
    answer: bool

    @property
    def symbols(self) -> set[Symbol]:
        """The symbols that the answer depends on."""
        return symbols(self.left) | symbols(self.right)

    def holds(self, env: Mapping[Symbol, int]) -> bool:
        return COMPARE[self.op](evaluate(self.left, env), evaluate(self.right, env)) == self.answer

    def explain(self, env: Mapping[Symbol, int]) -> str:
        """What sizes have to fulfil, and what they are, as text."""
        values = ", ".join(f"{symbol} = {env[symbol]}" for symbol in sorted(self.symbols, key=str))
        sides = f"{evaluate(self.left, env)} and {evaluate(self.right, env)}"
        return f"{self} is expected; in this call the sides are {sides}" + (
            f", with {values}" if values else ""
        )

    def __str__(self) -> str:
        return (
            f"{self.left} {self.op} {self.right}"
            if self.answer
            else f"not ({self.left} {self.op} {self.right})"
        )


class GuardLog:
    """Collects, while entered, the guards of every comparison answered from hints."""

    def __init__(self) -> None:
        self.guards: dict[Guard, None] = {}

    def note(self, left: Size, op: str, right: Size, answer: bool) -> None:
        self.guards[Guard(left, op, right, answer)] = None

    def __enter__(self) -> GuardLog:
        self._token = notes.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        notes.reset(self._token)


def decided_symbols() -> set[Symbol]:
    """The symbols of the guards that the innermost `GuardLog` has collected."""
    log = notes.get()
    if not isinstance(log, GuardLog):
        return set()
    return set().union(*(guard.symbols for guard in log.guards))


def note(guard: Guard) -> None:
    """Has the innermost `GuardLog` collect a guard."""
    log = notes.get()
    if log is not None:
        log.note(guard.left, guard.op, guard.right, guard.answer)


def ask(guard: Guard) -> bool:
    """Makes a guard's comparison again, so that it is noted, and says whether the answer is still
    the same."""
    return decide(guard.left, guard.op, guard.right) == guard.answer

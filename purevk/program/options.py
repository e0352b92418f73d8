"""Options that `purevk.load` and `purevk.compile` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict

from purevk.errors import InputError

Bounds = Literal["exported", "grow", "strict"]
Compile = Literal["allowed", "never"]
Round = Literal["fused", "eager"]


class Options(TypedDict, total=False):
    """Keywords of all overloads of both."""

    progress: Callable[[str, int, int], None] | None
    bounds: Bounds
    compile: Compile
    round: Round


def check_round(round: object, where: str) -> None:
    """Raises `InputError` if `round` is no `Round`."""
    if round not in ("fused", "eager"):
        raise InputError(
            f"round={round!r} is not known",
            where=where,
            why='"fused" or "eager" is accepted',
            next='leave round out for "fused"',
        )

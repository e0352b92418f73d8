"""Kernels that were measured on a device, in place of those that cost models choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

_Kernel = TypeVar("_Kernel")
Answers = Mapping[str, str]
Reasons = Callable[[], Iterable[tuple[object, str | float]]]
"""Gives candidates, each with a condition that does not hold, or with its cost."""


def question(kind: str, problem: object) -> str:
    """The name under which an answer is kept.

    Args:
        kind: of kernels.
        problem: what the cost model is asked; its `repr` has all that matters.
    """
    return f"{kind}: {problem!r}"


class Choices:
    """The fastest kernel for each problem that was measured.

    An answer is the text of a candidate. One that is no candidate, such as an answer of another
    version, counts as none: so a wrong one never makes a kernel that the cost model could not choose.

    Args:
        answers: gives them by question; called when the first kernel is chosen.
    """

    def __init__(self, answers: Callable[[], Answers] = dict) -> None:
        self._read = answers
        self._answers: Answers | None = None

    def take(self, kind: str, problem: object, candidates: Iterable[_Kernel]) -> _Kernel:
        """The kernel for a problem.

        Args:
            candidates: all kernels that are right, the one that the cost model chooses first. The
                others are read only if there is an answer.
        """
        others = iter(candidates)
        default = next(others)
        answer = self.answers.get(question(kind, problem)) if self.answers else None
        if answer is None:
            return default
        return next((other for other in others if str(other) == answer), default)

    @property
    def answers(self) -> Answers:
        """All answers, by question."""
        if self._answers is None:
            self._answers = self._read()
        return self._answers

    def begin(self, node: object) -> None:
        """Called before a node of a graph is lowered, with None after it."""

    def note(self, kind: str, problem: object, kernel: object, reasons: Reasons) -> None:
        """Called when a kernel was chosen for a problem, with the reasons against the others."""


@dataclass(frozen=True)
class Choice:
    """A kernel that was chosen.

    Attributes:
        kind, problem: as for `question`.
        others: the candidates that were not, each with the reason as `Reasons` has it.
        cost: by the cost model; 0: there is none.
    """

    kind: str
    problem: object
    kernel: object
    others: tuple[tuple[object, str | float], ...] = ()
    cost: float = 0.0


class RecordedChoices(Choices):
    """Chooses as `choices` does, and notes what was chosen for each node.

    Attributes:
        by_node: the choices of each node, by question.
    """

    def __init__(self, choices: Choices) -> None:
        super().__init__(lambda: choices.answers)
        self.by_node: dict[object, dict[str, Choice]] = {}
        self._node: object = None

    def take(self, kind: str, problem: object, candidates: Iterable[_Kernel]) -> _Kernel:
        kernel = super().take(kind, problem, candidates)
        self.note(kind, problem, kernel, tuple)
        return kernel

    def begin(self, node: object) -> None:
        self._node = node

    def note(self, kind: str, problem: object, kernel: object, reasons: Reasons) -> None:
        if self._node is None:
            return
        others = tuple(reasons())
        cost = next((why for other, why in others if other == kernel and why), 0.0)
        others = tuple(pair for pair in others if pair[0] != kernel)
        choice = Choice(kind, problem, kernel, others, float(cost))
        self.by_node.setdefault(self._node, {})[question(kind, problem)] = choice

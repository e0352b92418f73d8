"""The form in which kernels are chosen. A candidate says what it needs and what it costs: the cheapest
that fits is taken, or the one that `purevk tune` has measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

from purevk.tuning.traits import DeviceTraits

_Problem = TypeVar("_Problem")
Needs: TypeAlias = Iterator[tuple[bool, str | Callable[[], str]]]
"""Whether each condition holds, and what it asks for: a text, or a function that formats it."""


class Candidate(ABC, Generic[_Problem]):
    """A kernel for some problem, with its tile."""

    @abstractmethod
    def needs(self, traits: DeviceTraits, problem: _Problem) -> Needs:
        """The conditions of the template and the limits of the device: whether each holds, and what it
        asks for. A condition may rely on those before it."""

    def fits(self, traits: DeviceTraits, problem: _Problem) -> bool:
        """Whether all conditions hold."""
        return all(holds for holds, _ in self.needs(traits, problem))

    def cost(self, traits: DeviceTraits, problem: _Problem) -> float:
        """What it costs by a model, in microseconds if it can tell. Without a model all cost the same,
        and the first is taken."""
        return 0.0


_Kernel = TypeVar("_Kernel")
_Candidate = TypeVar("_Candidate", bound=Candidate[Any])


def by_cost(
    traits: DeviceTraits, problem: object, candidates: Iterable[_Candidate]
) -> list[_Candidate]:
    """The kernels that fit, the cheapest first."""
    fitting = (kernel for kernel in candidates if kernel.fits(traits, problem))
    return sorted(fitting, key=lambda kernel: kernel.cost(traits, problem))


def take(
    traits: DeviceTraits,
    kind: str,
    problem: _Problem,
    fitting: Iterable[_Kernel],
    candidates: Callable[[], Iterable[Candidate[_Problem]]],
) -> _Kernel:
    """The first of the kernels that fit, or the one that was measured to be the fastest.

    Args:
        kind, problem: as for `question`.
        fitting: at least one.
        candidates: all kernels, for those who ask why one was not taken.
    """
    kernel = traits.choices.take(kind, problem, fitting)
    traits.choices.note(kind, problem, kernel, lambda: reasons(traits, problem, candidates()))
    return kernel


def reasons(
    traits: DeviceTraits, problem: _Problem, candidates: Iterable[Candidate[_Problem]]
) -> Iterator[tuple[object, str | float]]:
    """Each candidate with the first condition that does not hold, or with its cost."""
    for kernel in candidates:
        unmet = next((why for holds, why in kernel.needs(traits, problem) if not holds), "")
        text = unmet if isinstance(unmet, str) else unmet()
        yield kernel, text or kernel.cost(traits, problem)

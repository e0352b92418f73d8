"""What a timed runtime has to offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

Run = Callable[[], "list[numpy.ndarray]"]


class Unavailable(Exception):
    """This machine or this model is not for this peer; the text says why."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to be timed.

    Attributes:
        run: one call on the model's first sample, from host memory to host memory unless `note`
            says otherwise; returns its outputs.
        device: what it runs on.
        note: what the reader of a table has to know, or "".
    """

    run: Run
    device: str
    note: str = ""


@dataclass(frozen=True)
class Peer:
    """One column of the table."""

    name: str

    def environment(self) -> dict[str, str]:
        """Return environment variables that its process needs before anything is imported."""
        return {}

    def load(self, model: str, variant: str, folder: Path) -> Loaded:
        """Prepare a model.

        Args:
            model: a key of `tests.models.zoo.CASES`.
            variant: "fp32" or "fp16".
            folder: where exports and converted models are kept.

        Raises:
            Unavailable: the peer cannot run here, or cannot run this model.
        """
        raise NotImplementedError

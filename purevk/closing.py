"""Objects that a `with` statement closes."""

from __future__ import annotations

from typing import TypeVar

_T = TypeVar("_T")


class Closing:
    """Its subclasses have a method `close`, which is called at the end of a `with` statement."""

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the use of the object."""
        raise NotImplementedError

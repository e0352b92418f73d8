"""The order of calls through stages."""

from __future__ import annotations

import threading


class Turns:
    """Lets calls into each stage in the order in which they took their tickets. A call may be in one
    stage while the next call is in the stage before.

    Args:
        stages: how many there are.
    """

    def __init__(self, stages: int) -> None:
        self._next = [0] * stages
        self._left: list[set[int]] = [set() for _ in range(stages)]
        self._tickets = 0
        self._changed = threading.Condition()

    def take(self) -> int:
        """A ticket for a new call. It has to `leave` every stage."""
        with self._changed:
            self._tickets += 1
            return self._tickets - 1

    def wait(self, stage: int, ticket: int) -> None:
        """Waits until all earlier calls have left a stage."""
        with self._changed:
            self._changed.wait_for(lambda: self._next[stage] == ticket)

    def leave(self, ticket: int, first: int, end: int | None = None) -> None:
        """Leaves the stages from `first` to before `end` (None: all further ones), also before the
        call's turn."""
        with self._changed:
            for stage in range(first, len(self._next) if end is None else end):
                self._left[stage].add(ticket)
                while self._next[stage] in self._left[stage]:
                    self._left[stage].remove(self._next[stage])
                    self._next[stage] += 1
            self._changed.notify_all()

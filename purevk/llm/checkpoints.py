"""Copies of the states of recurrent layers, from which a sequence goes on at an earlier token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from purevk.ir import TensorType, Value
from purevk.program.program import Program

MOST = 16
MOST_BYTES = 1 << 29
TAIL = 8  # tokens that a template puts before an answer, such as "<think>", and may leave out later


class Checkpoints:
    """Copies in memory of the host, by how many tokens the states had seen. All are of the sequence
    that is in the cache: attention has written over the rows of any other.

    Args:
        program: has the method "decode".
        is_cache: whether a state has a row for each position, and need not be copied; None: those
            of four dims have, see `Network`.

    Attributes:
        position: tokens that the states on the device have seen; None: a call was interrupted.
    """

    def __init__(
        self, program: Program, is_cache: Callable[[TensorType], bool] | None = None
    ) -> None:
        self.position: int | None = 0
        self._program = program
        self._is_cache = is_cache or (lambda state: state.rank == 4)
        self._copies: dict[int, list[tuple[Value, bytes]]] = {}

    def save(self) -> None:
        """Copies the states. The oldest copies are dropped if there are too many."""
        if not self.position or self.position in self._copies:
            return
        with self._program.held():
            states = [
                (value, max(value.type.nbytes, 4))
                for value, label in self._program.method("decode").graph.labels.items()
                if (label.key or label.name) not in ("logits", "token")
                and not self._is_cache(value.type)
            ]
            most = min(MOST, MOST_BYTES // max(sum(nbytes for _, nbytes in states), 1))
            while self._copies and len(self._copies) >= most:
                del self._copies[min(self._copies)]
            if most:
                with contextlib.suppress(MemoryError):  # then there is no copy
                    data = self._program.states.read_all(states)
                    copy = [(value, part) for (value, _), part in zip(states, data)]
                    self._copies[self.position] = copy

    def restore(self, position: int) -> int:
        """Has the states be those of the newest copy that has seen at most so many tokens, and returns
        how many. Later copies are dropped, as what they are of is written over. 0: there is none."""
        self._copies = {at: copy for at, copy in self._copies.items() if at <= position}
        if self.position == position:
            self.save()
            return position
        self.position = None
        newest = max(self._copies, default=0)
        if newest:
            with self._program.held():
                copy = self._copies[newest]
                self._program.states.upload([(value, memoryview(data)) for value, data in copy])
        self.position = newest
        return newest

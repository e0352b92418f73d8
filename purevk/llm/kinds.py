"""Tells thinking and tool calls from the text of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TEXT, THINKING, TOOL_CALL = "text", "thinking", "tool_call"


@dataclass(frozen=True)
class Marker:
    """What stands before and after a part of an answer; `end` "": the part has the rest of it."""

    start: str
    end: str
    kind: str


MARKERS = (
    Marker("<think>", "</think>", THINKING),
    Marker("<tool_call>", "</tool_call>", TOOL_CALL),
    Marker("[TOOL_CALLS]", "", TOOL_CALL),
)
"""Of Qwen, SmolLM3, DeepSeek and others; the last is Mistral's."""
MARKER_TEXTS = frozenset(text for each in MARKERS for text in (each.start, each.end) if text)


class KindSplitter:
    """Splits the text of an answer by its markers, which are no part of any kind.

    Args:
        prompt: what the answer continues. Some templates end within thinking.
    """

    def __init__(self, prompt: str = "") -> None:
        self._open: Marker | None = None
        self._waiting = ""
        for marker in MARKERS:
            if marker.kind == THINKING and prompt.rstrip().endswith(marker.start):
                self._open = marker

    @property
    def kind(self) -> str:
        """Of the text that comes next."""
        return self._open.kind if self._open else TEXT

    def split(self, text: str, last: bool = False) -> Iterator[tuple[str, str]]:
        """The parts that are certain after further text: kind and text. A tool call is one part.

        Args:
            last: there is no more.
        """
        self._waiting += text
        while self._waiting:
            ends = [self._open.end] if self._open else [each.start for each in MARKERS]
            places = [(at, end) for end in ends if end and (at := self._waiting.find(end)) >= 0]
            if not places:
                break
            at, end = min(places)
            before, self._waiting = self._waiting[:at], self._waiting[at + len(end) :]
            if before:
                yield self.kind, before
            self._open = None if self._open else next(each for each in MARKERS if each.start == end)
        ends = [self._open.end] if self._open else [each.start for each in MARKERS]
        certain = len(self._waiting)
        if not last:
            whole = self.kind == TOOL_CALL
            certain = 0 if whole else min(start_of(end, self._waiting) for end in ends)
        part, self._waiting = self._waiting[:certain], self._waiting[certain:]
        if part:
            yield self.kind, part


def start_of(end: str, text: str) -> int:
    """Where a string could begin in a text whose other characters are still to come."""
    for size in range(min(len(end) - 1, len(text)), 0, -1):
        if text.endswith(end[:size]):
            return len(text) - size
    return len(text)

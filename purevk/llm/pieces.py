"""What a generation gives: pieces of text by kind, with figures."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TEXT, THINKING, TOOL_CALL = "text", "thinking", "tool_call"


@dataclass
class Stats:
    """Figures of a generation; they grow while it runs.

    Attributes:
        prompt_tokens: of the prompt.
        reused_tokens: those of them that were in the cache already, and were not computed again.
        tokens: generated so far.
        prompt_seconds: from the start to the first token.
        seconds: from the first token to the last.
        why: why it stopped: "end" (an end token), "stop" (a stop string), "length" (max_tokens) or
            "context" (the cache is full); "" while it runs, or if it was abandoned.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    why: str = ""
    _start: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompt a second, without those that were reused."""
        computed = self.prompt_tokens - self.reused_tokens
        return computed / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second after the first one."""
        return (self.tokens - 1) / self.seconds if self.seconds and self.tokens > 1 else 0.0

    def count(self) -> None:
        """Takes the time of one more token."""
        now = time.perf_counter() - self._start
        if not self.tokens:
            self.prompt_seconds = now
        self.tokens += 1
        self.seconds = now - self.prompt_seconds

    def __str__(self) -> str:
        reused = f", {self.reused_tokens} reused" if self.reused_tokens else ""
        return (
            f"first token after {self.prompt_seconds:.2f} s; "
            f"prompt: {self.prompt_tokens} tokens{reused}, {self.prompt_rate:.1f} a second; "
            f"generated: {self.tokens} tokens, {self.rate:.1f} a second; "
            f"stopped by {self.why or 'the caller'}"
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities, by the logits before penalties and filters.

    Attributes:
        token, logprob: what was chosen.
        top: the most likely tokens with theirs, the first first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """A part of what is generated.

    Attributes:
        text: whole characters. It may be empty: the bytes of a character, or the characters of a stop
            string, may be spread over several tokens.
        tokens: the token ids of this piece.
        stats: figures of the whole generation so far.
        kind: "text"; in an answer of `Model.chat` also "thinking" or "tool_call", one piece for a
            call.
        logprobs: of these tokens, if they were asked for.
    """

    text: str
    tokens: tuple[int, ...]
    stats: Stats
    kind: str = TEXT
    logprobs: tuple[TokenLogprobs, ...] = ()


class Pieces(Iterator[Piece]):
    """The pieces of a generation, which runs while they are iterated over.

    Attributes:
        stats: figures, which grow.
    """

    def __init__(self, pieces: Iterator[Piece], stats: Stats) -> None:
        self._pieces, self.stats = pieces, stats

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the generation. What was generated stays in the cache."""
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()

    def text(self) -> str:
        """All text that is left, once the generation has ended: without thinking and tool calls."""
        return "".join(piece.text for piece in self if piece.kind == TEXT)

    def tokens(self) -> list[int]:
        """All token ids that are left, once the generation has ended."""
        return [token for piece in self for token in piece.tokens]


class TextWriter:
    """Makes text of the bytes of tokens: whole characters, and nothing of a stop string.

    Args:
        stop: strings that end the text. What could be the start of one is held back.

    Attributes:
        stopped: whether one was met.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [each for each in stop if each]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""
        self.stopped = False

    def write(self, data: bytes, last: bool = False) -> str:
        """The text that is certain after further bytes. `last`: there are no more."""
        if self.stopped:
            return ""
        text = self._waiting + self._decoder.decode(data, last)
        found = [at for each in self._stop if (at := text.find(each)) >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            return text[: min(found)]
        certain = len(text) if last else min(start_of(stop, text) for stop in (*self._stop, ""))
        self._waiting = text[certain:]
        return text[:certain]


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
    Marker("<|channel>thought\n", "<channel|>", THINKING),
    Marker("<|tool_call>", "<tool_call|>", TOOL_CALL),
    *(
        Marker(f"{start}<|channel|>{channel}", end, kind)
        for start in ("", "<|start|>assistant")
        for channel, end, kind in (
            ("analysis<|message|>", "<|end|>", THINKING),
            ("commentary<|message|>", "<|end|>", TEXT),
            ("commentary to=", "", TOOL_CALL),
            ("final<|message|>", "", TEXT),
        )
    ),
)
"""Of Qwen, SmolLM3, DeepSeek and others; of Mistral; of Gemma 4; of gpt-oss."""
MARKER_TEXTS = frozenset(
    token for each in MARKERS for token in re.findall(r"<[^<>]+>|\[\w+\]", each.start + each.end)
)
"""The tokens that markers consist of."""


class KindSplitter:
    """Splits the text of an answer by its markers, which are no part of any kind.

    Args:
        prompt: what the answer continues. Some templates end within thinking.
    """

    def __init__(self, prompt: str = "") -> None:
        self._open: Marker | None = None
        self._waiting = ""
        for marker in MARKERS:
            if marker.kind == THINKING and prompt.rstrip().endswith(marker.start.rstrip()):
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
        while True:
            ends = [self._open.end] if self._open else [marker.start for marker in MARKERS]
            places = [(at, end) for end in ends if end and (at := self._waiting.find(end)) >= 0]
            if not places:
                break
            at, end = min(places)
            before, self._waiting = self._waiting[:at], self._waiting[at + len(end) :]
            if before:
                yield self.kind, before
            self._open = (
                None if self._open else next(marker for marker in MARKERS if marker.start == end)
            )
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

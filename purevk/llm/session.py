"""A conversation with a model."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from purevk.errors import FileFormatError, InputError
from purevk.llm import arguments
from purevk.llm.pieces import TEXT, TOOL_CALL, Piece, Pieces
from purevk.paths import read_file
from purevk.whole_file import replace_file

_MOST_BYTES = 1 << 26
OVERFLOWS = ("error", "slide", "grow")


class ChatModel(Protocol):
    """What a session needs of a `Model`."""

    context: int

    def chat(self, messages: Any, **options: Any) -> Pieces: ...
    def count_tokens(
        self, messages: Any, *, tools: Any = None, template_args: Any = None
    ) -> int: ...
    def cut_text(self, text: str, tokens: int) -> str: ...
    def grow(self, context: int) -> None: ...


class Session:
    """A conversation. `Model.session` makes it. What it has in common with what the cache of the model
    holds is not computed again, and several sessions of one model keep theirs there.

    Attributes:
        messages: the conversation so far, each with "role" and "content".
        overflow: one of OVERFLOWS, see `Model.session`.
    """

    def __init__(
        self, model: ChatModel, system: str | None, overflow: str, options: dict[str, Any]
    ) -> None:
        if overflow not in OVERFLOWS:
            raise InputError(
                f"overflow={overflow!r} is not known", why=f"{', '.join(OVERFLOWS)} are accepted"
            )
        self._model, self._options = model, options
        self.overflow = overflow
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            content = arguments.text("system", system)
            self.messages.append({"role": "system", "content": content})

    def send(self, text: str | Mapping[str, Any], **options: Any) -> Pieces:
        """Says something, and gives the answer. Both become part of the conversation when the answer
        has ended, or was abandoned after its first piece. Of the answer, the text and the calls of
        tools do, not what the model thought.

        Args:
            text: the message of the user; or a message, such as {"role": "tool", "content": ...}
                with the result of a call.
            options: as for `Model.chat`, instead of those of the session.

        Raises:
            InputError: the conversation does not fit into the cache, and `overflow` is "error"; or
                the message alone does not. The conversation is as it was then.
        """
        said = {"role": "user", "content": text} if isinstance(text, str) else text
        messages = [*self.messages, arguments.message(said)]
        options = {**self._options, **options}
        if self.overflow == "slide":
            messages = self._latest(messages, options)
        elif self.overflow == "grow":
            self._make_room(messages, options)
        made = self._model.chat(messages, **options)
        return Pieces(self._collected(made, messages), made.stats)

    def _collected(self, made: Iterator[Piece], messages: list[dict[str, Any]]) -> Iterator[Piece]:
        text, calls = "", []
        try:
            for piece in made:
                if piece.kind == TEXT:
                    text += piece.text
                elif piece.kind == TOOL_CALL:
                    calls += _calls(piece.text)
                yield piece
        finally:
            answer: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                answer["tool_calls"] = calls
            self.messages = [*messages, answer]

    def _tokens(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> int:
        """How many there are with an answer: of `max_tokens`, at most a quarter of the cache."""
        context, most = self._model.context, options.get("max_tokens")
        room = min(most if isinstance(most, int) else context, context // 4)
        counted = {key: options.get(key) for key in ("tools", "template_args")}
        return self._model.count_tokens(messages, **counted) + room

    def _make_room(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
        """Has the cache grow until the messages and an answer fit: to twice its size, if that fits."""
        needed, context = self._tokens(messages, options), self._model.context
        if needed > context:
            try:
                self._model.grow(max(needed, 2 * context))
            except InputError:  # twice as many do not fit
                self._model.grow(needed)

    def _latest(
        self, messages: list[dict[str, Any]], options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """The messages without the oldest turns, so that an answer fits."""
        first = 1 if messages[0]["role"] == "system" else 0

        def since(start: int) -> list[dict[str, Any]]:
            return [*messages[:first], *messages[start:]]

        def fits(start: int) -> bool:
            return self._tokens(since(start), options) <= self._model.context

        starts = [at for at, each in enumerate(messages) if each["role"] == "user"][1:]
        if not starts or fits(first):
            return messages
        return since(starts[bisect_left(starts[:-1], True, key=fits)])

    def rewind(self, turns: int | None = None, *, tokens: int | None = None) -> None:
        """Takes back the end of the conversation. What is left is not computed again.

        Args:
            turns: so many: what the user said, with the answers; None: 1, unless `tokens` are given.
            tokens: so many of the text of the last answer.

        Raises:
            InputError: there are not so many, or both are given.
        """
        if tokens is not None:
            if turns is not None:
                raise InputError("both turns and tokens are given", next="leave one of them out")
            self._cut_answer(tokens)
            return
        starts = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
        turns = arguments.whole("turns", 1 if turns is None else turns, 0, "an integer")
        if turns > len(starts):
            raise InputError(
                f"turns={turns} is not accepted", why=f"the conversation has {len(starts)} turns"
            )
        if turns:
            del self.messages[starts[-turns] :]

    def _cut_answer(self, tokens: int) -> None:
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] != "assistant":
            raise arguments.refuse("tokens", tokens, "an answer at the end of the conversation")
        text = last.get("content") or ""  # a message of calls only may have none
        self.messages[-1] = {**last, "content": self._model.cut_text(text, tokens)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the messages to a JSON file, for `load`. The cache is computed again then.

        Raises:
            OutputError, OSError: the file cannot be written.
        """
        data = {"format": "purevk session", "messages": self.messages}
        with replace_file(path) as stream:
            text = json.dumps(data, ensure_ascii=False, indent=1)
            stream.write(text.encode("utf-8", "surrogatepass"))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Goes on with messages that `save` wrote.

        Raises:
            FileFormatError: it is no such file.
            OSError: it cannot be read.
        """
        try:
            data = json.loads(read_file(path, _MOST_BYTES))
            messages = arguments.messages(data["messages"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FileFormatError(
                "this is no saved session", where=os.fspath(path), why=str(error)[:200]
            ) from None
        self.messages = messages


def _calls(text: str) -> list[dict[str, Any]]:
    """The calls in the text of a piece of kind "tool_call", as messages have them. What is no JSON of
    a call is left out: the model wrote it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return []
    functions = data if isinstance(data, list) else [data]
    return [
        {"type": "function", "function": function}
        for function in functions
        if isinstance(function, dict) and isinstance(function.get("name"), str)
    ]

"""A conversation with a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from purevk.errors import FileFormatError, InputError
from purevk.llm.pieces import Piece, Pieces
from purevk.paths import read_file
from purevk.whole_file import replace_file

_MOST_BYTES = 1 << 28
ROLES = ("system", "user", "assistant", "tool")


class ChatModel(Protocol):
    """What a session needs of a `Model`."""

    context: int

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Pieces: ...

    def count_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int: ...


class Session:
    """A conversation. `Model.session` makes it. What it has in common with what the model computed
    last is not computed again, so several sessions of one model may take turns.

    Attributes:
        messages: the conversation so far, each with "role" and "content".
        overflow: "error" or "slide", see `Model.session`.
    """

    def __init__(
        self, model: ChatModel, system: str | None, overflow: str, options: dict[str, Any]
    ) -> None:
        if overflow not in ("error", "slide"):
            raise InputError(
                f"overflow={overflow!r} is not known", why='"error" or "slide" is accepted'
            )
        self._model, self._options = model, options
        self.overflow = overflow
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def send(self, text: str, **options: Any) -> Pieces:
        """Says something, and gives the answer. Both become part of the conversation when the answer
        has ended, or was abandoned after its first piece.

        Args:
            text: the message of the user.
            options: as for `Model.chat`, instead of those of the session.

        Raises:
            InputError: the conversation does not fit into the cache, and `overflow` is "error"; or
                the message alone does not. The conversation is as it was then.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        options = {**self._options, **options}
        if self.overflow == "slide":
            messages = self._latest(messages, options)
        made = self._model.chat(messages, **options)
        return Pieces(self._collected(made, messages), made.stats)

    def _collected(self, made: Iterator[Piece], messages: list[dict[str, Any]]) -> Iterator[Piece]:
        text = ""
        try:
            for piece in made:
                text += piece.text
                yield piece
        finally:
            self.messages = [*messages, {"role": "assistant", "content": text}]

    def _latest(
        self, messages: list[dict[str, Any]], options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """The messages without the oldest turns, so that an answer fits: of `max_tokens`, at most a
        quarter of the cache."""
        context, most = self._model.context, options.get("max_tokens")
        room = min(most if isinstance(most, int) else context, context // 4)
        first = 1 if messages[0]["role"] == "system" else 0
        turns = [at for at, each in enumerate(messages) if each["role"] == "user"]
        latest = messages
        for start in turns[1:]:
            if self._model.count_tokens(latest) + room <= context:
                break
            latest = [*messages[:first], *messages[start:]]
        return latest

    def rewind(self, turns: int = 1) -> None:
        """Takes back the last turns: what the user said, with the answers.

        Raises:
            InputError: there are not so many.
        """
        starts = [at for at, each in enumerate(self.messages) if each["role"] == "user"]
        if isinstance(turns, bool) or not isinstance(turns, int) or not 0 <= turns <= len(starts):
            raise InputError(
                f"turns={turns!r} is not accepted", why=f"the conversation has {len(starts)} turns"
            )
        if turns:
            del self.messages[starts[-turns] :]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the messages to a JSON file, for `load`. The cache is computed again then.

        Raises:
            OutputError, OSError: the file cannot be written.
        """
        data = {"format": "purevk session", "messages": self.messages}
        with replace_file(path) as stream:
            stream.write(json.dumps(data, ensure_ascii=False, indent=1).encode())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Goes on with messages that `save` wrote.

        Raises:
            FileFormatError: it is no such file.
            OSError: it cannot be read.
        """
        try:
            data = json.loads(read_file(path, _MOST_BYTES))
            messages = check_messages(data["messages"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FileFormatError(
                "this is no saved session", where=os.fspath(path), why=str(error)[:200]
            ) from None
        self.messages = messages


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of messages. Raises InputError if they are none."""
    made = []
    for each in messages:
        fits = isinstance(each, Mapping) and each.get("role") in ROLES
        if not fits or not isinstance(each.get("content"), str):
            raise InputError(
                "this is no message",
                where=repr(each)[:200],
                why=f'"role" (one of {", ".join(ROLES)}) and "content" (a text) are expected',
            )
        made.append(dict(each))
    if not made:
        raise InputError("there are no messages", next="give one message or more")
    return made

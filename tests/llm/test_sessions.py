"""Saved conversations: damaged ones, and what JSON can hold that no text does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from purevk.errors import FileFormatError, InputError
from purevk.llm import arguments
from purevk.llm.pieces import Pieces, Stats
from purevk.llm.session import Session


def session() -> Session:
    model: Any = None  # is not asked
    return Session(model, None, "error", {})


class Counter:
    """A model whose tokens are characters."""

    def __init__(self, context: int) -> None:
        self.context, self.calls = context, 0

    def count_tokens(self, messages: list[dict[str, Any]], **options: Any) -> int:
        self.calls += 1
        return sum(len(each["content"]) for each in messages)

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Pieces:
        return Pieces(iter(()), Stats())


@pytest.mark.parametrize("system", [None, "be brief"])
@pytest.mark.parametrize("length", [1, 3, 150])
def test_the_oldest_turns_are_forgotten(length: int, system: str | None) -> None:
    """So few as make room, with few counts of tokens: each renders the conversation."""
    model: Any = Counter(150)
    session = Session(model, system, "slide", {"max_tokens": 10})
    session.messages += [{"role": "user", "content": "x" * length}] * 1000
    list(session.send("last"))
    *kept, last, _answer = session.messages
    assert last["content"] == "last"
    room = 150 - 10 - len("last") - len(system or "")
    assert len(kept) - bool(system) == room // length
    assert model.calls <= 12


def test_surrogates_are_written_as_they_were_read(tmp_path: Path) -> None:
    """A saved conversation with one could not be saved again."""
    path = tmp_path / "session.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a\ud800"}]}))
    first = session()
    first.load(path)
    first.save(path)
    second = session()
    second.load(path)
    assert second.messages == first.messages == [{"role": "user", "content": "a\ud800"}]


DAMAGED = [
    b"", b"[1]", b'"x"', b"[" * 100_000, b"\xff\xfe\x00", b'{"messages": 5}', b'{"messages": "user"}',
    b'{"messages": [null]}', b'{"messages": [{"role": ["user"], "content": "x"}]}',
    b'{"messages": {"role": "user"}}', b'{"messages": ' + b"9" * 100_000 + b"}", b'{"messages": []}',
]  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_files(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    path.write_bytes(data)
    with pytest.raises((FileFormatError, InputError)):
        session().load(path)


@pytest.mark.parametrize("messages", [5, None, "x", {"role": "user"}, [5], []])
def test_what_is_no_conversation(messages: Any) -> None:
    with pytest.raises(InputError):
        arguments.messages(messages)

"""What a runner prints. No device is needed: a decoder gives the tokens."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from purevk.runtime.llm import GenerationConfig
from purevk.runtime.llm.text import Runner

TOKENS = ["ok \u00e9", "\x1b[2J", "\x1b]0;title\x07", "\u202e\x9b2J", "\n"]


class Decoder:
    context = 64

    def steps(self, *arguments: Any) -> Iterator[tuple[int, tuple[()]]]:
        yield from ((token, ()) for token in range(len(TOKENS)))


class Tokenizer:
    end_tokens = frozenset({len(TOKENS) - 1})

    def token_bytes(self, token: int) -> bytes:
        return TOKENS[token].encode()


def printed(monkeypatch: pytest.MonkeyPatch, encoding: str) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    runner, config = Runner(Decoder(), Tokenizer(), 0), GenerationConfig(max_new_tokens=9)  # type: ignore[arg-type]
    runner._run([1], 1, config, runner._begin(config, None), None)
    return stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined, no-any-return]


def test_a_terminal_gets_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, "utf-8")
    assert text == "ok \u00e9\\x1b[2J\\x1b]0;title\\x07\\u202e\\x9b2J\n"


def test_an_output_that_lacks_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raised UnicodeEncodeError."""
    assert printed(monkeypatch, "ascii").startswith("ok \\xe9\\x1b")


def test_a_callback_gets_the_text() -> None:
    runner, texts = Runner(Decoder(), Tokenizer(), 0), list[str]()  # type: ignore[arg-type]
    config = GenerationConfig(max_new_tokens=9)
    runner._run([1], 1, config, runner._begin(config, texts.append), None)
    assert "".join(texts) == "".join(TOKENS)

"""`purevk chat` on a tiny model, whose answers are noise."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from purevk.cli import chat
from purevk.llm.pieces import Piece, Pieces, Stats
from tests.llm.harness import write_llama

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm") / "tiny.gguf"
    write_llama(path, "Q4_1", table="Q8_0", vocabulary=True)
    return path


def test_an_answer_is_printed_with_figures(cli, model: Path) -> None:
    words = ["chat", str(model), "--context", "64", "--max-tokens", "5", "--prompt", "hi"]
    ran = cli(*words)
    assert ran.code == 0 and "stopped by" in ran.out and "context 64 tokens" in ran.out
    assert all(each.isprintable() or each == "\n" for each in ran.out)
    data = json.loads(cli(*words, "--json").out)
    (turn,) = data["turns"]
    assert (
        turn["message"] == "hi" and turn["answer"] in ran.out.replace("\\n", "\n") + turn["answer"]
    )
    assert 0 < turn["tokens"] <= 5 and turn["why"] in ("length", "end")
    assert data["memory"]["cache"] > 0 and data["context"] == 64


def test_messages_are_read_by_line(cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nho\n"))
    words = ["chat", str(model), "--max-tokens", "2", "--system", "s", "--temperature", "0.5"]
    data = json.loads(cli(*words, "--seed", "1", "--json").out)
    assert [turn["message"] for turn in data["turns"]] == ["hi", "ho"]
    assert data["turns"][1]["reused_tokens"] > 0


@pytest.mark.parametrize(
    "words, text",
    [(["--top-p", "2"], "top_p=2.0"), (["--context", "1"], "context=1")],
)
def test_wrong_options(cli, model: Path, words: list[str], text: str) -> None:
    ran = cli("chat", str(model), "--prompt", "hi", *words)
    assert ran.code == 1 and text in ran.err


def test_an_answer_is_no_command_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stats = Stats()
    texts = ("\x1b]0;title\x07", "\x9b2J\u202e", "end\n")
    pieces = [Piece(text, (0,), stats) for text in texts]
    text = chat._printed(Pieces(iter(pieces), stats), quiet=False)
    assert text == "".join(piece.text for piece in pieces)
    shown = capsys.readouterr().out
    assert "end\n" in shown and not set("\x1b\x07\x9b\u202e") & set(shown)

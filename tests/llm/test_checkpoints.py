"""Checkpoints of recurrent layers: random conversations against the same prompts from the start."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

import purevk.llm
from purevk.llm import sequences
from tests.llm.families import PROMPT, tiny, write_tokenizer

pytestmark = pytest.mark.device


@pytest.mark.parametrize("family", [pytest.param("qwen35", marks=pytest.mark.slow), "lfm2"])
def test_answers_are_those_of_fresh_sessions(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(family).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    monkeypatch.setattr(sequences, "MOST", 3)
    choose = random.Random(family)
    with (
        purevk.llm.load(tmp_path, context=256, dtype="float32") as model,
        purevk.llm.load(tmp_path, context=256, dtype="float32") as fresh,
    ):
        session = model.session()
        reused = 0
        for _ in range(20):
            turns = sum(each["role"] == "user" for each in session.messages)
            kind = choose.choice(("send", "send", "again", "rewind", "cut", "rewrite"))
            if turns and kind == "cut":
                size = len(session.messages[-1]["content"])
                session.rewind(tokens=choose.randint(0, size))
            elif turns and kind == "rewrite":  # as a template that leaves out what was thought
                session.messages[-1]["content"] = "ok"
            elif turns and kind == "rewind":
                session.rewind(turns=choose.randint(1, turns))
            text = "".join(choose.choices("abcdefgh", k=choose.randint(1, 12)))
            if turns and kind == "again":
                text = session.messages[-2]["content"]
                session.rewind()
            most = choose.randint(1, 5)
            pieces = session.send(text, max_tokens=most)
            tokens = pieces.tokens()
            fresh.position = 0
            want = fresh.chat(session.messages[:-1], max_tokens=most)
            assert (tokens, want.stats.reused_tokens) == (want.tokens(), 0)
            reused += pieces.stats.reused_tokens
            assert len(model.decoder.checkpoints._copies) <= 3
            if model.position > 200:
                session.rewind(turns=len(session.messages) // 2)
        assert reused > 150


def test_what_a_prompt_costs(tmp_path: Path) -> None:
    tiny("lfm2").save_pretrained(tmp_path)
    with purevk.llm.load(tmp_path, context=64, dtype="float32") as model:

        def reused(prompt: list[int]) -> int:
            pieces = model.generate(prompt, max_tokens=4)
            pieces.tokens()
            return pieces.stats.reused_tokens

        first = [*PROMPT, *PROMPT]
        assert reused(first) == 0
        assert reused(first) == 20 - sequences.TAIL  # an answer is made again
        answered = list(model.decoder.tokens)
        assert reused([*answered, *PROMPT]) == 23
        assert reused([*answered, *PROMPT[::-1]]) == 23  # the last turn is another one
        assert reused([*first[:15], *PROMPT]) == 12
        model.position = 14
        assert model.position == 12 and reused([*first[:15], *PROMPT]) == 12
        model.position = 5
        assert model.position == 0 and reused(first) == 0


def test_an_interrupted_step_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states had seen a token more than was noted."""
    tiny("lfm2").save_pretrained(tmp_path)
    with purevk.llm.load(tmp_path, context=64, dtype="float32") as model:
        prompt = [*PROMPT, *PROMPT]
        want = model.generate([*prompt, 5, 6], max_tokens=4).tokens()
        model.position = 0

        def interrupted(result: object) -> int:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(model.decoder, "_token", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.generate(prompt, max_tokens=4).tokens()
        pieces = model.generate([*prompt, 5, 6], max_tokens=4)
        assert pieces.tokens() == want and pieces.stats.reused_tokens == 20 - sequences.TAIL


def test_without_room_for_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("lfm2").save_pretrained(tmp_path)

    def full(items: list[object]) -> list[bytes]:
        if items:
            raise MemoryError
        return []

    with purevk.llm.load(tmp_path, context=64, dtype="float32") as model:
        want = model.generate([*PROMPT, *PROMPT], max_tokens=4).tokens()
        model.position = 0
        monkeypatch.setattr(model.program.states, "read_all", full)
        for _ in range(2):
            pieces = model.generate([*PROMPT, *PROMPT], max_tokens=4)
            assert (pieces.tokens(), pieces.stats.reused_tokens) == (want, 0)

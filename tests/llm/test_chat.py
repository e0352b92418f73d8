"""Conversations, on a tiny model whose answers are noise: what is computed is what counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

import purevk.llm
from purevk.errors import FileFormatError, InputError
from purevk.llm.templates import Template
from tests.llm.harness import write_llama

pytestmark = pytest.mark.device
OPTIONS = {"max_tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[purevk.llm.Model]:
    path = tmp_path_factory.mktemp("llm") / "tiny\x1b[2J.gguf"
    write_llama(path, "Q4_1", table="Q8_0", vocabulary=True)
    with purevk.llm.load(path, context=96, dtype="float32") as model:
        yield model


def fresh(model: purevk.llm.Model, messages: Any) -> str:
    """The answer without anything in the cache."""
    model.position = 0
    return model.chat(messages, **OPTIONS).text()


def test_the_name_of_the_file_is_shown_with_escapes(model: purevk.llm.Model) -> None:
    assert repr(model).isprintable() and "tiny\\x1b[2J.gguf" in repr(model)


def test_chat_applies_the_template(model: purevk.llm.Model) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert model.count_tokens("hi") == len(model.tokenizer.encode(text))
    assert fresh(model, "hi") == model.generate(text, **OPTIONS).text()
    with pytest.raises(InputError, match="no message"):
        model.chat([{"role": "nobody", "content": "hi"}])


def test_a_session_remembers_and_computes_nothing_twice(model: purevk.llm.Model) -> None:
    session = model.session(system="s", **OPTIONS)
    first = session.send("hi")
    answer = first.text()
    assert session.messages[1:] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": answer},
    ]
    assert fresh(model, session.messages[:2]) == answer
    second = session.send("ho")
    answer = second.text()
    assert second.stats.reused_tokens >= first.stats.prompt_tokens
    assert fresh(model, session.messages[:-1]) == answer
    session.rewind()
    assert session.send("ho").text() == answer
    session.rewind(turns=2)
    assert session.messages == [{"role": "system", "content": "s"}]
    with pytest.raises(InputError, match="0 turns"):
        session.rewind()


def test_overflow(model: purevk.llm.Model) -> None:
    session, sliding = (model.session(system="s", overflow=each) for each in ("error", "slide"))
    for text in ("abc", "def"):
        session.send(text, max_tokens=1).text(), sliding.send(text, max_tokens=1).text()
    messages = list(session.messages)
    with pytest.raises(InputError, match="the cache holds 96 tokens"):
        session.send("0123456789" * 6, **OPTIONS)
    assert session.messages == messages
    answer = sliding.send("0123456789", **OPTIONS).text()
    kept = sliding.messages
    assert [each["role"] for each in kept[:2]] == ["system", "user"] and len(kept) < 7
    assert answer == fresh(model, kept[:-1])
    with pytest.raises(InputError, match="overflow"):
        model.session(overflow="shrink")


def test_the_cache_grows(model: purevk.llm.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        purevk.llm.load(model.file.name, context=48, dtype="float32") as growing,
        purevk.llm.load(model.file.name, context=192, dtype="float32") as large,
    ):
        session = growing.session(system="s", overflow="grow")
        program, held = growing.program, 0
        for text in ("abc", "def", "0123456789"):
            pieces = session.send(text, **OPTIONS)
            assert pieces.text() == fresh(large, session.messages[:-1])
            assert pieces.stats.reused_tokens >= held
            held = pieces.stats.prompt_tokens
        assert growing.program is program
        assert growing.context == growing.plan.context == 192 and len(session.messages) == 7
        messages, position = list(session.messages), growing.position
        with monkeypatch.context() as patch:  # it does not fit, so the model stays as it is
            patch.setattr("purevk.program.devices.memory.free_bytes", lambda device, local=True: 0)
            with pytest.raises(InputError, match="0 MB are free|MB on the device"):
                session.send("0123456789" * 9, **OPTIONS)
        assert (session.messages, growing.context, growing.position) == (messages, 192, position)
        session.send("0123456789" * 9, **OPTIONS).text()
        assert growing.context == 384 and session.messages[1:7] == messages[1:]
        running = growing.generate("abc", max_tokens=4)
        next(running)
        growing.grow(10**9)
        assert growing.context == 4096
        with pytest.raises(InputError, match=r"(?s)this generation was ended.*the cache has grown"):
            next(running)
        for context in (4096, 8192, "8192", True):
            with pytest.raises(InputError, match="4096"):
                growing.grow(context)


def test_the_cache_grows_by_what_is_needed_if_twice_its_size_does_not_fit(
    model: purevk.llm.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def grow(context: int) -> None:
        asked.append(context)
        if len(asked) == 1:
            raise InputError("the device has no room")
        monkeypatch.setattr(model, "context", context)

    monkeypatch.setattr(model, "grow", grow)
    monkeypatch.setattr(model, "context", 48)
    session = model.session(overflow="grow")
    session.send("0123456789" * 4, **OPTIONS).text()
    assert len(asked) == 2 and asked[0] == 96 and 48 < asked[1] < 96


def test_files_with_a_context_of_their_own_do_not_grow(
    model: purevk.llm.Model, tmp_path: Path
) -> None:
    model.save(tmp_path / "tiny.pvk")
    with purevk.llm.load(tmp_path / "tiny.pvk") as saved:
        with pytest.raises(InputError, match="cannot grow"):
            saved.grow(192)
        assert saved.generate("a", max_tokens=2).tokens()


def test_sessions_are_saved(model: purevk.llm.Model, tmp_path: Path) -> None:
    session = model.session(**OPTIONS)
    session.send("hi").text()
    session.save(tmp_path / "a.json")
    other = model.session(**OPTIONS)
    other.load(tmp_path / "a.json")
    assert other.messages == session.messages
    for damaged in ("[]", "{", json.dumps({"messages": [{"role": 1}]}), "[" * 100_000):
        (tmp_path / "b.json").write_text(damaged)
        with pytest.raises(FileFormatError, match="no saved session"):
            other.load(tmp_path / "b.json")
    assert other.messages == session.messages


def test_stop_strings(model: purevk.llm.Model) -> None:
    text = fresh(model, "hi")
    model.position = 0
    made = model.chat("hi", max_tokens=4, stop=[text[1:3]])
    assert made.text() == text[: text.find(text[1:3])] and made.stats.why == "stop"


def test_tokens_are_rewound(model: purevk.llm.Model) -> None:
    session = model.session(**OPTIONS)
    session.messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello w12"},
    ]
    session.rewind(tokens=2)
    assert session.messages[-1]["content"] == "hello w"
    for wrong in (99, -1, True):
        with pytest.raises(InputError, match="tokens="):
            session.rewind(tokens=wrong)
    with pytest.raises(InputError, match="both"):
        session.rewind(turns=1, tokens=1)
    session.rewind()
    assert session.messages == []


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_an_answer_by_a_schema(model: purevk.llm.Model) -> None:
    """Noise, but for the schema."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for options in ({}, {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5}):
        model.position = 0
        pieces = model.chat("hi", json_schema=schema, logit_bias={10: -5.0, 32: -5.0}, **options)
        text = pieces.text()
        if pieces.stats.why == "end":
            data = json.loads(text)
            assert isinstance(data["a"], int) and data["b"] in ("x", "y")
        else:  # the noise is a long number
            assert pieces.stats.why == "context" and text.lstrip().startswith("{")


def test_an_answer_by_a_grammar(model: purevk.llm.Model) -> None:
    model.position = 0
    pieces = model.generate("hi", grammar='start: "hello" (" w12" | "!")', max_tokens=20)
    assert pieces.text() in ("hello w12", "hello!") and pieces.stats.why == "end"
    for wrong in ({"grammar": "start: ("}, {"json_schema": "{"}, {"json_schema": {"type": "no"}}):
        with pytest.raises(InputError):
            model.generate("hi", **wrong)
    with pytest.raises(InputError, match="both"):
        model.generate("hi", grammar="start: /a/", json_schema={})


def test_tools(model: purevk.llm.Model) -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    grammar = f"start: /x/ {json.dumps('<tool_call>' + call + '</tool_call>')}"
    session = model.session(tools=[TOOL], grammar=grammar)
    model.position = 0
    parts: dict[str, str] = {}
    for piece in session.send("1+1"):
        parts[piece.kind] = parts.get(piece.kind, "") + piece.text
    assert parts["tool_call"] == call and parts.get("text", "") == "x"
    answer = session.messages[-1]
    assert answer["content"] == "x" and answer["tool_calls"] == [
        {"type": "function", "function": json.loads(call)}
    ]
    again = session.send({"role": "tool", "content": "2"}, grammar='start: "2"')
    assert again.text() == "2" and again.stats.why == "end"
    assert [each["role"] for each in session.messages] == ["user", "assistant", "tool", "assistant"]
    with pytest.raises(InputError, match="no tool"):
        model.chat("hi", tools=[{"name": "add"}])


def test_tools_and_arguments_reach_the_template(model: purevk.llm.Model) -> None:
    text = "{{ tools[0].function.name }}{{ enable_thinking }}"
    template = Template(text, "test", {})
    assert template.render(
        [{"role": "user", "content": ""}], {"tools": [TOOL], "enable_thinking": 0}
    ) == ("add0")


def test_penalties_and_logprobs(model: purevk.llm.Model) -> None:
    """A penalty that no logit can make up for has no token stand in the answer twice."""
    model.position = 0
    plain = model.generate("hi", max_tokens=12, logprobs=2)
    pieces = [piece for piece in plain if piece.tokens]
    for piece in pieces:
        (entry,) = piece.logprobs
        assert (entry.token,) == piece.tokens and entry.top[0] == (entry.token, entry.logprob)
        assert len(entry.top) == 2 and entry.top[1][1] <= entry.logprob < 0
    model.position = 0
    tokens = model.generate("hi", max_tokens=12, presence_penalty=100.0).tokens()
    assert len(set(tokens)) == len(tokens) == 12
    first = pieces[0].tokens[0]
    model.position = 0
    banned = model.generate("hi", max_tokens=4, logit_bias={first: -float("inf")}).tokens()
    assert first not in banned


def test_what_a_file_lacks_is_said(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", "F32")
    with purevk.llm.load(tmp_path / "model.gguf", context=16) as model:
        with pytest.raises(FileFormatError, match=r"no tokenizer\.ggml\.model"):
            model.chat("hi")
        assert model.generate([1, 2], max_tokens=1).text() == ""

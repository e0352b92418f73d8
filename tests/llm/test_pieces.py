"""Text from the bytes of tokens, and thinking and tool calls in it."""

from __future__ import annotations

import random

import pytest

from purevk.llm.pieces import MARKER_TEXTS, KindSplitter, TextWriter


@pytest.mark.parametrize("seed", range(20))
def test_text_is_the_same_however_its_bytes_are_spread(seed: int) -> None:
    generator = random.Random(seed)
    text = "".join(generator.choice("ab\n é漢🙂") for _ in range(60))
    stop = [
        "".join(generator.choice("ab\né漢") for _ in range(generator.randint(1, 3)))
        for _ in range(2)
    ]
    ends = [at for each in stop if (at := text.find(each)) >= 0]
    writer, data, parts = TextWriter(stop), text.encode(), []
    while data:
        size = generator.randint(1, 5)
        parts.append(writer.write(data[:size]))
        data = data[size:]
    parts.append(writer.write(b"", last=True))
    assert writer.stopped == bool(ends)
    assert "".join(parts) == text[: min(ends, default=len(text))]
    assert all("\ufffd" not in part for part in parts)


def test_the_first_stop_string_ends_the_text_at_once() -> None:
    writer = TextWriter(["<end>"])
    assert [writer.write(each) for each in (b"ab<", b"en", b"x<e", b"nd>y", b"z")] == [
        "ab", "", "<enx", "", "",
    ]  # fmt: skip
    assert writer.stopped and writer.write(b"", last=True) == ""


def test_bytes_that_are_no_text() -> None:
    writer = TextWriter([])
    assert writer.write(b"\xe6\xbc") == "" and writer.write(b"", last=True) == "\ufffd"


ANSWER = (
    "<think>The <b> tag.</think>Sure. <tool_call>"
    '{"name": "add", "arguments": {"a": 1}}</tool_call> Done <thin'
)
PARTS = [
    ("thinking", "The <b> tag."),
    ("text", "Sure. "),
    ("tool_call", '{"name": "add", "arguments": {"a": 1}}'),
    ("text", " Done <thin"),
]


def split(texts: list[str], prompt: str = "") -> list[tuple[str, str]]:
    """The parts, of which those of one kind that follow one another are joined."""
    splitter = KindSplitter(prompt)
    parts: list[tuple[str, str]] = []
    for number, text in enumerate(texts):
        for kind, part in splitter.split(text, last=number == len(texts) - 1):
            if parts and parts[-1][0] == kind:
                part = parts.pop()[1] + part
            parts.append((kind, part))
    return parts


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_an_answer_in_pieces_of_any_size(size: int) -> None:
    texts = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    assert split(texts) == PARTS


def test_a_call_is_one_part() -> None:
    splitter = KindSplitter()
    parts = [list(splitter.split(text)) for text in ("<tool_call>{", '"a"', "}</tool_call>", "x")]
    assert parts == [[], [], [("tool_call", '{"a"}')], [("text", "x")]]


def test_a_prompt_that_ends_within_thinking() -> None:
    assert split(["so", "</think>yes"], "<|im_start|>assistant\n<think>\n") == [
        ("thinking", "so"),
        ("text", "yes"),
    ]
    assert split(["so"], "<think>\n\n</think>\n\n") == [("text", "so")]


def test_a_marker_without_an_end() -> None:
    assert split(['[TOOL_CALLS][{"name": "f"}', "]"]) == [("tool_call", '[{"name": "f"}]')]
    assert split(["<tool_call>{"]) == [("tool_call", "{")]


GPT_OSS = (
    "<|channel|>analysis<|message|>Two numbers.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>I add them.<|end|><|start|>assistant<|channel|>final<|message|>2 <|x"
)
CALL = "<|start|>assistant<|channel|>commentary to=functions.add json<|message|>{}"
OTHERS = {
    "gpt-oss": (
        GPT_OSS,
        [("thinking", "Two numbers."), ("text", "I add them.2 <|x")],
    ),
    "a call of gpt-oss": (
        f"<|channel|>analysis<|message|>Add.<|end|>{CALL}",
        [("thinking", "Add."), ("tool_call", "functions.add json<|message|>{}")],
    ),
    "gpt-oss without analysis": ("<|channel|>final<|message|>Yes", [("text", "Yes")]),
    "gemma4": (
        "<|channel>thought\nHm.<channel|>Yes. <|tool_call>call:add{a:1}<tool_call|>",
        [("thinking", "Hm."), ("text", "Yes. "), ("tool_call", "call:add{a:1}")],
    ),
}


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("name", OTHERS)
def test_markers_of_models(name: str, size: int) -> None:
    answer, parts = OTHERS[name]
    assert split([answer[at : at + size] for at in range(0, len(answer), size)]) == parts


def test_the_tokens_of_markers() -> None:
    assert {"<think>", "</think>", "[TOOL_CALLS]", "<|channel>", "<|message|>"} <= MARKER_TEXTS
    assert "<|call|>" not in MARKER_TEXTS

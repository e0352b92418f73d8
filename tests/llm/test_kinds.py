"""Thinking and tool calls in the text of an answer."""

from __future__ import annotations

import pytest

from purevk.llm.kinds import KindSplitter

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

"""Text from the bytes of tokens."""

from __future__ import annotations

import random

import pytest

from purevk.llm.pieces import TextWriter


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

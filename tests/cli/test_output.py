"""Sizes, durations and tables for people."""

from __future__ import annotations

import io

import pytest

from purevk.cli import output


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (None, None),
    ],
)
def test_sizes(nbytes: int | None, text: str | None) -> None:
    assert output.size(nbytes) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0, "0"),
        (12.34, "12.3 s"),
        (1.0, "1.00 s"),
        (0.1234, "123 ms"),
        (0.00999, "9.99 ms"),
        (5e-6, "5.00 us"),
        (2e-7, "0.20 us"),
        (None, None),
    ],
)
def test_durations(seconds: float | None, text: str | None) -> None:
    assert output.duration(seconds) == text


def test_counts() -> None:
    assert [output.count(1, "dispatch"), output.count(2, "dispatch"), output.count(0, "node")] == [
        "1 dispatch",
        "2 dispatches",
        "0 nodes",
    ]


def test_paths_are_cut_at_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("COLUMNS", "40")
    path = "encoder.layers.11.attention.output.dense"
    rows = [[path, "123.4 ms"], ["a/model.py:7, in forward_of_encoder", "1 ms"]]
    output.Output().table([("source", "p"), ("time", "r")], rows)
    lines = stream.getvalue().splitlines()
    assert (
        "\u2026" in lines[1] and "attention.output.dense" in lines[1] and "encoder" not in lines[1]
    )
    assert "a/model.py:7 " in lines[2] and "forward" not in lines[2]
    assert max(map(len, lines)) <= 40 and len(lines) == 3


def test_brackets_are_text_and_numbers_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich takes "[s0]" for markup where it may, and shares a lack of room among all columns."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("COLUMNS", "50")
    out = output.Output()
    out.table(
        [("name", "c"), ("time", "r"), ("share", "r")],
        [["x" * 80, "123.4 ms", "100.0%"], ["f[s0,b]", "1 ms", "0%"]],
    )
    out.pairs([("dims", "[s0, bold]"), ("none", None)])
    lines = stream.getvalue().splitlines()
    assert (
        "123.4 ms" in lines[1]
        and "100.0%" in lines[1]
        and "\u2026" in lines[1]
        and len(lines[1]) <= 50
    )
    assert "f[s0,b]" in lines[2] and "[s0, bold]" in lines[3] and len(lines) == 4

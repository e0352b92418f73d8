"""Guards in words, and the modules of nodes."""

from __future__ import annotations

import pytest

from purevk.ir import Dim, Guard, Size
from purevk.ir.symbols import Symbol
from purevk.report.contents import module_path
from purevk.report.words import guard_in_words, size_text

S, T, N = Dim.of(Symbol("s", 64)), Dim.of(Symbol("t", 64)), Dim.of(Symbol("n", 64, 1))


@pytest.mark.parametrize(
    "left, op, right, answer, words",
    [
        (S, "==", 8, True, "s is 8"),
        (S, "==", 8, False, "s is not 8"),
        (S, "<=", T, True, "s is at most t"),
        (S, "<=", T, False, "s is more than t"),
        (S, "<", 4, False, "s is at least 4"),
        (4, "<", S, True, "s is more than 4"),
        (4, ">=", S, False, "s is more than 4"),
        (S * 8, "==", S * T, True, "8*s equals s*t"),
        (N * 8, "==", N * T, True, "t is 8"),
        (N * T, "==", N, False, "t is not 1"),
        (N, "==", N * T, False, "t is not 1"),
        (N * N * T, "<=", N * N * 4 + N, True, "n*t is at most 4*n + 1"),
        (S * T, "==", S + 1, False, "s*t is not s + 1"),
        (S + 1, "==", S * T, False, "s*t is not s + 1"),
        (S % 4, "==", 0, True, "s is a multiple of 4"),
        (S % 4, "!=", 0, True, "s is not a multiple of 4"),
        (S % 4, "==", 0, False, "s is not a multiple of 4"),
        (S % 4, "==", 1, True, "s % 4 is 1"),
        (S // 2, ">", 1, True, "s // 2 is more than 1"),
        ((S + 3) // 4, "<=", T // 2, True, "(s + 3) // 4 is at most t // 2"),
        ((S // 2) * (T // 2), "==", 4, True, "(s // 2)*(t // 2) is 4"),
    ],
)
def test_guards_in_words(left: Size, op: str, right: Size, answer: bool, words: str) -> None:
    assert guard_in_words(Guard(left, op, right, answer)) == words


@pytest.mark.parametrize("op", ["==", "!=", "<", "<=", ">", ">="])
@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("swapped", [True, False])
def test_words_mean_what_the_guard_asks(op: str, answer: bool, swapped: bool) -> None:
    guard = Guard(4, op, S, answer) if swapped else Guard(S, op, 4, answer)
    words = guard_in_words(guard)
    meant = {
        "is": lambda n: n == 4,
        "is not": lambda n: n != 4,
        "is less than": lambda n: n < 4,
        "is at most": lambda n: n <= 4,
        "is more than": lambda n: n > 4,
        "is at least": lambda n: n >= 4,
    }[words.removeprefix("s ").removesuffix(" 4")]
    (symbol,) = guard.symbols
    for number in (3, 4, 5):
        assert guard.holds({symbol: number}) == meant(number), words


@pytest.mark.parametrize(
    "source, path",
    [
        ("layers.0.fc.linear", ["layers", "0", "fc"]),
        ("layers.0.fc.linear + layers.0.act.relu", ["layers", "0"]),
        ("layers.0.q.linear | layers.0.k.linear_1", ["layers", "0"]),
        ("a.linear + b.relu", []),
        ("add_1", []),
        ("delegate 0#3 aten.add.Tensor", ["delegate 0"]),
        ("delegate 0#3 aten.add.Tensor + delegate 0#4 aten.relu.default", ["delegate 0"]),
        ("delegate 0#3 aten.add.Tensor + delegate 1#4 aten.relu.default", []),
        ("forward#0 choice", []),
        ("", []),
    ],
)
def test_the_module_of_a_node(source: str, path: list[str]) -> None:
    assert module_path(source) == path


def test_bytes() -> None:
    assert [size_text(n) for n in (12, 1536, 5 << 20, 3 << 30)] == [
        "12 B",
        "1.5 KiB",
        "5 MiB",
        "3 GiB",
    ]

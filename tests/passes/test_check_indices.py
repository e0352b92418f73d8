"""PUREVK_CHECK_INDICES: calls raise where torch raises, and give what torch gives elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import purevk
from purevk.errors import InputError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.device

X = torch.arange(20, dtype=torch.float32).reshape(5, 4)
CASES: dict[str, tuple[Callable[..., Any], int, bool]] = {
    # what runs, the size that indices are below, and whether they count from the end
    "embedding": (lambda i: torch.nn.functional.embedding(i, X), 5, False),
    "gather": (lambda i: X.gather(1, i.reshape(1, -1)), 4, False),
    "index_select": (lambda i: X.index_select(0, i), 5, False),
    "index": (lambda i: X[:, i], 4, True),
    "two indices": (lambda i: X[i, i], 4, True),
    "index_put": (lambda i: X.index_put((i,), torch.tensor(7.0)), 5, True),
    "scatter": (lambda i: X.scatter(0, i.reshape(1, -1), 3.0), 5, False),
    "index_add": (lambda i: X.index_add(0, i, torch.ones(i.shape[0], 4)), 5, False),
    "index_fill": (lambda i: X.index_fill(1, i, 2.0), 4, True),
    "take": (lambda i: X.take(i), 20, True),
}


class Indexes(torch.nn.Module):
    def __init__(self, do: Callable[..., Any], computed: bool = False) -> None:
        super().__init__()
        self.do, self.computed = do, computed

    def forward(self, index: Any) -> Any:
        return self.do(index - 1 + 1 if self.computed else index)


@pytest.mark.parametrize("name", CASES)
def test_indices_that_a_call_brings_are_checked(name: str) -> None:
    do, size, from_end = CASES[name]
    with purevk.compile(Indexes(do), (torch.tensor([0, 1]),)) as program:
        for pair in ([0, size - 1], [-size, 1], [-1, 1], [2, size], [-size - 1, 0], [1 << 40, 0]):
            for index in (torch.tensor(pair), np.array(pair)):
                if min(pair) >= (-size if from_end else 0) and max(pair) < size:
                    torch.testing.assert_close(
                        torch.as_tensor(program(index)), do(torch.tensor(pair))
                    )
                    continue
                with pytest.raises((IndexError, RuntimeError)):
                    do(torch.tensor(pair))
                wrong = max(pair) if max(pair) >= size else min(pair)
                with pytest.raises(InputError, match=f"index has the index {wrong}\\n") as caught:
                    program(index)
                below = (
                    5 if name == "two indices" and not -5 <= wrong < 5 else size
                )  # the first one
                lowest = -below if from_end else 0
                assert f"takes indices from {lowest} to {below - 1}" in caught.value.why


def test_indices_in_another_shape_or_dtype_are_checked() -> None:
    table = torch.nn.Embedding(9, 4)
    cases: list[tuple[Callable[..., Any], torch.dtype]] = [
        (lambda i: table(i.long().unsqueeze(0).permute(1, 0)), torch.int32),
        (lambda i: table(i.reshape(-1, 2)), torch.int64),
    ]
    for do, dtype in cases:
        with purevk.compile(Indexes(do), (torch.zeros(4, dtype=dtype),)) as program:
            index = torch.tensor([3, 8, 0, 1], dtype=dtype)
            torch.testing.assert_close(program(index), do(index).detach())
            with pytest.raises(InputError, match="index has the index 9"):
                program(index + 1)


def test_large_numbers_wrap_as_in_the_model() -> None:
    do: Callable[..., Any] = lambda i: X.index_select(0, i.int())  # noqa: E731
    with purevk.compile(Indexes(do), (torch.tensor([0, 1]),)) as program:
        index = torch.tensor([(1 << 32) + 3, 2])
        torch.testing.assert_close(program(index), do(index))
        with pytest.raises(InputError, match="index has the index 5"):
            program(torch.tensor([(1 << 32) + 5, 2]))


def test_indices_that_may_not_be_used_are_not_checked() -> None:
    for do in (
        lambda i: X.index_select(0, i[:1]),
        lambda i: X.index_select(0, i.clamp(0, 4)),
        lambda i: torch.cond(
            i.sum() > 100, lambda i: X.index_select(0, i).cumsum(0), lambda i: X[:2].cumsum(1), (i,)
        ),
    ):
        with purevk.compile(Indexes(do), (torch.tensor([0, 1]),)) as program:
            index = torch.tensor([2, 9])
            torch.testing.assert_close(program(index), do(index))


VARYING: dict[str, tuple[Callable[..., Any], bool]] = {
    "gather": (lambda x, i: x.gather(0, i.reshape(-1, 1)), False),
    "index_select": (lambda x, i: x.index_select(0, i), False),
    "index": (lambda x, i: x[i], True),
    "all but one": (lambda x, i: x[:-1][i], True),
    "index_put": (lambda x, i: x.index_put((i,), torch.tensor(7.0)), True),
    "scatter": (lambda x, i: x.scatter(0, i.reshape(-1, 1), 3.0), False),
    "index_add": (lambda x, i: x.index_add(0, i, torch.ones(i.shape[0], 4)), False),
    "take": (lambda x, i: x.take(i), True),
}


@pytest.mark.parametrize("name", VARYING)
def test_indices_along_sizes_that_vary(name: str) -> None:
    do, from_end = VARYING[name]

    class Model(torch.nn.Module):
        def forward(self, x: Any, index: Any) -> Any:
            return do(x, index)

    rows, count = torch.export.Dim("rows", min=4, max=64), torch.export.Dim("count", max=8)
    args = (torch.randn(8, 4), torch.tensor([0, 1]))
    with purevk.compile(Model(), args, ({0: rows}, {0: count})) as program:
        for length in (4, 9, 64):
            x = torch.arange(length * 4, dtype=torch.float32).reshape(length, 4)
            size = {"take": 4 * length, "all but one": length - 1}.get(name, length)
            torch.testing.assert_close(
                program(x, torch.tensor([0, size - 1])), do(x, torch.tensor([0, size - 1]))
            )
            for wrong in (size, -size - 1, -1):
                index = torch.tensor([0, wrong, 1])
                if from_end and wrong == -1:
                    torch.testing.assert_close(program(x, index), do(x, index))
                    continue
                with pytest.raises((IndexError, RuntimeError)):
                    do(x, index)
                with pytest.raises(InputError, match=f"index has the index {wrong}\\n") as caught:
                    program(x, index)
                lowest = -size if from_end else 0
                assert f"takes indices from {lowest} to {size - 1}" in caught.value.why


def test_sizes_that_an_export_decides() -> None:
    """The first export takes 8 rows and more. A call with fewer is another export."""

    class Model(torch.nn.Module):
        def forward(self, x: Any, index: Any) -> Any:
            return x[:8][index]

    args = (torch.randn(16, 4), torch.tensor([0, 1]))
    with purevk.compile(Model(), args, ({0: torch.export.Dim.AUTO}, None)) as program:
        for length, size in ((16, 8), (5, 5), (64, 8), (5, 5)):
            x = torch.randn(length, 4)
            good = torch.tensor([0, size - 1])
            torch.testing.assert_close(program(x, good), x[:8][good])
            with pytest.raises(InputError, match=f"has the index {size}\\n"):
                program(x, torch.tensor([0, size]))


def test_a_submitted_call_raises() -> None:
    with purevk.compile(Indexes(lambda i: X[i]), (torch.tensor([0, 1]),)) as program:
        with pytest.raises(InputError, match="index has the index 5"):
            program.submit(torch.tensor([0, 5])).result()
        index = torch.tensor([0, 4])
        torch.testing.assert_close(program.submit(index).result(), X[index])


@pytest.mark.parametrize("name", CASES)
def test_indices_out_of_range_raise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_CHECK_INDICES", "1")
    do, size, from_end = CASES[name]
    with purevk.compile(Indexes(do, True), (torch.tensor([0, 1]),)) as program:
        for pair in ([0, size - 1], [-size, 1], [-1, 1], [2, size], [-size - 1, 0], [1 << 40, 0]):
            index = torch.tensor(pair)
            if min(pair) >= (-size if from_end else 0) and max(pair) < size:
                torch.testing.assert_close(program(index), do(index))
                continue
            with pytest.raises((IndexError, RuntimeError)):
                do(index)
            with pytest.raises(InputError, match="is not within") as caught:
                program(index)
            wrong = max(pair) if max(pair) >= size else min(pair)
            assert f"is {wrong} in this call" in caught.value.why
            assert "aten." in caught.value.what


def test_no_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty index has no least element."""
    monkeypatch.setenv("PUREVK_CHECK_INDICES", "1")
    count = torch.export.Dim("count", min=0, max=8)
    model = Indexes(lambda i: X.index_select(0, i))
    with purevk.compile(model, (torch.tensor([0, 1, 2]),), ({0: count},)) as program:
        for pair in ([0, 4, 2], [], [3]):
            index = torch.tensor(pair, dtype=torch.int64)
            torch.testing.assert_close(program(index), X.index_select(0, index))


def test_without_the_knob_the_nearest_element_is_taken() -> None:
    module = Indexes(lambda i: X.index_select(0, i), True)
    with purevk.compile(module, (torch.tensor([0, 1]),)) as one:
        torch.testing.assert_close(one(torch.tensor([9, 0])), X[[4, 0]])

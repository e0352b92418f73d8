"""Caches that are written in place, and rotary embeddings that are written there too, against eager
torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.passes.decoding.harness import Projections, check, rotated, rotated_by_slices

pytestmark = pytest.mark.device


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (3, torch.float16)])
def test_rotation_to_a_cache(heads_first: bool, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rotate = rotated if rows == 1 else rotated_by_slices
    module = Projections(heads_first, rotate).to(dtype)
    calls = [
        (torch.randn(1, rows, 24, dtype=dtype), torch.tensor([at])) for at in (0, 7, 19 - rows)
    ]
    ops = check(module, calls)
    # with the traits of a GPU, the matmul rotates
    assert ops.count("purevk.rotate_to_cache") + ops.count("purevk.matmul to cache") == 1
    assert not {"purevk.scatter", "purevk.store", "aten.cat.default"} & {*ops[:-3]}


def test_rotation_of_any_number_of_rows() -> None:
    torch.manual_seed(1)
    length = torch.export.Dim("length", min=2, max=19)
    calls = [(torch.randn(1, n, 24), torch.tensor([at])) for n, at in ((3, 0), (5, 3), (2, 17))]
    ops = check(Projections(True, rotated), calls, ({1: length}, None))
    assert ops.count("purevk.rotate_to_cache") == 1


def test_the_passes_can_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_SKIP_PASSES", "find_rotary,write_in_place,rotate_to_caches")
    torch.manual_seed(2)
    ops = check(Projections(True, rotated), [(torch.randn(1, 2, 24), torch.tensor([4]))])
    assert "purevk.scatter" in ops and "purevk.store" in ops
    assert not {"purevk.rotate_to_cache", "purevk.rotate_halves", "purevk.write_rows"} & {*ops}


class Cache(torch.nn.Module):
    """A cache of 5 rows, and a function of it, of positions and of new rows."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("cache", torch.randn(2, 5, 4))

    def forward(self, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return self.function(self.cache, rows, at)


def _write(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return cache.index_copy_(1, at, rows) * 2


def _old_and_new(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    old = cache.clone()
    cache.index_copy_(1, at, rows)
    return old - cache


def _old_twice(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    old = cache * 3
    cache.index_copy_(1, at, rows)
    return old + cache


def _of_its_own_rows(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(1, at, cache[:, 1 : 1 + rows.shape[1]] + rows)
    return cache.sum(1)


def _moved_rows(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Each of the rows that are read is written, too."""
    cache.index_copy_(1, torch.arange(1, 5), cache[:, :4] * rows[:, :1])
    return cache * 2


def _shifted(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The same, but rows are read where they are."""
    cache.index_copy_(1, torch.arange(1, 5), cache[:, :4].clone())
    return cache * 2


def _whole(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache[:, at] = rows
    return cache


def _twice(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    first = cache.index_copy_(1, at, rows).sum(2)
    cache.index_copy_(1, at, rows * 2)
    return first + cache.sum(2)


@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (_write, True),
        (_old_and_new, False),
        (_old_twice, True),
        (_of_its_own_rows, True),
        (_moved_rows, True),
        (_shifted, False),
        (_whole, False),
        (_twice, False),
    ],
)
def test_one_row_of_a_cache(function: Callable[..., torch.Tensor], in_place: bool) -> None:
    torch.manual_seed(3)
    calls = [(torch.randn(2, 1, 4), torch.tensor([at])) for at in (3, 0, 2)]
    ops = check(Cache(function), calls)
    assert ("purevk.write_rows" in ops) == in_place and ("purevk.scatter" in ops) != in_place


def test_positions_that_may_be_equal() -> None:
    """Of several rows for one position the last is kept, which takes a scatter."""
    torch.manual_seed(4)
    calls = [(torch.randn(2, 3, 4), torch.tensor(at)) for at in ([0, 4, 1], [2, 2, 0], [1, 1, 1])]
    ops = check(Cache(_write), calls)
    assert "purevk.write_rows" not in ops and "purevk.scatter" in ops


def test_a_position_from_the_end() -> None:
    def write(cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache[:, at] = rows
        return cache + 1

    torch.manual_seed(5)
    ops = check(Cache(write), [(torch.randn(2, 1, 4), torch.tensor([at])) for at in (-1, 2, -5)])
    assert "purevk.write_rows" in ops

"""Splits whose lengths follow from sizes of a call, against eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from purevk.testing import assert_same_as_eager  # noqa: E402
from tests.program.signatures.harness import module  # noqa: E402

pytestmark = pytest.mark.device


def by_size(self: Any, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(torch.cat([x, y], 1), x.shape[0], 1))


def in_chunks(self: Any, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [part.sum(0) for part in torch.chunk(x, 3)] + [y]


def by_half(self: Any, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [part.sum(0) for part in torch.split(x, (x.shape[0] + 1) // 2)] + [y]


@pytest.mark.parametrize("function", [by_size, in_chunks, by_half])
def test_lengths_of_a_call(function: Callable[..., Any]) -> None:
    def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(rows)
        return torch.randn(rows, 2), torch.randn(rows, 5)

    rows = {0: torch.export.Dim.AUTO}
    assert_same_as_eager(
        module(function),
        inputs(6),
        further=[inputs(5), inputs(8), inputs(4), inputs(1)],
        dynamic_shapes=(rows, rows),
    )

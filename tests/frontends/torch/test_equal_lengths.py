"""Lengths that torch states to be equal, though their expressions differ, against eager torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import purevk  # noqa: E402
from tests.program.signatures.harness import module, not_before  # noqa: E402

pytestmark = pytest.mark.device

_ROWS = {0: torch.export.Dim.AUTO}


def joined(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.cat([x, x[:2]])
    return torch.cat([x[::2, None], torch.stack([x[::4]] * 2, 1).view(-1, 1)], 1)


def test_rounded_up_alike(tmp_path: Path) -> None:
    program = purevk.compile(module(joined), (torch.arange(6.0),), dynamic_shapes=(_ROWS,))
    program.save(tmp_path / "joined.pvk")
    loaded = purevk.load(tmp_path / "joined.pvk")
    for length in (6, 10, 29):
        x = torch.arange(float(length))
        torch.testing.assert_close(loaded(x), module(joined)(x), rtol=0, atol=0)


def operands(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two columns of as many numbers, (n + 1) // 2 and (n + 3) // 4 * 2 of them."""
    x = torch.cat([x, x[:2]])
    return x[::2, None], torch.stack([x[::4]] * 2, 1).view(-1, 1)


OPERATORS = {
    "dot": lambda a, b: torch.dot(a[:, 0], b[:, 0]),
    "matmul": lambda a, b: a.T @ b,
    "linear": lambda a, b: F.linear(a.T, b.T),
    "convolution": lambda a, b: F.conv1d(a[None], b[None]),
    "stack": lambda a, b: torch.stack([a, b]),
    "copies": lambda a, b: a.clone().copy_(b),
    "counts": lambda a, b: torch.bincount(a[:, 0].long() * 0, b[:, 0]),
    "distances": lambda a, b: torch.cdist(a.T, 2 * b.T),
    "keys": lambda a, b: F.scaled_dot_product_attention(a[None, None, :3], a[None, None], b[None, None]),
    "widths": lambda a, b: F.scaled_dot_product_attention(a.T[None, None], b.T[None, None], b.T[None, None]),
}  # fmt: skip


_MARKS = {"counts": not_before("2.10", "torch states the dtype of weighted counts as int64")}


@pytest.mark.parametrize(
    "operator",
    [pytest.param(OPERATORS[name], marks=_MARKS.get(name, ()), id=name) for name in OPERATORS],
)
def test_operators_that_ask_for_equal_sizes(operator: Any, tmp_path: Path) -> None:
    model = module(lambda self, x: operator(*operands(x)))
    program = purevk.compile(model, (torch.arange(6.0),), dynamic_shapes=(_ROWS,))
    program.save(tmp_path / "operator.pvk")
    loaded = purevk.load(tmp_path / "operator.pvk")
    for length in (6, 10):
        x = torch.arange(float(length)) / length
        torch.testing.assert_close(loaded(x), model(x))


def padded_twice(self: Any, x: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    longer = torch.nn.functional.pad(x, (0, one.item()))
    return x + torch.nn.functional.pad(longer * 2, (0, two.item()))


def test_numbers_that_cancel(tmp_path: Path) -> None:
    counts = (torch.tensor(2), torch.tensor(-2))
    inputs = (torch.arange(9.0), *counts)
    program = purevk.compile(module(padded_twice), inputs, dynamic_shapes=(_ROWS, None, None))
    program.save(tmp_path / "padded.pvk")
    for run in (program, purevk.load(tmp_path / "padded.pvk")):
        for one in (2, 3):
            call = (torch.arange(7.0), torch.tensor(one), torch.tensor(-one))
            torch.testing.assert_close(run(*call), module(padded_twice)(*call), rtol=0, atol=0)

"""Lengths that torch states to be equal, though their expressions differ, against eager torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from tests.program.signatures.harness import module  # noqa: E402

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

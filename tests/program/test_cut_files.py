"""Files that are cut short while their program lives: an error where their bytes are needed, and never
the signal SIGBUS."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import purevk
from purevk.errors import FileFormatError
from tests.harness import DATA

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not hasattr(os, "preadv"), reason="the system cuts no file that is mapped"),
]


@pytest.mark.parametrize("suffix", ["pte", "pvk"])
def test_calls_go_on_and_save_raises(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    x = np.ones((2, 5), np.float32)
    with purevk.load(DATA / "linear_relu.pte") as program:
        expected = program.forward(x)
        if suffix == "pvk":
            program.save(path)
    if suffix == "pte":
        shutil.copy(DATA / "linear_relu.pte", path)
    with purevk.load(path) as program:
        os.truncate(path, 1)
        np.testing.assert_array_equal(program.forward(x), expected)
        saved = tmp_path / "again.pvk"
        with pytest.raises(FileFormatError, match="cut short"):
            program.save(saved)
        program.reset_state()
        assert not saved.exists() and [each.name for each in tmp_path.iterdir()] == [path.name]


def test_sizes_that_need_another_lowering(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    shutil.copy(DATA / "dynamic_views.pte", path)
    with purevk.load(path) as program:
        os.truncate(path, 1)
        program.forward(np.zeros((1, 3, 8), np.float32))
        with pytest.raises(FileFormatError, match="cut short"):
            program.forward(np.zeros((1, 1, 8), np.float32))


def test_constants_that_the_host_reads(tmp_path: Path) -> None:
    """Constants of nodes on the CPU, and results that are constants."""
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4096.0).reshape(64, 64))

        def forward(self, x):
            return torch.linalg.matrix_exp(x) @ self.table, self.table

    path = tmp_path / "model.pvk"
    x = np.eye(64, dtype=np.float32)
    with purevk.compile(Model(), (torch.eye(64),)) as program:
        program.save(path)
        expected = program.forward(x)
    with purevk.load(path) as program:
        before = program.forward(x)
        os.truncate(path, 1)
        after = program.forward(x)
        for one, two, three in zip(expected, before, after, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(two, three)  # of the file as it was

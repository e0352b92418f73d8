"""The examples that --help of each command prints run as they are printed."""

from __future__ import annotations

import glob
import importlib.util
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import purevk
from purevk import knobs
from purevk.cache import Cache
from purevk.cli.commands import COMMANDS
from tests.harness import DATA

_SLOW = ("purevk bench",)
_EXAMPLE = re.compile(r"^  (purevk .*?)(?:   .*)?$", re.MULTILINE)


def _examples() -> list[object]:
    found = [line for command in COMMANDS for line in _EXAMPLE.findall(command.epilog)]
    return [
        pytest.param(line, marks=[pytest.mark.slow] if line.startswith(_SLOW) else [])
        for line in found
    ]


class _Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(30522, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.table(ids) * mask[:, None]


class _Rows(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copy(DATA / "linear_relu.pte", folder / "model.pte")
    np.save(folder / "image.npy", np.ones((2, 5), np.float32))
    np.save(folder / "x.npy", np.ones((17, 5), np.float32))
    size = torch.export.Dim("s0", min=2, max=64)
    with purevk.compile(_Rows(), torch.ones(3, 5), [{0: size}]) as program:
        program.save(folder / "model.pvk")
    inputs = torch.ones(9, dtype=torch.int64), torch.ones(9)
    with purevk.compile(_Encoder(), inputs, [{0: size}, {0: size}]) as program:
        program.save(folder / "encoder.pvk")
    if importlib.util.find_spec("gguf") and importlib.util.find_spec("transformers"):
        from tests.llm.harness import write_llama

        write_llama(folder / "model.gguf", "Q4_1", table="Q8_0", vocabulary=True)
    (folder / "other-cache").mkdir()
    Cache(None).export_bundle(folder / "kernels.zip", [])
    return folder


@pytest.mark.device
@pytest.mark.parametrize("line", _examples())
def test_example(
    cli, files: Path, tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    if line.startswith("purevk chat"):
        pytest.importorskip("tokenizers")
        if not (files / "model.gguf").exists():
            pytest.skip("gguf and transformers are not installed")
    if line.startswith("purevk cache"):
        monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / "cache"))
    command = re.split(r" [|>] ", line)[0]  # what the shell does with the output is its affair
    words = shlex.split(command)[1:]
    words = [name for word in words for name in (sorted(glob.glob(word)) or [word])]
    ran = cli(*words)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_an_example(command: str, cli) -> None:
    out = cli(command, "--help").out
    assert f"  purevk {command}" in out.partition("examples:")[2]


@pytest.mark.skipif(sys.platform == "win32", reason="measures CPU time of a child")
def test_help_needs_no_library() -> None:
    import resource

    def used() -> float:
        times = resource.getrusage(resource.RUSAGE_CHILDREN)
        return times.ru_utime + times.ru_stime

    start = used()
    for command in ("run", "cache"):
        subprocess.run(
            [sys.executable, "-m", "purevk", command, "--help"], check=True, capture_output=True
        )
    assert used() - start < 2 * 0.3

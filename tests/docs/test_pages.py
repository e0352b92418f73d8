"""The code blocks of README.md and of the pages under docs/ run as they are printed: all blocks of
Python, and the commands `purevk` of shell blocks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from purevk import knobs

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
)
_SLOW = ("README.md", "docs/calling.md", "docs/extending.md")
_COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ +)*purevk .*$", re.MULTILINE)


def _blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def _commands(page: str) -> list[str]:
    return [line for block in _blocks(page, "sh") for line in _COMMAND.findall(block)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the files that pages name."""
    shutil.copy(ROOT / "tests" / "data" / "pte" / "linear_relu.pte", tmp_path / "model.pte")
    np.save(tmp_path / "x.npy", np.ones((2, 5), np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.device
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in _SLOW else [])
        for page in PAGES
        if _blocks(page, "python")
    ],
)
def test_the_python_of_a_page_runs(page: str, folder: Path) -> None:
    pytest.importorskip("torch")
    if page == "README.md":
        pytest.importorskip("executorch")
    space: dict[str, Any] = {}
    for block in _blocks(page, "python"):
        exec(compile(block, page, "exec"), space)
    if page == "README.md":
        assert (folder / "half.pte").is_file() and (folder / "model.pvk").is_file()
        assert list(space["program"].state) == ["total"]
    if page == "docs/state.md":
        assert space["y"].tolist() == [2, 2, 2]


@pytest.mark.device
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if _commands(page)])
def test_the_commands_of_a_page_run(page: str, folder: Path) -> None:
    for command in _commands(page):
        done = subprocess.run(
            ["bash", "-c", f'purevk() {{ "{sys.executable}" -m purevk "$@"; }}\n{command}'],
            capture_output=True,
            text=True,
            timeout=300,
            env=knobs.child_environment({"PYTHONPATH": str(ROOT)}),
        )
        assert done.returncode == 0 and done.stdout, f"{command}: {done.stderr}"

"""The code blocks of README.md and of pages under docs/ run as they are printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _run(page: str) -> dict[str, Any]:
    """Runs the Python blocks of a page, in order; what they have defined."""
    text = (ROOT / page).read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, page, "exec"), space)
    return space


@pytest.mark.device
@pytest.mark.export
@pytest.mark.slow
def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("executorch")
    shutil.copy(ROOT / "tests" / "data" / "pte" / "linear_relu.pte", tmp_path / "model.pte")
    monkeypatch.chdir(tmp_path)
    space = _run("README.md")
    assert (tmp_path / "half.pte").is_file() and (tmp_path / "model.pvk").is_file()
    assert list(space["program"].state) == ["total"]


@pytest.mark.device
@pytest.mark.parametrize("page", ["docs/control_flow.md", "docs/formats.md", "docs/state.md"])
def test_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space = _run(page)
    if page == "docs/state.md":
        assert space["y"].tolist() == [2, 2, 2]

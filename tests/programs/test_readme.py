"""The code blocks of README.md run as they are printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.device
@pytest.mark.export
@pytest.mark.slow
def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("executorch")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 6
    shutil.copy(ROOT / "tests" / "data" / "pte" / "linear_relu.pte", tmp_path / "model.pte")
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), space)
    assert (tmp_path / "half.pte").is_file() and (tmp_path / "model.pvk").is_file()
    assert list(space["program"].state) == ["total"]
    space["program"].close()

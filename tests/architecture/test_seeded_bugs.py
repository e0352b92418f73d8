"""The seeded bugs still apply, so that `scripts/seeded_bugs.py` measures what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_they_apply() -> None:
    path = ROOT / "scripts" / "seeded_bugs.py"
    spec = importlib.util.spec_from_file_location("seeded_bugs", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert not script.problems(), "give the bug another text, or another place of its kind"
    assert len(script.BUGS) >= 30
    assert all(bug.right != bug.wrong for bug in script.BUGS)

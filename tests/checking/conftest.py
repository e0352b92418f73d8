"""Files of the debug modes go to a folder of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from purevk import knobs


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Switches PUREVK_CHECK on; gives the folder of its files."""
    monkeypatch.setenv(knobs.CHECK.name, "1")
    monkeypatch.setenv(knobs.DUMP.name, str(tmp_path / "dump"))
    return tmp_path / "dump"

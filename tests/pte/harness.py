"""The committed programs by name."""

from __future__ import annotations

from pathlib import Path

from tests.harness import DATA

NAMES = sorted(path.stem for path in DATA.glob("*.pte"))


def data_files(name: str, folder: Path = DATA) -> list[Path]:
    """The .ptd files that belong to program `name`."""
    return sorted((folder / name).glob("*.ptd"))

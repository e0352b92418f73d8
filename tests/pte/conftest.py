"""Paths of the committed programs, and the settings of the property tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

DATA = Path(__file__).parent.parent / "data" / "pte"
NAMES = sorted(path.stem for path in DATA.glob("*.pte"))

settings.register_profile(
    "pte", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "export: needs torch and executorch to export models anew; slow"
    )


def data_files(name: str, folder: Path = DATA) -> list[Path]:
    """The .ptd files that belong to program `name`."""
    return sorted((folder / name).glob("*.ptd"))

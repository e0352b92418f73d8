"""The cache as it is without environment variables."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PUREVK_CACHE", "PUREVK_SHADERC"):
        monkeypatch.delenv(name, raising=False)

"""The settings of the property tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "pte", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "export: needs torch and executorch to export models anew; slow"
    )

"""The bounds of docs/accuracy.md, with fewer numbers than its script takes."""

from __future__ import annotations

import pytest

from scripts import accuracy

pytestmark = pytest.mark.device


def test_errors_are_within_their_bounds() -> None:
    rows = accuracy.measure(accuracy.operators(), 4096)
    assert len(rows) > 100
    bad = [
        f"{row.name}: {row.error:.2f} > {row.bound:.2f} ulp at {row.at}"
        for row in rows
        if row.error > row.bound
    ]
    assert not bad, "\n".join(bad)

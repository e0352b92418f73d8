"""The page of `bench.growth`, and its limits of time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from bench import growth
from bench.growth_page import device_key, lines_of, replaced, write_page
from bench.networks import Of
from bench.timing import Budget

RESULTS = {
    "machine": {
        "device": "A device (LLVM 15)",
        "driver": "driver 1.2",
        "torch": "2.13",
        "cuda": None,
        "threads": 2,
        "dtype": "float32",
        "cpus": 2,
        "load": 1.5,
        "unix_time": 1795417167,
    },
    "command": "python -m bench.growth",
    "series": [
        {
            "name": "encoder",
            "about": "an encoder layer, by the length",
            "axis": "tokens",
            "points": [
                {
                    "size": 16,
                    "purevk": 2.0,
                    "torch": 1.0,
                    "ratio": 2.0,
                    "nbytes": 3 << 20,
                    "flops": 4_000_000,
                    "error": 2e-7,
                    "why": "",
                },
                {
                    "size": 32,
                    "purevk": None,
                    "torch": None,
                    "ratio": None,
                    "nbytes": None,
                    "flops": None,
                    "error": None,
                    "why": "no time was left",
                },
            ],
        }
    ],
    "nodes": [],
    "recordings": [],
    "why": {},
}


def test_tables() -> None:
    lines = lines_of(RESULTS, None)
    assert lines[0] == "## Growth with size: A device (LLVM 15), 2026-11-23"
    assert "| 16 | 2 | 1 | 2 | 2 | 3 | 2e-07 |" in lines
    assert "Left out: 32: no time was left." in lines
    assert max(map(len, lines)) <= 100
    assert "so other work disturbed it" in " ".join(lines)


def test_a_part_of_the_page_is_replaced(tmp_path: Path) -> None:
    assert device_key(RESULTS["machine"]["device"]) == "a-device"
    page = tmp_path / "RESULTS.md"
    page.write_text("# Title\n\n## Before\n")
    write_page(RESULTS, tmp_path)
    once = page.read_text() + "\n## After\n"
    page.write_text(once)
    write_page(RESULTS, tmp_path)
    assert page.read_text() == once
    assert replaced(once, "a-device", "new").count("## ") == 2
    assert replaced(once, "other", "new").endswith("<!-- end of growth on other -->\n")


def series(sizes: tuple[int, ...]) -> growth.Series:
    return growth.Series(
        "tanh", "tanh", "elements", sizes, lambda n: (Of(torch.tanh), (torch.randn(n),))
    )


@pytest.mark.device
def test_points(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = growth.measure_series(series((64, 4096)), torch.float32, Budget(60.0), 0.0)
    for point in (small, large):
        assert point.purevk > 0 and point.torch > 0 and point.error < 1e-5 and not point.why
    assert large.nbytes > small.nbytes
    monkeypatch.setattr(growth, "device_bytes", lambda context: 16_000)
    small, large = growth.measure_series(series((64, 4096)), torch.float32, Budget(60.0), 0.0)
    assert small.purevk > 0 and large.purevk is None
    assert "GiB of the device's memory" in large.why


@pytest.mark.device
def test_without_time_nothing_is_measured() -> None:
    (point,) = growth.measure_series(series((64,)), torch.float32, Budget(0.0), 0.0)
    assert point.purevk is None and point.why == "no time was left"


@pytest.mark.device
def test_recordings() -> None:
    rows = list(growth.measure_recordings((1, 3)))
    assert [(row["recordings"], row["recorded_again"]) for row in rows] == [(1, 0), (3, 0)]
    assert all(row["call"] > 0 for row in rows)


@pytest.mark.device
def test_nodes() -> None:
    from bench.nodes import measure

    row = measure(20)
    assert row["nodes"] >= 20 and row["dispatches"] > 0
    assert all(row[name] > 0 for name in ("load", "passes", "lower", "record", "call"))

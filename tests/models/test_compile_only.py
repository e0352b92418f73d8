"""Kernels compile with drivers whose hardware is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from purevk import knobs
from tests.harness import DATA, ROOT

RADV = list(Path("/usr/share/vulkan/icd.d").glob("radeon_icd*.json"))


def _compile_only(out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What `scripts/compile_only.py` writes and prints. Fails if it does not end cleanly."""
    command = [sys.executable, str(ROOT / "scripts" / "compile_only.py"), *arguments]
    made = subprocess.run(
        [*command, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env=knobs.child_environment({"PYTHONPATH": str(ROOT), knobs.DEVICE.name: ""}),
    )
    assert made.returncode == 0, made.stdout + made.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found, made.stdout


@pytest.mark.slow
@pytest.mark.skipif(not RADV, reason="Mesa's driver for AMD is not installed")
@pytest.mark.parametrize(
    ("family", "model"),
    [("gfx1100", str(DATA / "linear_relu_half.pte")), ("vega10", "transformer")],
    ids=["gfx1100", "vega10"],
)
def test_kernels_compile_on_the_null_device_of_radv(
    tmp_path: Path, family: str, model: str
) -> None:
    found, text = _compile_only(tmp_path / "found.json", "--radv", family, model)
    assert family.upper() in found["device"] and "RADV" in found["device"]
    assert found["statistics"] and found["not_lowered"] == {}
    assert len(found["pipelines"]) > 2
    for row in found["pipelines"]:
        assert row["failed"] is None and row["models"] == [Path(model).name]
        (executable,) = row["executables"]
        statistics = executable["statistics"]
        assert statistics["VGPRs"] > 0 and statistics["Code size"] > 0
        assert statistics["Subgroups per SIMD"] > 0 and statistics["Spilled VGPRs"] >= 0
        assert row["template"] in text
    assert "0 not compiled, 0 models not lowered" in text


@pytest.mark.slow
@pytest.mark.device
def test_a_driver_without_statistics_compiles_too(tmp_path: Path) -> None:
    """On the picked device, which may tell no statistics."""
    model = str(DATA / "linear_relu_half.pte")
    found, text = _compile_only(tmp_path / "found.json", model)
    assert found["pipelines"] and all(row["failed"] is None for row in found["pipelines"])
    told = all(row["executables"] for row in found["pipelines"])
    assert found["statistics"] == told != ("tells no statistics" in text)

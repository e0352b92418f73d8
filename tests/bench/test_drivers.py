"""The table of devices: what it says of a row, and the facts that kernels are made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.drivers import __main__ as drivers
from bench.drivers.kernels import traits_from, write_kernels
from bench.drivers.page import findings, spilled, status
from bench.drivers.rows import ROWS, Row
from tests.harness import DATA

LAVAPIPE = Row("lavapipe", "CPU", "lvp", runs=True)


def _row(**more: Any) -> dict[str, Any]:
    made = {"pipelines": 3, "refused": {}, "templates": {}}
    traits = {"coopmat_shape": None}
    row = {"opened": True, "pipelines": made, "invalid": {}, "not_lowered": {}, "traits": traits}
    return {**row, **more}


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (_row(models={"errors": {"vit": 1e-6}, "failed": {}}), "executed and compared"),
        (_row(models={"errors": {}, "failed": {"vit": "it crashed"}}), "pipelines created"),
        (_row(), "pipelines created"),
        ({"opened": False, "reason": "no such driver"}, "assumed"),
    ],
)
def test_a_row_says_what_was_shown(row: dict[str, Any], said: str) -> None:
    assert status(row) == said


def test_findings_name_what_is_wrong() -> None:
    wrong = {"vit": "error 0.5", "bert": "it crashed"}
    text = findings(
        _row(
            models={"errors": {"vit": 0.5, "gpt2": 1e-6}, "failed": wrong},
            traits={"coopmat_shape": [16, 8, 16]},
            pipelines={
                "pipelines": 3,
                "refused": {"out of registers": ["conv/conv2d.comp"]},
                "templates": {"conv/conv2d.comp": {"Spilled VGPRs": 4}, "sort/sort.comp": {}},
            },
        )
    )
    assert "1 of 3 models right (bert, vit)" in text and "3 of 4 pipelines" in text
    assert "matrix cores: 16 x 8 x 16; spills: `conv/conv2d.comp`" in text
    assert spilled({"a": {"Spills": 0, "Code size": 100}, "b": {"Scratch": 16}}) == ["`b`"]


@pytest.mark.device
@pytest.mark.slow
def test_a_driver_of_this_system_gets_its_own_kernels(tmp_path: Path) -> None:
    facts = drivers.facts_of(LAVAPIPE)
    assert "llvmpipe" in facts["device"]
    traits = traits_from(facts)
    assert (
        traits.profile.name == "software"
        and traits.subgroup_size == facts["traits"]["subgroup_size"]
    )
    kernels, failed = write_kernels(facts, [DATA / "topk.pte"], tmp_path / "kernels")
    assert kernels and not failed
    made = drivers.pipelines_of(LAVAPIPE, kernels, tmp_path / "kernels")
    assert made["pipelines"] == len(kernels) and not made["refused"]
    # What a driver refuses is told, and the others are made.
    (tmp_path / "kernels" / kernels[0]["spirv"]).write_bytes(b"no SPIR-V at all")
    made = drivers.pipelines_of(LAVAPIPE, kernels, tmp_path / "kernels")
    assert made["pipelines"] < len(kernels)
    assert any(kernels[0]["template"] in names for names in made["refused"].values())


def test_data_and_page_agree() -> None:
    data = json.loads(drivers.DATA.read_text(encoding="utf-8"))
    assert set(data["rows"]) <= {row.name for row in ROWS}
    for row in data["rows"].values():
        assert status(row) in (
            "executed and compared",
            "pipelines created",
            "translated",
            "assumed",
        )

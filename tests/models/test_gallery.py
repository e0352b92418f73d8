"""The gallery of models: the smallest agree with eager torch in one GPU segment, and the table has
all of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent.parent


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("models_script", ROOT / "scripts" / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check(name: str, ways: tuple[str, ...]) -> None:
    from tests.models.gallery import MODELS

    row = _script().run_model(MODELS[name], ways, None)
    for way in ways:
        made = row[way]
        assert "failed" not in made, made
        assert made["error"] <= row["tolerance"]
        assert (made["segments"], made["cpu"]) == (1, {})
        assert not made.get("eager")


@pytest.mark.device
@pytest.mark.parametrize("name", ["recommender", "wavenet"])
def test_small_models_agree_in_one_segment(name: str) -> None:
    _check(name, ("compile",))


@pytest.mark.slow
@pytest.mark.device
@pytest.mark.parametrize(
    "name", ["dcgan_generator", "graph_network", "selective_scan", "yolo_head"]
)
def test_more_models_agree_in_one_segment(name: str) -> None:
    _check(name, ("compile",))


@pytest.mark.slow
@pytest.mark.device
@pytest.mark.parametrize("name", ["gat", "vq_vae"])
def test_models_agree_through_dynamo_in_one_segment(name: str) -> None:
    _check(name, ("compile", "torch.compile"))


@pytest.mark.slow
@pytest.mark.device
@pytest.mark.export
@pytest.mark.parametrize("name", ["bert", "gemma2_cached", "falcon"])
def test_models_of_transformers_agree_in_one_segment(name: str) -> None:
    pytest.importorskip("transformers")
    _check(name, ("compile",))


@pytest.mark.slow
@pytest.mark.device
@pytest.mark.export
def test_a_small_model_agrees_as_a_file() -> None:
    pytest.importorskip("executorch")
    _check("super_resolution", ("pte",))


def test_the_table_is_of_the_gallery() -> None:
    """docs/data/models.json has models of the gallery alone, in its order, and no wrong one."""
    from tests.models.gallery import MODELS

    rows = json.loads((ROOT / "docs" / "data" / "models.json").read_text(encoding="utf-8"))[
        "models"
    ]
    assert list(rows) == [name for name in MODELS if name in rows]
    assert len(rows) >= 180
    for name, row in rows.items():
        assert "compile" in row, name
        for way in ("compile", "torch.compile", "pte"):
            assert row.get(way, {}).get("error", 0.0) <= row["tolerance"], (name, way)


def test_differences_are_relative_to_the_largest_output() -> None:
    error = _script().relative_error
    wanted = [torch.tensor([1.0, -4.0]), torch.tensor([2])]
    assert error([torch.tensor([1.0, -3.0]), torch.tensor([2])], wanted) == 0.25
    assert error([torch.tensor([1.0, float("nan")]), torch.tensor([2])], wanted) == float("inf")
    assert error([torch.tensor([1.0])], wanted) == float("inf")

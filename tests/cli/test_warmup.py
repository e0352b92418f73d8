"""`purevk warmup`: nothing is compiled twice, and a bundle serves where there is no compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from purevk import knobs

pytestmark = pytest.mark.device


def test_the_second_time_all_is_there(
    cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.CACHE_DIR.name, str(tmp_path))
    cold = cli("warmup", data / "topk.pte", data / "dynamic_views.pte", "--json").json
    first, second = cold["models"]
    assert (
        first["compiled"] == first["modules"] > 0
        and first["cached"] == 0
        and first["pipelines"] > 0
    )
    warm = cli("warmup", data / "topk.pte", data / "dynamic_views.pte", "--json").json
    assert [(m["compiled"], m["cached"]) for m in warm["models"]] == [
        (0, first["modules"]),
        (0, second["modules"]),
    ]
    text = cli("warmup", data / "topk.pte").out
    assert "topk.pte" in text and str(tmp_path) in text
    # What it made ready is all that loading needs.
    monkeypatch.setenv(knobs.SHADERC.name, "/nonexistent")
    ran = cli("run", data / "dynamic_views.pte")
    assert ran.code == 0, ran.err


def test_a_bundle_serves_where_there_is_no_compiler(
    cli, data: Path, tmp_path: Path, monkeypatch
) -> None:
    bundle = tmp_path / "kernels.zip"
    made = cli(
        "warmup", data / "dynamic_views.pte", data / "topk.pte", "--bundle", bundle, "--json"
    ).json
    modules = made["bundle"]["entries"]
    assert (
        modules <= sum(model["modules"] for model in made["models"])
        and made["bundle"]["bytes"] == bundle.stat().st_size
    )
    monkeypatch.setenv(knobs.CACHE_DIR.name, str(tmp_path / "other"))
    monkeypatch.setenv(knobs.SHADERC.name, "/nonexistent")
    ran = cli("run", data / "dynamic_views.pte")
    assert ran.code == 1 and "PUREVK_SHADERC" in ran.err
    ran = cli("warmup", "--from-bundle", bundle)
    assert ran.code == 0 and f"{modules} modules copied from" in ran.out
    assert cli("run", data / "dynamic_views.pte").code == 0
    (model,) = cli("warmup", data / "topk.pte", "--from-bundle", bundle, "--json").json["models"]
    assert model["compiled"] == 0


def test_without_a_cache_on_disk(
    cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.CACHE.name, "0")
    ran = cli("warmup", data / "dynamic_views.pte")
    assert ran.code == 0 and "nothing was kept on disk" in ran.out
    assert cli("warmup", data / "dynamic_views.pte", "--bundle", tmp_path / "b.zip").code == 0


@pytest.mark.parametrize(
    "arguments, what",
    [
        ([], "nothing to warm up"),
        (["--bundle", "b.zip"], "nothing to warm up"),
        (["--from-bundle", "none.zip"], "the file is no purevk bundle"),
    ],
)
def test_what_is_refused(cli, arguments: list[str], what: str) -> None:
    ran = cli("warmup", *arguments)
    assert ran.code == 1 and what in ran.err


def test_a_bundle_that_cannot_be_written(cli, data: Path, tmp_path: Path) -> None:
    ran = cli("warmup", data / "dynamic_views.pte", "--bundle", tmp_path / "none" / "b.zip")
    assert ran.code == 1 and "the bundle cannot be written" in ran.err

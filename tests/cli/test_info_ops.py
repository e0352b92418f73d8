"""`purevk info` and `purevk ops`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from purevk import api, knobs
from purevk.api.features import FEATURES
from purevk.errors import DeviceError
from purevk.graph.context import profile_of
from purevk.ops import registry


@pytest.mark.device
def test_info(cli, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_DISABLE", "float16")
    found = cli("info", "--json").json
    with api.Instance() as instance:
        assert [each["name"] for each in found["devices"]] == [
            each.name for each in instance.physical_devices
        ]
        assert found["picked"] == instance.pick().index
        for each, physical in zip(found["devices"], instance.physical_devices):
            profile, shown = profile_of(physical), each["profile"]
            assert list(shown) == [field.name for field in fields(profile)]
            assert shown["loads_in_flight"] == profile.loads_in_flight
            assert shown["matmul"]["vector"] == profile.matmul.vector._asdict()
            assert shown["tiles"]["tiled"] == [each._asdict() for each in profile.tiles.tiled]
    features = {row["name"]: row for row in found["features"]}
    assert list(features) == [row.name for row in FEATURES] and features["float16"]["on"] is False
    assert found["cache"]["folder"] == str(cache_folder) and found["device_error"] is None
    text = cli("info").out
    assert "<- picked" in text and "bindings of up to" in text and str(cache_folder) in text
    off = next(line for line in text.splitlines() if "features off" in line)
    assert "float16" in off and "storage_16bit" not in text and "loads_in_flight" not in text
    if len(found["devices"]) == 1:
        assert len(text.splitlines()) <= 17
    everything = cli("info", "--all").out
    if features["float16"]["offered"]:
        assert "off (disabled)" in everything
    assert f"profile of device {found['picked']}" in everything
    assert "storage_16bit" in everything and "prefers_word_access" in everything
    assert "loads_in_flight" in everything and "matmul.tiled.start" in everything


@pytest.mark.device
def test_info_of_a_device_that_is_not_there(cli) -> None:
    ran = cli("info", "--device", "foo")
    assert ran.code == 0 and "No Vulkan device fits 'foo'" in ran.out
    found = cli("info", "--device", "foo", "--json").json
    assert found["picked"] is None and found["device_error"]["type"] == "DeviceError"
    assert found["devices"] and found["devices"][0]["name"] in ran.out


@pytest.mark.device
def test_info_of_a_forced_profile(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.PROFILE.name, "mobile")
    assert {each["profile"]["name"] for each in cli("info", "--json").json["devices"]} == {"mobile"}


def test_info_where_nothing_is_installed(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loader() -> None:
        raise DeviceError(
            "No Vulkan loader on this machine", why="none was found", next="install one"
        )

    monkeypatch.setattr("purevk.api.vk.library", no_loader)
    monkeypatch.setenv(knobs.SHADERC.name, "/nonexistent")
    ran = cli("info")
    assert (
        ran.code == 0
        and "No Vulkan loader" in ran.out
        and "install one" in ran.out
        and "purevk doctor" in ran.out
    )
    found = cli("info", "--json").json
    assert found["devices"] == [] and found["device_error"]["type"] == "DeviceError"
    assert found["compiler"]["error"]["type"] == "ShaderCompilerError"


def test_ops_are_the_rows(cli) -> None:
    found = cli("ops", "--json").json["operators"]
    assert [row["operator"] for row in found] == [row.name for row in registry.definitions()]
    by_name = {row["operator"]: row for row in found}
    assert (
        by_name["aten.add.Tensor"]["form"] == "pointwise"
        and "aten.add.Scalar" in by_name["aten.add.Tensor"]["names"]
    )
    assert by_name["aten.view.default"]["form"] == "view"


@pytest.mark.parametrize(
    "pattern, holds", [("relu", True), ("aten.relu.*", True), ("*.sigmoid.*", False)]
)
def test_ops_by_name(cli, pattern: str, holds: bool) -> None:
    names = [row["operator"] for row in cli("ops", pattern, "--json").json["operators"]]
    assert ("aten.relu.default" in names) is holds and "aten.add.Tensor" not in names


@pytest.mark.parametrize("pattern", ["nonsense", "*.relu"])
def test_ops_without_a_match(cli, pattern: str) -> None:
    ran = cli("ops", pattern)
    assert ran.code == 1 and repr(pattern) in ran.err and "`purevk ops` lists them" in ran.err


def test_ops_of_a_model(cli, data: Path, unregister_topk) -> None:
    (method,) = cli("ops", "--check", data / "topk.pte", "--no-device", "--json").json["methods"]
    where = {row["operator"]: (row["on"], row["nodes"], row["why"]) for row in method["operators"]}
    assert where["aten.topk.default"] == ("cpu", 1, "no kernel")
    assert where["aten.sigmoid.default"] == ("gpu", 1, None)
    text = cli("ops", "--check", data / "topk.pte", "--no-device").out
    assert "1 on the CPU" in text
    (method,) = cli("ops", "top*", "--check", data / "topk.pte", "--no-device", "--json").json[
        "methods"
    ]
    assert method["operators"] == []


def test_ops_of_a_model_that_cannot_run(cli, foreign: Path) -> None:
    ran = cli("ops", "--check", foreign, "--no-device")
    assert ran.code == 1 and "CoreMLBackend" in ran.out

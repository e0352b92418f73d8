"""`purevk report`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from purevk.cli.commands import COMMANDS


def contents_of(path: Path) -> dict[str, Any]:
    """The data of a page."""
    text = path.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(data)


@pytest.mark.device
def test_a_page_with_times(cli, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    ran = cli("report", data / "linear_relu.pte", "-o", path, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["output"] == str(path) and ran.json["bytes"] == path.stat().st_size
    assert ran.json["timed"] == ran.json["methods"] == ["forward"]
    found = contents_of(path)
    assert found["model"] == "linear_relu.pte"
    assert found["device"]["name"] == ran.json["device"]["name"]
    assert found["device"]["limits"]["bytes_per_second"] > 0
    (method,) = found["methods"]
    on_gpu = [each for each in method["graph"]["segments"] if each["on"] == "gpu"]
    (dispatch,) = [each for s in on_gpu for node in s["nodes"] for each in node["dispatches"]]
    assert 0 < dispatch["seconds"] < 1 and method["whole_call"] > 0
    spirv = found["kernels"][dispatch["kernel"]]["spirv"]
    assert spirv["instructions"] > 10 and "Shader" in spirv["capabilities"]


@pytest.mark.device
def test_a_device_without_timestamps(
    cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUREVK_DISABLE", "timestamp")
    path = tmp_path / "page.html"
    ran = cli("report", data / "linear_relu.pte", "-o", path)
    assert ran.code == 0 and "forward was not timed: the device has no timestamps" in ran.out
    (method,) = contents_of(path)["methods"]
    assert not method["timed"] and method["why_untimed"] == "the device has no timestamps"


@pytest.mark.device
def test_all_methods_without_times(cli, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    words = ("report", data / "two_methods.pte", "--output", path, "--no-times")
    text = cli(*words).out
    assert "page.html" in text and "KiB" in text
    found = contents_of(path)
    names = [each["name"] for each in found["methods"]]
    assert len(names) == 2 and found["device"]["limits"] is None
    assert not any(each["timed"] for each in found["methods"])
    assert cli(*words, "--method", names[1]).code == 0
    assert [each["name"] for each in contents_of(path)["methods"]] == names[1:]


def test_a_page_without_a_device(
    cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli("report", data / "dynamic_views.pte", "--no-device", "--json")
    assert ran.code == 0 and ran.json["device"] is None and not ran.json["timed"]
    found = contents_of(tmp_path / "report.html")
    assert found["device"] == {
        "name": "a typical desktop GPU",
        "kind": None,
        "driver": "",
        "limits": None,
    }
    assert all(kernel["spirv"] is None for kernel in found["kernels"])
    assert "s1 is 8" in [each["words"] for each in found["methods"][0]["guards"]]


@pytest.mark.device
def test_the_examples_of_the_help(
    cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(data / "linear_relu.pte", "model.pte")
    (command,) = [each for each in COMMANDS if each.name == "report"]
    examples = [line.split()[1:] for line in command.epilog.splitlines()[1:]]
    assert len(examples) == 4
    for words in examples:
        if "encoder.pvk" not in words:
            ran = cli(*words)
            assert ran.code == 0, ran.err
    assert {path.name for path in tmp_path.iterdir()} == {"model.pte", "report.html", "model.html"}


def test_what_is_refused(cli, data: Path, tmp_path: Path) -> None:
    ran = cli("report", data / "linear_relu.pte", "--no-device", "-o", tmp_path / "no" / "x.html")
    assert ran.code == 1 and "the page cannot be written" in ran.err
    ran = cli("report", data / "two_methods.pte", "--no-device", "--method", "third")
    assert ran.code == 1 and "there is no method 'third'" in ran.err
    assert list(tmp_path.iterdir()) == []

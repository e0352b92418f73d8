"""The Pythons that are supported are the same in the metadata, the scripts, the workflows and the
pages."""

from __future__ import annotations

import re

import pytest

from tests.harness import ROOT

_CLASSIFIED = re.findall(
    r'"Programming Language :: Python :: 3\.(\d+)"', (ROOT / "pyproject.toml").read_text("utf-8")
)
MINORS = sorted(map(int, _CLASSIFIED))
RANGE = f"3.{MINORS[0]} to 3.{MINORS[-1]}"


def test_the_metadata_has_a_range_of_versions() -> None:
    assert list(range(MINORS[0], MINORS[-1] + 1)) == MINORS
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'requires-python = ">=3.{MINORS[0]}"' in text


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/start/five_minutes.md", "docs/help/devices.md", "packaging/README.md"],
)
def test_pages_name_the_range(page: str) -> None:
    assert RANGE in (ROOT / page).read_text("utf-8")


@pytest.mark.parametrize("script", ["scripts/setup.sh", "scripts/wheels.sh"])
def test_scripts_look_for_each(script: str) -> None:
    text = (ROOT / script).read_text("utf-8")
    assert {int(minor) for minor in re.findall(r"\bpython3\.(\d+)\b", text)} == set(MINORS)


def test_the_setup_accepts_the_range() -> None:
    text = (ROOT / "scripts" / "setup.sh").read_text("utf-8")
    assert f"(3, {MINORS[0]}) <= sys.version_info[:2] <= (3, {MINORS[-1]})" in text
    assert set(re.findall(r"3\.\d+ to 3\.\d+", text)) == {RANGE}


@pytest.mark.parametrize("workflow", ["tests.yml", "wheels.yml"])
def test_workflows_run_the_oldest_and_the_newest(workflow: str) -> None:
    text = (ROOT / ".github" / "workflows" / workflow).read_text("utf-8")
    for listed in re.findall(r"python: \[(.*)\]", text):
        minors = [int(minor) for minor in re.findall(r'"3\.(\d+)"', listed)]
        assert (minors[0], minors[-1]) == (MINORS[0], MINORS[-1])

"""The pages that are made from tables, and docs/cli.md against the arguments that there are."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from purevk.cli import load_commands, make_parser

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def make_docs():
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_made_pages_are_not_stale() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/make_docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_a_stale_page_is_found(make_docs, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(make_docs.stale())
    monkeypatch.setitem(make_docs.PAGES, "docs/knobs.md", lambda: "something else")
    assert set(make_docs.stale()) == before | {"docs/knobs.md"}


def test_etvk_names(make_docs) -> None:
    table = {"aten.view_copy": "", "aten.div": "", "aten.div.Tensor_mode": "a limit"}
    assert make_docs.etvk_names(["aten.view.default"], table) == ["aten.view_copy"]
    assert make_docs.etvk_names(["aten.div.Tensor", "aten.div.Scalar"], table) == ["aten.div"]
    assert make_docs.etvk_names(["aten.div.Tensor_mode"], table) == ["aten.div.Tensor_mode"]
    assert make_docs.etvk_names(["aten.acos.default"], table) == []


@pytest.mark.parametrize("command", load_commands(), ids=lambda command: command.name)
def test_every_argument_is_described(command) -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    part = text.split(f"\n## {command.name}\n")[1].split("\n## ")[0]
    usage = part.split("```")[1]
    (subparsers,) = [action for action in make_parser()._actions if action.dest == "command"]
    for action in subparsers.choices[command.name]._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if names and names[0] not in ("--help", "--json", "--traceback", "--load-only"):
            assert names[0] in (usage if names[0] != "--from-bundle" else part), names[0]

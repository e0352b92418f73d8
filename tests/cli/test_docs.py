"""The pages that are made from tables, and docs/cli.md against the arguments that there are."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from purevk.cli import make_parser
from purevk.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def make_docs():
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_made_pages_are_not_stale() -> None:
    pytest.importorskip("executorch")  # the API page describes its partitioner
    done = subprocess.run(
        [sys.executable, "scripts/make_docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_a_stale_page_is_found(make_docs, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/knobs.md"
    monkeypatch.setattr(make_docs, "PAGES", {page: make_docs.PAGES[page]})
    assert make_docs.stale() == []
    monkeypatch.setitem(make_docs.PAGES, page, lambda: "something else")
    assert make_docs.stale() == [page]


def test_etvk_names(make_docs) -> None:
    table = {"aten.view_copy": "", "aten.div": "", "aten.div.Tensor_mode": "a limit"}
    assert make_docs.etvk_names(["aten.view.default"], table) == ["aten.view_copy"]
    assert make_docs.etvk_names(["aten.div.Tensor", "aten.div.Scalar"], table) == ["aten.div"]
    assert make_docs.etvk_names(["aten.div.Tensor_mode"], table) == ["aten.div.Tensor_mode"]
    assert make_docs.etvk_names(["aten.acos.default"], table) == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_argument_is_described(command) -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    part = text.split(f"\n## {command.name}\n")[1].split("\n## ")[0]
    usage = part.split("```")[1]
    (subparsers,) = [action for action in make_parser()._actions if action.dest == "command"]
    for action in subparsers.choices[command.name]._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if names and names[0] not in ("--help", "--json", "--traceback", "--import", "--load-only"):
            assert names[0] in (usage if names[0] != "--from-bundle" else part), names[0]


@pytest.mark.parametrize(
    "page",
    [
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "bench" / "RESULTS.md",
        ROOT / "packaging" / "README.md",
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_lines_and_links_of_pages(page: Path) -> None:
    """Lines have at most 100 columns, except tables and printed graphs; links lead somewhere."""
    text = page.read_text(encoding="utf-8")
    long = [line for line in text.splitlines() if len(line) > 100 and line[0] not in "|%"]
    assert long == []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if target.startswith("http"):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            made = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
            assert anchor in made, f"{target}#{anchor}"

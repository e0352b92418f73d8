"""The documentation site: it builds without a warning, loads nothing from other hosts, and covers the
public names and errors."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import purevk

ROOT = Path(__file__).parents[2]
TROUBLES = (ROOT / "docs" / "help" / "troubleshooting.md").read_text(encoding="utf-8")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / path).is_file(), page
    assert (site / "changelog.html").is_file()


def test_links_and_pictures_of_the_site_lead_somewhere(site: Path) -> None:
    anchors: dict[Path, set[str]] = {}
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    for path, text in pages.items():
        anchors[path] = set(re.findall(r'\bid="?([^"\s>]+)', text))
    for path, text in pages.items():
        if path.name == "404.html":
            continue
        links = re.findall(r'\b(?:href|src)="?([^"\s>]+)', text)
        assert len(links) > 20
        for link in links:
            target, _, anchor = link.partition("#")
            if re.match(r"\w+:", target):
                continue
            found = (path.parent / target).resolve() if target else path
            assert found.is_file(), f"{path}: {link}"  # a folder is no page without a server
            if anchor and found.suffix == ".html" and not anchor.startswith("__"):
                assert anchor in anchors[found], f"{path}: {link}"


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\bsrc="?([^"\s>]+)', text)
        loaded += re.findall(r'<link[^>]*\bhref="?([^"\s>]+)', text)
        assert not [link for link in loaded if link.startswith(("http", "//"))], path


def test_the_hook_moves_links_and_leaves_code() -> None:
    pytest.importorskip("mkdocs")
    links = _script("site_links")
    text = "[a](../CHANGELOG.md#x) `[b](../c.md)`\n```text\n[d](e.md)\n```\n[f]: purevk/g.py\n"
    assert links.targets(text) == ["../CHANGELOG.md", "purevk/g.py"]
    assert links.name_of("CHANGELOG.md") == "changelog.md"
    assert links.name_of("docs/start/which.md") == "start/which.md"
    assert links.name_of("deploy/serve.py") == "files/deploy/serve.py"
    assert links.source_of("results.md") == "bench/RESULTS.md"


def test_pictures_are_not_stale() -> None:
    assert _script("draw_docs").stale() == []


def test_pictures_are_small() -> None:
    for path in (ROOT / "docs" / "pictures").iterdir():
        assert path.stat().st_size < 200_000, path.name


def test_the_api_page_has_all_public_names() -> None:
    api = _script("api_page")
    listed = {
        name
        for _, module, names in api.SECTIONS.values()
        if module in ("purevk", "purevk.runtime")
        for name in names
    }
    assert listed | set(api.errors()) | {"ops"} == set(purevk.__all__)
    operators = set(api.SECTIONS["Your own operators"][2])
    assert operators | {"DType", "ShapeError"} == set(purevk.ops.__all__)


def test_every_error_has_an_entry() -> None:
    headings = set(re.findall(r"^### (\w+)$", TROUBLES, re.MULTILINE))
    errors = {name for name in purevk.__all__ if name.endswith("Error")}
    assert headings == errors


def test_the_page_of_errors_has_what_errors_say() -> None:
    found = _script("error_page").messages()
    raised = {name for name in purevk.__all__ if name.endswith("Error")}
    assert set(found) >= raised - {"ValidationError"} and sum(map(len, found.values())) > 400
    with pytest.raises(purevk.InputError) as caught:
        purevk.compile(3)
    error = caught.value
    (row,) = [each for each in found["InputError"] if each.what == "method … is made of …"]
    assert row.why == error.why and row.next == error.next
    assert all(each.what.strip("… ") for rows in found.values() for each in rows)


@functools.cache
def _texts() -> str:
    """All texts of the package's source, the parts of f-strings between their fields."""
    found = []
    for path in (ROOT / "purevk").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%\w", "\0", node.value))
    return "\n".join(found)


def _messages() -> list[str]:
    tables = re.findall(r"^\| (`.*?) \| ", TROUBLES, re.MULTILINE)
    return [message for cell in tables for message in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("message", _messages())
def test_the_messages_of_the_page_are_those_of_the_source(message: str) -> None:
    parts = [part.strip() for part in message.split("\u2026")]
    assert any(len(part) > 3 for part in parts)
    for part in filter(None, parts):
        assert part in _texts(), part


def test_a_wrong_message_would_be_found() -> None:
    assert len(_messages()) > 70
    assert "no Vulkan driver was seen on this computer" not in _texts()


def test_the_figures_of_the_performance_page_are_measured() -> None:
    page = (ROOT / "docs" / "help" / "performance.md").read_text(encoding="utf-8")
    expected = page.split("## What to expect")[1].split("## Measure")[0]
    figures = set(re.findall(r"(?<![\w.])\d+\.\d+", expected)) - {"1.1"}  # billion parameters
    results = (ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8")
    assert len(figures) > 20
    assert figures <= set(re.findall(r"(?<![\w.])\d+\.\d+", results))

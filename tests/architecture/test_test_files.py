"""Where tests are, and where what they share is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PACKAGE = ROOT / "purevk"
# Folders that mirror no package: rules, programs and models that tests run, changed files, what is beside
# purevk/, and what a type checker of a user sees.
OTHERS = {"architecture", "bench", "data", "deploy", "docs", "fuzz", "models", "typing"}
# Parts of a package whose tests would not fit into one folder.
TOPICS = {
    "program/control",
    "program/devices",
    "program/memory",
    "program/quantized",
    "program/signatures",
}
MOST_FILES = 22  # of a folder, so that one finds the way around
FOLDERS = sorted(
    path.relative_to(TESTS).as_posix()
    for path in TESTS.rglob("*")
    if path.is_dir()
    and path.name != "__pycache__"
    and path.relative_to(TESTS).parts[0] not in OTHERS
    and path.relative_to(TESTS).as_posix() not in TOPICS
)


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, and the names that it imports from them, in full."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (f"{alias.name}.*" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", ["bench", "scripts", "tests"])
def test_only_harness_files_are_shared(folder: str) -> None:
    """What several files use is in a harness, not in a file of tests or fixtures."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name in imported(path):
            modules = name.split(".")[:-1]
            shared = [each for each in modules if each.startswith("test_") or each == "conftest"]
            assert shared == [], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_mirror_the_package(folder: str) -> None:
    assert (PACKAGE / folder).is_dir() or (PACKAGE / f"{folder}.py").is_file()


def test_folders_stay_small() -> None:
    """`purevk/` and `tests/` themselves have what belongs to no package."""
    folders = [path for root in (PACKAGE, TESTS) for path in root.rglob("*") if path.is_dir()]
    for folder in folders:
        files = [path for path in folder.glob("*") if path.suffix in (".py", ".comp", ".glslh")]
        assert len(files) <= MOST_FILES, f"{folder.relative_to(ROOT)} has {len(files)} files"


def test_files_beside_the_folders_mirror_modules() -> None:
    for path in TESTS.glob("test_*.py"):
        assert (PACKAGE / path.name.removeprefix("test_")).is_file(), path.name

"""The list of private names of torch that purevk uses is complete, and this torch has them."""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from purevk.frontends import private_names
from purevk.frontends.private_names import NAMES, NEWEST, is_newer, missing, warn_once
from tests.harness import ROOT


def _private(name: str) -> bool:
    parts = name.split(".")
    return parts[:2] != ["torch", "ops"] and any(
        part.startswith("_") and not part.startswith("__") for part in parts
    )


def _names(tree: ast.AST) -> Iterator[str]:
    """The dotted names of torch in a module: imports, and attributes of `torch`."""
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            if node.level == 0 and node.module.split(".")[0] == "torch":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "torch")
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            parts, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                inner.add(id(value))
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id == "torch":
                yield ".".join(["torch", *reversed(parts)])


def _used() -> set[str]:
    return {
        name
        for path in (ROOT / "purevk").rglob("*.py")
        for name in _names(ast.parse(path.read_text(encoding="utf-8")))
        if _private(name)
    }


def test_the_list_is_complete_and_has_no_more() -> None:
    assert sorted(_used()) == sorted(NAMES)


def test_this_torch_has_them() -> None:
    pytest.importorskip("torch")
    assert missing() == ()


@pytest.mark.parametrize(
    ("version", "newer"),
    [("2.9.1", False), (NEWEST, False), ("2.14.9+cpu", False), ("99.0.0", True), ("2.99.0a0+git", True)],
)  # fmt: skip
def test_versions_are_compared_as_numbers(version: str, newer: bool) -> None:
    assert is_newer(version) is newer


def test_an_unknown_torch_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = importlib.import_module("torch")
    monkeypatch.setattr(private_names, "_warned", False)
    monkeypatch.setattr(torch, "__version__", "99.1.0")
    with pytest.warns(RuntimeWarning, match=r"torch 99\.1\.0 is newer than"):
        warn_once()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_once()

"""Counts assigned names that do not say what they hold: `count_words.py [FOLDER] [--files N]`.

Assigned names are variables, attributes, parameters and targets of loops, `with` and `except`. A name
counts once per scope. Such words cannot be searched for.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
WORDS = frozenset("made found each given known held kept rest wanted taken one other".split())
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Module)
_SCOPES += (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def assigned_names(tree: ast.AST) -> list[tuple[str, int]]:
    """The names that are assigned in each scope, with the line of the first assignment."""
    names: list[tuple[str, int]] = []

    def visit(node: ast.AST, scope: dict[str, int]) -> None:
        if isinstance(node, _SCOPES):
            inner: dict[str, int] = {}
            for child in ast.iter_child_nodes(node):
                visit(child, inner)
            names.extend(inner.items())
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            scope.setdefault(node.id, node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            scope.setdefault(f".{node.attr}", node.lineno)
        elif isinstance(node, ast.arg):
            scope.setdefault(node.arg, node.lineno)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            scope.setdefault(node.name, node.lineno)
        for child in ast.iter_child_nodes(node):
            visit(child, scope)

    visit(tree, {})
    return names


class Counts(NamedTuple):
    """How many names there are, how often they are such words or contain one, and in which files."""

    names: int
    words: Counter[str]
    parts: Counter[str]
    files: Counter[str]


def count_words(folder: str) -> Counts:
    """Counts the names of a folder of the repository."""
    names, words, parts, files = 0, Counter[str](), Counter[str](), Counter[str]()
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name, _ in assigned_names(ast.parse(path.read_text(encoding="utf-8"))):
            names += 1
            bare = name.lstrip("._")
            if bare in WORDS:
                words[bare] += 1
                files[str(path.relative_to(ROOT))] += 1
            parts.update(WORDS & set(bare.split("_")))
    return Counts(names, words, parts, files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="purevk")
    parser.add_argument("--files", type=int, default=0, help="list so many files with most")
    options = parser.parse_args()
    names, words, parts, files = count_words(options.folder)
    for count, what in ((words, "are"), (parts, "contain")):
        share = 100 * count.total() / max(names, 1)
        print(
            f"{count.total()} of {names} assigned names ({share:.2f} %) {what} such words: {count}"
        )
    for name, number in files.most_common(options.files):
        print(f"{number:5} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

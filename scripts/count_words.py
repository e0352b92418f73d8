"""Counts assigned names that do not say what they hold: `count_words.py [FOLDER] [--files N] [--limit PERCENT]`.

Assigned names are variables, attributes, parameters and targets of loops, `with` and `except`. A name
counts once per scope. The words are those of the table of names in CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from pathlib import Path

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="purevk")
    parser.add_argument("--files", type=int, default=0, help="list so many files with most")
    parser.add_argument("--limit", type=float, help="percent; exit with 1 above it")
    options = parser.parse_args()
    total, words, parts, files = 0, Counter[str](), Counter[str](), Counter[str]()
    for path in sorted((ROOT / options.folder).rglob("*.py")):
        for name, _ in assigned_names(ast.parse(path.read_text(encoding="utf-8"))):
            total += 1
            bare = name.lstrip("._")
            if bare in WORDS:
                words[bare] += 1
                files[str(path.relative_to(ROOT))] += 1
            parts.update(WORDS & set(bare.split("_")))
    count, containing = sum(words.values()), sum(parts.values())
    print(
        f"{count} of {total} assigned names ({100 * count / total:.2f} %) are such words: {words}"
    )
    print(f"{containing} ({100 * containing / total:.2f} %) contain one: {parts}")
    for name, number in files.most_common(options.files):
        print(f"{number:5} {name}")
    return options.limit is not None and 100 * count / total > options.limit


if __name__ == "__main__":
    sys.exit(main())

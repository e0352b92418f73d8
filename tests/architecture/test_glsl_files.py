"""GLSL is in the files of `purevk/glsl`, where editors and compilers see it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "purevk"
MOST_STATEMENTS = 3  # of one text: an expression, and what it names
FUNCTION = re.compile(r"\b\w+ \w+\((?:\w+ \w+(?:, )?|§)*\) \{")
STATEMENT = re.compile(r";(?=\s|\}|$)")
LOOKS_LIKE_GLSL = re.compile(r"\w+\(|[^=!<>]=[^=]")
# Texts that are written for a graph, an operator and its sizes at a time, by module: functions, and
# texts with more statements. No larger numbers, please: a body belongs into purevk/glsl.
ALLOWED = {
    "cli/doctor.py": (1, 0),  # an empty shader, to see whether the compiler works
    "lower/epilogue.py": (5, 0),  # what loads the operands of a fused program
    "lower/transpose.py": (0, 1),  # what surrounds a fused program
    "ops/image/resample_coarsened.py": (0, 1),  # taps that several pixels share, unrolled
    "ops/index/scatter.py": (0, 1),  # a loop around the coordinates that indices give
    "shaders/shaderc.py": (1, 1),  # asks the compiler for extensions, one line each
}


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, with § for what is put into them; no docstrings and no messages."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or isinstance(node, ast.Raise):
            skipped.update(map(id, ast.walk(node)))
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, ast.walk(node)))
            yield "".join(
                str(each.value) if isinstance(each, ast.Constant) else "§" for each in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def count(source: str) -> tuple[int, int]:
    """The functions of GLSL in the texts of a module, and the texts with too many statements."""
    functions = bodies = 0
    for text in texts(ast.parse(source)):
        functions += len(FUNCTION.findall(text))
        bodies += (
            len(STATEMENT.findall(text)) > MOST_STATEMENTS
            and LOOKS_LIKE_GLSL.search(text) is not None
        )
    return functions, bodies


def test_only_expressions_are_in_python() -> None:
    wrong = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name, found = path.relative_to(PACKAGE).as_posix(), count(path.read_text(encoding="utf-8"))
        if found != ALLOWED.get(name, (0, 0)):
            wrong[name] = found
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = f'float f(float x) {{ return x * {y}; }}'", (1, 0)),
        ("x = 'r = X(i0); if (r < 0.0) r = 0.0;'", (0, 0)),
        ("x = 'int a = 1; int b = 2; ' f'int c = {b}; int d = a + b + c; r = d;'", (0, 1)),
        ("x = 'for (int k = 0; k < n; k++) { r += X(k); n++; m--; }'", (0, 1)),
        ("raise Error('this; is (no); code; at; all;')", (0, 0)),
    ],
)
def test_what_counts(text: str, expected: tuple[int, int]) -> None:
    assert count(text) == expected

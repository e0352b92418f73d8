"""The texts of all errors that the package raises, read from its source."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from purevk import errors

ROOT = Path(__file__).resolve().parent.parent
GAP = "…"  # in place of names and numbers
CLASSES = {
    name: each
    for name, each in vars(errors).items()
    if inspect.isclass(each) and issubclass(each, errors.PurevkError)
}


@dataclass(frozen=True, order=True)
class Message:
    """What an error says: each part has `…` for names and numbers, and is empty if there is none."""

    what: str
    why: str
    next: str


def messages() -> dict[str, list[Message]]:
    """The messages of each class, in the order of the alphabet."""
    found: dict[str, set[Message]] = {name: set() for name in CLASSES}
    for path in sorted((ROOT / "purevk").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = dict(_constants(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in found and node.args:
                    message = _message(node, constants)
                    if len(re.findall(r"[a-z]", message.what)) > 3:
                        found[node.func.id].add(message)
    return {name: sorted(each, key=_key) for name, each in found.items() if each}


def _key(message: Message) -> tuple[str, Message]:
    return message.what.lower().lstrip(f"{GAP} '\""), message


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The names of a module that stand for texts."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _message(call: ast.Call, constants: dict[str, ast.expr]) -> Message:
    given = {word.arg: word.value for word in call.keywords if word.arg}
    return Message(
        _text(call.args[0], constants),
        *(_text(given[name], constants) if name in given else "" for name in ("why", "next")),
    )


def _text(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """The text of an expression, with gaps. Of two texts by a condition, both."""
    text = re.sub(rf"{GAP}(\s*{GAP})+", GAP, _raw(node, constants))
    return " ".join(text.split())


def _raw(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else _field(part, constants)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _raw(node.left, constants) + _raw(node.right, constants)
    if isinstance(node, ast.IfExp):
        both = [_raw(each, constants).strip() for each in (node.body, node.orelse)]
        return " / ".join(dict.fromkeys(each for each in both if each))
    if isinstance(node, ast.BoolOp):
        found = [_raw(each, constants).strip() for each in node.values]
        return " / ".join(each for each in found if each != GAP) or GAP
    if isinstance(node, ast.Name) and isinstance(
        constants.get(node.id), (ast.Constant, ast.JoinedStr)
    ):
        return _raw(constants[node.id], {})
    return GAP


def _field(part: ast.expr, constants: dict[str, ast.expr]) -> str:
    """A field of an f-string: a text that the module names, or a gap."""
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
        return _raw(part.value, constants)
    return GAP


def error_parts() -> list[str]:
    """The page: a table for each class."""
    made = []
    for name, each in messages().items():
        doc = inspect.cleandoc(CLASSES[name].__doc__ or "").split("\n\n")[0]
        made.append(f"## {name}\n\n{textwrap.fill(' '.join(doc.split()), 100)}")
        rows = [f"| {_cell(row.what)} | {_cell(row.why)} | {_cell(row.next)} |" for row in each]
        made.append("\n".join(["| text | why | next |", "|---|---|---|", *rows]))
    return made


def _cell(text: str) -> str:
    """A text in a table: no character of it is Markdown or HTML."""
    if text in ("", GAP):
        return ""
    return re.sub(r"([\\`*_|<>\[\]#~$])", r"\\\1", text)

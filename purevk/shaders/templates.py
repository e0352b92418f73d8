"""GLSL templates that do not come with purevk: texts by the names that kernel specs call them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Template:
    """A template's text, and the folder in which its own includes are (None: it has none)."""

    text: str
    folder: Path | None


_templates: dict[str, Template] = {}


def add_template(stem: str, text: str, folder: Path | None = None) -> str:
    """Keeps a template; returns the name that stands for it, a different one for each text."""
    name = f"{stem}-{hashlib.sha256(f'{folder}|{text}'.encode()).hexdigest()[:8]}.comp"
    _templates[name] = Template(text, folder)
    return name


def find_template(name: str) -> Template | None:
    """A template of `add_template`; None for one of purevk's own."""
    return _templates.get(name)

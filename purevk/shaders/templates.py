"""GLSL templates by the names that kernel specs call them: what each declares, and the texts of
those that do not come with purevk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from purevk.shaders.interface import TemplateInterface
from purevk.shaders.source import find_include, find_include_beside


@dataclass(frozen=True)
class Template:
    """A template's text, and the folder in which its own includes are (None: it has none)."""

    text: str
    folder: Path | None


_templates: dict[str, Template] = {}


def add_template(stem: str, text: str, folder: Path | None = None) -> str:
    """Keeps a template. Returns a name for it, another one for each text."""
    name = f"{stem}-{hashlib.sha256(f'{folder}|{text}'.encode()).hexdigest()[:8]}.comp"
    _templates[name] = Template(text, folder)
    return name


def find_template(name: str) -> Template | None:
    """A template of `add_template`; None for one of purevk's own."""
    return _templates.get(name)


@lru_cache(maxsize=1024)
def template_interface(name: str) -> TemplateInterface:
    """What a template declares, purevk's own or one of `add_template`. It is read once.

    Raises:
        ShaderCompilerError: the template, or a file that it includes, cannot be read.
        KernelInterfaceError: its conditionals do not match.
    """
    own = find_template(name)
    if own is not None:
        return TemplateInterface.parse(own.text, name, find_include_beside(own.folder))
    return TemplateInterface.parse(find_include(None)(name)[1], name)

"""Shader sources: which files a template includes, and its text with macros and includes worked in.
No compiler."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Union

from purevk.errors import ShaderCompilerError

GLSL_FOLDER = Path(__file__).parents[1] / "glsl"

IncludeFunction = Callable[[str], "tuple[str, str]"]
Include = Union[IncludeFunction, str, "os.PathLike[str]", None]
"""Where `#include` looks: a folder, or a function from the name written to (name shown in messages, text).
None is the folder of purevk's own templates."""

UNOPTIMIZED = "PUREVK_UNOPTIMIZED"
"""A macro with which a kernel is compiled without the optimizer for SPIR-V: for what unrolls to so
much code that this takes longer than the driver does."""

_REPEATED = "#pragma purevk repeated"
_INCLUDE = re.compile(
    r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]*)"|<([^>\n]*)>)[^\n]*$', re.MULTILINE
)
_VERSION = re.compile(r"^[ \t]*#[ \t]*version\b[^\n]*$", re.MULTILINE)
_MACRO_NAME = re.compile(r"[A-Za-z_]\w*(\([\w\s,]*\))?\Z")


@dataclass(frozen=True)
class CompileJob:
    """One shader to compile: a template's text with everything that decides what comes out.

    `name` is the template's file name, for messages. `spirv_version` is a key of `SPIRV_VERSIONS`,
    or None for the highest that `target_env` promises.
    """

    source: str
    name: str
    macros: Mapping[str, str] = field(default_factory=dict)
    include: Include = None
    target_env: str = "vulkan1.1"
    spirv_version: str | None = None
    optimize: bool = True

    @classmethod
    def from_template(
        cls, name: str, macros: Mapping[str, str] | None = None, **settings: Any
    ) -> CompileJob:
        """A job for one of purevk's own templates, `purevk/glsl/<name>`."""
        _, text = find_include(None)(name)
        return cls(text, name, dict(macros or {}), **settings)


def find_include(include: Include) -> IncludeFunction:
    """The function that finds an included file. Raises ShaderCompilerError, when called, for a file
    not found."""
    if callable(include):
        return include
    return _folder_include(os.fspath(include) if include is not None else str(GLSL_FOLDER))


@lru_cache(maxsize=64)
def find_include_beside(folder: Path | None) -> IncludeFunction:
    """Finds purevk's own files, and then those of another folder, for templates that do not come
    with purevk."""
    own = find_include(None)
    if folder is None:
        return own
    include = find_include(folder)

    def find(name: str) -> tuple[str, str]:
        return (own if (GLSL_FOLDER / name).is_file() else include)(name)

    return find


@lru_cache(maxsize=64)
def _folder_include(folder: str) -> IncludeFunction:
    def find(name: str) -> tuple[str, str]:
        path = os.path.normpath(os.path.join(folder, name))
        if os.path.isabs(name) or (
            os.pardir in name and not Path(path).is_relative_to(os.path.normpath(folder))
        ):
            raise ShaderCompilerError(
                f"#include {name!r} leaves the folder of the templates", where=folder
            )
        try:
            status = os.stat(path)
            return name, _read_text(path, status.st_mtime_ns, status.st_size)
        except (OSError, UnicodeDecodeError) as error:
            raise ShaderCompilerError(
                f"the shader source {name!r} cannot be read",
                where=folder,
                why=str(error),
                next=_elsewhere(folder, name),
            ) from None

    return find


def _elsewhere(folder: str, name: str) -> str:
    """How to name a missing file of purevk's own that lies in another family; else nothing."""
    if Path(folder) != GLSL_FOLDER:
        return ""
    last = Path(name).name
    found = (path for path in GLSL_FOLDER.rglob("*.*") if path.name == last)
    names = sorted(path.relative_to(GLSL_FOLDER).as_posix() for path in found)
    return f"name it from that folder on: {' or '.join(names)}" if names else ""


@lru_cache(maxsize=512)
def _read_text(path: str, mtime_ns: int, size: int) -> str:
    return Path(path).read_text(encoding="utf-8")


@lru_cache(maxsize=1024)
def _scan_includes(text: str) -> tuple[tuple[int, int, str], ...]:
    return tuple(
        (m.start(), m.end(), m[1] if m[1] is not None else m[2]) for m in _INCLUDE.finditer(text)
    )


def source_files(source: str, *, name: str, include: Include = None) -> dict[str, str]:
    """The template and every file that it includes, directly or not: name -> text, the template
    first.

    Raises ShaderCompilerError for a file that is missing, or that includes itself.
    """
    find = find_include(include)
    files: dict[str, str] = {}

    def visit(file: str, text: str, trail: tuple[str, ...]) -> None:
        if file in trail:
            raise ShaderCompilerError(f"{file} includes itself", where=" -> ".join((*trail, file)))
        if file in files:
            return
        for start, _, wanted in _scan_includes(text):
            if wanted in files:
                continue
            try:
                visit(*find(wanted), (*trail, file))
            except ShaderCompilerError as error:
                if error.where and " -> " in error.where:
                    raise
                line = text.count("\n", 0, start) + 1
                trail_text = " -> ".join(f"{part}" for part in (*trail, f"{file}:{line}", wanted))
                raise ShaderCompilerError(
                    error.what, where=trail_text, why=error.why, next=error.next
                ) from None
        files[file] = text

    visit(name, source, ())
    return {name: files.pop(name), **files}


def expand(
    source: str, *, name: str, macros: Mapping[str, str] | None = None, include: Include = None
) -> str:
    """The template as one self-contained GLSL text: macros defined after `#version`, includes put
    in their place.

    Each included file takes effect once, whatever conditions surround its `#include` (or, with
    `#pragma purevk repeated`, each time), and `#line` directives keep the file names and line
    numbers of messages true. The text compiles with stock tools too.
    """
    find = find_include(include)
    files = source_files(source, name=name, include=include)
    guards = {file: f"PUREVK_INCLUDED_{index}" for index, file in enumerate(files)}

    def body(file: str, text: str, first_line: int) -> str:
        parts, position, line = [], 0, first_line
        for start, end, wanted in _scan_includes(text):
            between = text[position:start]
            line += between.count("\n")
            inner = find(wanted)[0]
            condition = (
                "#if 1"
                if _REPEATED in files[inner]
                else f"#ifndef {guards[inner]}\n#define {guards[inner]}"
            )
            parts += [
                between,
                f"{condition}\n#line 1 {_quote(inner)}\n",
                body(inner, files[inner], 1).rstrip("\n"),
                f"\n#endif\n#line {line + 1} {_quote(file)}",
            ]
            position = end
        parts.append(text[position:])
        return "".join(parts)

    version = _VERSION.search(source)
    if version is None:
        raise ShaderCompilerError(
            f"{name} has no #version line", where=name, next="start it with #version 450"
        )
    head = source[: version.end()]
    lines = [head, "#extension GL_GOOGLE_cpp_style_line_directive : enable"]
    lines += [f"#define {macro} {value}" for macro, value in _checked(name, macros or {})]
    start = min(version.end() + 1, len(source))
    line = source.count("\n", 0, start) + 1
    lines.append(f"#line {line} {_quote(name)}")
    tail = source[start:]
    return "\n".join(lines) + "\n" + body(name, tail, line)


def _quote(name: str) -> str:
    return '"' + name.replace("\\", "/").replace('"', "'").replace("\n", " ") + '"'


def _checked(name: str, macros: Mapping[str, str]) -> list[tuple[str, str]]:
    for macro, value in macros.items():
        if (
            not isinstance(value, str)
            or not _MACRO_NAME.match(macro)
            or "\n" in value
            or "\r" in value
        ):
            raise ShaderCompilerError(
                f"macro {macro!r} = {value!r} cannot be defined",
                where=name,
                why="a macro is an identifier, perhaps with parameters, and a value of one line of text",
            )
    return sorted(macros.items())


@lru_cache(maxsize=1024)
def text_hash(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()

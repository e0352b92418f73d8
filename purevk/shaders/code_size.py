"""Estimates how much code an expression of GLSL becomes, and how many iterations it takes. Compilers
inline all functions, so the time that they take depends on this and not on the length of the text."""

from __future__ import annotations

import re
from functools import lru_cache

from purevk.shaders.source import GLSL_FOLDER, find_include

_FUNCTION = re.compile(r"^[a-zA-Z]\w*\s+([a-z]+_\w+)\([^;{]*\)\s*\{", re.MULTILINE)
_MADE = re.compile(r"^(PV_\w+)\((fn_\w+),", re.MULTILINE)  # a function that a macro defines
_COMMENT = re.compile(r"//[^\n]*")
_BRACE = re.compile(r"[{}]")
_INTEGERS = re.compile(r"int(?:64_t)?\b")
_LOOPS = re.compile(r"\bFUNCTION_LOOPS\((\d+)\)")
_CALL = re.compile(r"\b(?:pv|fn)_\w+(?=\()")
_OPERATION = re.compile(r"\b[A-Za-z_]\w*(?=\()|[-+*/%<>=!&|^~?]+")


@lru_cache(maxsize=4096)
def code_size(text: str, double: bool = False, integers: bool = False) -> int:
    """Operations and calls in a text, with those of purevk's functions that it calls. Each branch,
    and the body of each loop, counts once.

    Args:
        double: the text calls the functions for double precision.
        integers: of a function that has overloads for integers, the text calls these.
    """
    return _sizes(double).count(text, integers)


@lru_cache(maxsize=4096)
def loops_of_functions(text: str, floats: bool = False, double: bool = True) -> int:
    """Iterations of loops in purevk's functions that a text calls, each call once, as the functions
    declare them by FUNCTION_LOOPS.

    Args:
        floats: the text calls no functions of integers.
        double: it may call functions for double precision.
    """
    return _sizes(double).loops(text, floats)


@lru_cache(maxsize=2)
def _sizes(double: bool) -> _FunctionSizes:
    return _FunctionSizes(double)


class _FunctionSizes:
    """Sizes of the functions in the includes of `core`."""

    def __init__(self, double: bool) -> None:
        self._made: dict[str, tuple[str, int]] = {}
        self._starts: dict[str, list[tuple[str, int]]] = {}  # texts, and where bodies start there
        for path in sorted((GLSL_FOLDER / "core").glob("*.glslh")):
            if path.name.startswith("double") <= double:
                text = _COMMENT.sub("", find_include(None)(f"core/{path.name}")[1])
                for match in _FUNCTION.finditer(text):
                    self._starts.setdefault(match[1], []).append((text, match.end()))
                for match in _MADE.finditer(text):
                    start = text.index("{", text.index(f"#define {match[1]}("))
                    self._made[match[2]] = text, start + 1
        self._known: dict[tuple[str, bool], int] = {}
        self._iterations: dict[tuple[str, bool], int] = {}

    def loops(self, text: str, floats: bool) -> int:
        """Iterations of the loops in the functions that a text calls."""
        return sum(self._loops_of(each, floats) for each in _CALL.findall(text))

    def _loops_of(self, name: str, floats: bool) -> int:
        key = name, floats
        if key not in self._iterations:
            self._iterations[key] = 0
            made = self._made.get(name)
            starts = self._starts.get(name, []) if made is None else [made]
            bodies = [
                _body(text, start)
                for text, start in starts
                if not (floats and _is_of_integers(text, start))
            ]
            self._iterations[key] = max(
                (sum(map(int, _LOOPS.findall(body))) + self.loops(body, floats) for body in bodies),
                default=0,
            )
        return self._iterations[key]

    def count(self, text: str, integers: bool = False) -> int:
        """The code size of a text."""
        return sum(
            self._of_function(each, integers) if each in self._starts else 1
            for each in _OPERATION.findall(text)
        )

    def _of_function(self, name: str, integers: bool) -> int:
        """Of the largest overload. A call of another overload counts once."""
        starts = self._starts[name]
        if integers:
            starts = [start for start in starts if _is_of_integers(*start)]
            if not starts:
                return self._of_function(name, False)
        key = name, integers
        if key not in self._known:
            self._known[key] = 1
            self._known[key] = max(self.count(_body(*start), integers) for start in starts)
        return self._known[key]


def _is_of_integers(text: str, start: int) -> bool:
    """Whether the function whose body starts there returns an integer."""
    return bool(_INTEGERS.match(text, text.rfind("\n", 0, start) + 1))


def _body(text: str, start: int) -> str:
    """The body of a function, from behind its first brace to its last."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[start : match.start()]
    return text[start:]

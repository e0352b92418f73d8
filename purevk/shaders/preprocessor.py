"""The part of GLSL's preprocessor that decides which declarations a kernel has.

A template's text becomes a tree of declarations, definitions of macros, includes and conditionals.
Then the tree is walked with the macros of one kernel, and the conditions are evaluated.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from purevk.errors import KernelInterfaceError
from purevk.shaders.declarations import (
    BufferDeclaration,
    ConstantDeclaration,
    Declaration,
    LoopDeclaration,
    declarations,
    may_declare,
)

_DIRECTIVE = re.compile(
    r"[ \t]*#[ \t]*(if|ifdef|ifndef|elif|else|endif|define|undef|pragma|include)\b[ \t]*(.*)"
)
_COMMENT = re.compile(r"//.*$|/\*.*?\*/")
_MACRO = re.compile(r"purevk[ \t]+macro[ \t]+(.*)")
_INCLUDED = re.compile(r"[\"<]([^\">]*)")
_DEFINE = re.compile(r"(\w+)(\()?[ \t]*(.*)")
NAME = re.compile(r"[A-Za-z_]\w*")
_PRIVATE = "PUREVK_"  # names of include guards start so
_GUARD = re.compile(rf"!defined\({_PRIVATE}\w+\)$")


class DefineLine(NamedTuple):
    """`#define NAME text`; None for `#undef NAME`."""

    name: str
    text: str | None


class IncludeLine(NamedTuple):
    """`#include "name"`. A file takes effect once."""

    name: str


class Conditional(NamedTuple):
    """`#if` to `#endif`: each branch with its condition, of which the first true one counts."""

    branches: tuple[tuple[str, tuple[Item, ...]], ...]


Item = Declaration | DefineLine | IncludeLine | Conditional


class ParsedFile(NamedTuple):
    """One file: the macros that it declares, and all else of it that may matter.

    Attributes:
        names: what it defines and includes.
        declares: whether it has declarations.
    """

    macros: frozenset[str]
    items: tuple[Item, ...]
    names: frozenset[str]
    declares: bool


# -- reading ------------------------------------------------------------------------------------
@lru_cache(maxsize=512)
def parse_file(name: str, text: str) -> ParsedFile:
    """Reads the text of one file.

    Raises:
        KernelInterfaceError: conditionals do not match.
    """
    macros: set[str] = set()
    names: set[str] = set()
    declares = False
    body: list[Item] = []
    # The conditionals around a line: finished branches, the condition of this one, and what is
    # around them.
    stack: list[tuple[list[tuple[str, tuple[Item, ...]]], str, list[Item]]] = []
    tested = ""  # the macro of an #ifndef on the line before
    for line in text.replace("\\\n", " ").split("\n"):
        directive = _DIRECTIVE.match(line) if "#" in line else None
        if directive is None:
            if may_declare(line):
                found = declarations(_COMMENT.sub("", line))
                declares |= bool(found)
                body += found
            continue
        kind, rest = directive[1], _COMMENT.sub("", directive[2]).strip()
        before, tested = tested, rest if kind == "ifndef" else ""
        if kind in ("if", "ifdef", "ifndef"):
            stack.append(([], _condition(kind, rest), body))
            body = []
        elif kind in ("elif", "else", "endif"):
            if not stack:
                raise KernelInterfaceError(f"#{kind} without #if", where=name)
            branches, condition, outer = stack.pop()
            branches.append((condition, tuple(body)))
            if kind != "endif":
                stack.append((branches, _condition(kind, rest), outer))
                body = []
                continue
            body = outer
            if _GUARD.match(branches[0][0]):
                body += branches[0][1]
            elif any(items for _, items in branches):
                body.append(Conditional(tuple(branches)))
        elif kind == "include":
            if included := _INCLUDED.match(rest):
                body.append(IncludeLine(included[1]))
                names.add(included[1])
        elif kind == "pragma":
            if declared := _MACRO.match(rest):
                macros.update(declared[1].split())
        elif defined := _DEFINE.match(rest):
            macro, parameters, value = defined.groups()
            names.add(macro)
            body.append(DefineLine(macro, None if kind == "undef" else "" if parameters else value))
            if kind == "define" and not parameters:  # such as the default of BUFFERS
                found = declarations(value)
                declares |= bool(found)
                body += found
            if macro == before and not macro.startswith(_PRIVATE):
                macros.add(macro)
    if stack:
        raise KernelInterfaceError("#if without #endif", where=name)
    return ParsedFile(frozenset(macros), tuple(body), frozenset(names), declares)


def _condition(kind: str, rest: str) -> str:
    if kind in ("ifdef", "ifndef"):
        return f"{'!' * (kind == 'ifndef')}defined({rest})"
    return "1" if kind == "else" else rest


def prune(
    items: Iterable[Item], conditions: set[str], files: Mapping[str, tuple[Item, ...]]
) -> tuple[Item, ...]:
    """Without what cannot change the declarations.

    Args:
        conditions: names that conditions and numbers of bindings read. More are added.
        files: what is left of each included file, as far as that is known.
    """
    kept: list[Item] = []
    for item in items:
        if isinstance(item, Conditional):
            branches = tuple(
                (condition, prune(body, conditions, files)) for condition, body in item.branches
            )
            if any(body for _, body in branches):
                for condition, _ in branches:
                    conditions.update(NAME.findall(condition))
                kept.append(Conditional(branches))
        elif isinstance(item, (BufferDeclaration, LoopDeclaration)):
            text = item.iterations if isinstance(item, LoopDeclaration) else item.number
            conditions.update(NAME.findall(text))
            kept.append(item)
        elif isinstance(item, ConstantDeclaration):
            kept.append(item)
        elif isinstance(item, IncludeLine):
            if files.get(item.name):
                kept.append(item)
        elif item.name in conditions:
            conditions.update(NAME.findall(item.text or ""))
            kept.append(item)
    return tuple(kept)


# -- expressions ---------------------------------------------------------------------------------
_TOKEN = re.compile(
    r"\s*(?:(\d\w*)|([A-Za-z_]\w*)|(\|\||&&|==|!=|<=|>=|<<|>>|[-+*/%<>!~&|^(),?:]))"
)
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<": lambda a, b: int(a < b),
        ">": lambda a, b: int(a > b),
        "<=": lambda a, b: int(a <= b),
        ">=": lambda a, b: int(a >= b),
    },
    {"<<": operator.lshift, ">>": operator.rshift},
    {"+": operator.add, "-": operator.sub},
    {
        "*": operator.mul,
        "/": lambda a, b: a // b if a >= 0 and b > 0 else int(a / b) if b else 0,
        "%": lambda a, b: a % b if b else 0,
    },
)  # operators of the preprocessor, those that bind least first
_UNARY: dict[str, Callable[[int], int]] = {
    "!": lambda a: int(not a),
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
}


class Call(NamedTuple):
    """A function of `arguments`: an operator, or one that only the text names (a str)."""

    function: Callable[..., int] | str
    arguments: tuple[Tree, ...]


Tree = int | str | Call  # a number, a name that is no macro, or what is computed from others


class Expression:
    """An integer expression of macros: of an `#if`, of the number of a binding, or of iterations.

    Args:
        template: for messages.
        defined: the macros and their texts.
        trail: the names whose texts this is. Without any, names of no macro are 0, as the GLSL
            compiler takes them in an `#if`.
        free: names of no macro, and functions, stay in the tree.
    """

    def __init__(
        self,
        template: str,
        text: str,
        defined: Mapping[str, str],
        trail: tuple[str, ...] = (),
        free: bool = False,
    ) -> None:
        self.template, self.text, self.defined, self.trail = template, text, defined, trail
        self.free = free
        self.tokens: list[str] = []
        position, text = 0, text.rstrip()
        while position < len(text):
            token = _TOKEN.match(text, position)
            if token is None:
                raise self._refused()
            self.tokens.append(token[0].strip())
            position = token.end()

    def value(self) -> int:
        """
        Raises:
            KernelInterfaceError: the text is no such expression.
        """
        made = self.tree()
        if not isinstance(made, int):
            raise self._refused()
        return made

    def tree(self) -> Tree:
        """The expression, in which what depends on no name is computed.

        Raises:
            KernelInterfaceError: the text is no such expression.
        """
        made = self._whole()
        if self.tokens:
            raise self._refused()
        return made

    def _whole(self) -> Tree:
        made = self._level(0)
        if self.tokens[:1] != ["?"]:
            return made
        self._next()
        left = self._whole()
        self._expect(":")
        return _apply(lambda test, a, b: a if test else b, made, left, self._whole())

    def _level(self, level: int) -> Tree:
        if level == len(_LEVELS):
            return self._operand()
        made = self._level(level + 1)
        while self.tokens and self.tokens[0] in _LEVELS[level]:
            made = _apply(_LEVELS[level][self.tokens.pop(0)], made, self._level(level + 1))
        return made

    def _operand(self) -> Tree:
        token = self._next()
        if token in _UNARY:
            return _apply(_UNARY[token], self._operand())
        if token == "(":
            made = self._whole()
            self._expect(")")
            return made
        if token == "defined":
            bracket = self.tokens[:1] == ["("]
            if bracket:
                self._next()
            name = self._next()
            if bracket:
                self._expect(")")
            return int(name in self.defined)
        if token[0].isdigit():
            try:
                return int(token.rstrip("uU"), 0)
            except ValueError:
                raise self._refused() from None
        if not NAME.fullmatch(token):
            raise self._refused()
        if self.free and token not in self.defined:
            return self._call(token) if self.tokens[:1] == ["("] else token
        if token in self.trail or (token not in self.defined and not self.trail):
            return 0
        if token not in self.defined:
            raise self._refused()
        text = self.defined[token]
        if not text:
            raise self._refused()
        return Expression(self.template, text, self.defined, (*self.trail, token), self.free).tree()

    def _call(self, name: str) -> Tree:
        arguments: list[Tree] = []
        while self._next() != ")":  # "(" or ","
            arguments.append(self._whole())
        return Call(name, tuple(arguments))

    def _next(self) -> str:
        if not self.tokens:
            raise self._refused()
        return self.tokens.pop(0)

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise self._refused()

    def _refused(self) -> KernelInterfaceError:
        return KernelInterfaceError(
            f"the expression {self.text!r} cannot be evaluated",
            where=self.template,
            why="it is no integer expression of macros",
            next="use integers, macros, defined() and operators in the conditions around"
            " declarations and in the numbers of bindings",
        )


def _apply(function: Callable[..., int], *arguments: Tree) -> Tree:
    numbers = [argument for argument in arguments if isinstance(argument, int)]
    return function(*numbers) if len(numbers) == len(arguments) else Call(function, arguments)

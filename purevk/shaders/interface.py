"""What a kernel template declares: its parameters, specialization constants and macros, by name.

A template writes each declaration once, in a form that GLSL and Python both read:

    PARAM(7, row_stride)            word 7 of the push constants, or specialization constant 7
    SPEC_CONSTANT(12, kernel_h)     specialization constant 12, never a push constant
    PUSH_CONSTANT(3, d0)            word 3 of the push constants, never a specialization constant
    RAW_PUSH_CONSTANT(0, count)     the same without a variable: the text reads `push.p[0]`
    layout(local_size_x_id = 100) in;   specialization constant `local_size_x`

    #ifndef VEC4                    macro VEC4 with a default
    #define VEC4 0
    #pragma purevk macro HAS_8BIT   macro without a default

`common.glslh` defines the first four. A declaration inside `#if` counts for the kernels whose
macros make the condition true. The text of a macro may hold declarations too.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from purevk.errors import KernelInterfaceError
from purevk.shaders.source import Include, source_files

_DIRECTIVE = re.compile(
    r"[ \t]*#[ \t]*(if|ifdef|ifndef|elif|else|endif|define|undef|pragma|include)\b[ \t]*(.*)"
)
_DECLARATION = re.compile(
    r"\b(PARAM|SPEC_CONSTANT|PUSH_CONSTANT|RAW_PUSH_CONSTANT)[ \t]*"
    r"\([ \t]*(\d+)[ \t]*,[ \t]*(\w+)[ \t]*\)"
)
_LOCAL_SIZE = re.compile(r"\b(local_size_x)_id[ \t]*=[ \t]*(\d+)")
_HINTS = ("PARAM", "_CONSTANT", "local_size_x_id")  # a line with a declaration has one of these
_COMMENT = re.compile(r"//.*$|/\*.*?\*/")
_MACRO = re.compile(r"purevk[ \t]+macro[ \t]+(.*)")
_INCLUDED = re.compile(r"[\"<]([^\">]*)")
_DEFINE = re.compile(r"(\w+)(\()?[ \t]*(.*)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_MOST_KERNELS = 1000  # that are remembered of a template
_PRIVATE = "PUREVK_"  # names of include guards start so
_GUARD = re.compile(rf"!defined\({_PRIVATE}\w+\)$")


@dataclass(frozen=True)
class KernelInterface:
    """What one kernel, a template with its macros, takes.

    Attributes:
        template: its name, for messages.
        params: word of the push constants by name. A parameter that is fixed when the pipeline is
            made is the specialization constant of the same number.
        constants: specialization constant by name, of those that are never push constants.
        push_only: names among `params` that are never specialization constants.
    """

    template: str
    params: Mapping[str, int]
    constants: Mapping[str, int]
    push_only: frozenset[str]

    def check(
        self, params: Iterable[str], constants: Mapping[str, object], specialize: Iterable[str]
    ) -> None:
        """Compares the names that a dispatch passes with those that are declared.

        Raises:
            KernelInterfaceError: a name is unknown or missing, a word is to become a constant, or
                a constant is no known number.
        """
        for kind, given, known in (
            ("parameters", set(params), self.params),
            ("constants", set(constants), self.constants),
        ):
            if given == set(known):
                continue
            unknown = [name for name in given if name not in known]
            missing = [name for name in known if name not in given]
            raise KernelInterfaceError(
                "; ".join(
                    f"{what} {kind}: {', '.join(sorted(map(str, names)))}"
                    for what, names in (("unknown", unknown), ("missing", missing))
                    if names
                ),
                where=self.template,
                why=f"with these macros it declares {', '.join(known) or 'none'}",
                next="pass all of these names and no other, or correct the template",
            )
        wrong = sorted(set(specialize) - (set(self.params) - self.push_only))
        if wrong:
            raise KernelInterfaceError(
                f"these cannot become constants: {', '.join(wrong)}",
                where=self.template,
                why="only a name that PARAM declares can, with these macros",
            )
        wrong = [name for name, value in constants.items() if not isinstance(value, int)]
        if wrong:
            raise KernelInterfaceError(
                f"these constants are no known integers: {', '.join(wrong)}",
                where=self.template,
                next="declare them with PARAM and pass them in params={...}",
            )


# -- a template's text as a tree -----------------------------------------------------------------
@dataclass(frozen=True)
class Declaration:
    """`kind` is PARAM, SPEC_CONSTANT, PUSH_CONSTANT or RAW_PUSH_CONSTANT."""

    kind: str
    name: str
    number: int


@dataclass(frozen=True)
class _Define:
    """`#define NAME text`; None for `#undef NAME`."""

    name: str
    text: str | None


@dataclass(frozen=True)
class _Include:
    """`#include "name"`. A file takes effect once."""

    name: str


@dataclass(frozen=True)
class _Conditional:
    """`#if` to `#endif`: each branch with its condition, of which the first true one counts."""

    branches: tuple[tuple[str, tuple[_Item, ...]], ...]


_Item = Declaration | _Define | _Include | _Conditional


@dataclass(frozen=True)
class _File:
    """One file: the macros that it declares, and all else of it that may matter.

    Attributes:
        names: what it defines and includes.
        declares: whether it has declarations.
    """

    macros: frozenset[str]
    items: tuple[_Item, ...]
    names: frozenset[str]
    declares: bool


@dataclass(frozen=True)
class TemplateInterface:
    """What a template and all that it includes declare.

    Attributes:
        name: of the template, for messages.
        macros: the macros that Python may define.
        conditions: macros on which it depends what parameters and constants there are.
    """

    name: str
    macros: frozenset[str]
    conditions: frozenset[str]
    _files: Mapping[str, tuple[_Item, ...]] = field(repr=False, compare=False)
    _kernels: dict[tuple[tuple[str, str], ...], KernelInterface] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def parse(cls, source: str, name: str, include: Include = None) -> TemplateInterface:
        """Reads a template's text, and the files that it includes.

        Raises:
            ShaderCompilerError: a file that it includes is missing.
            KernelInterfaceError: an `#if` has no `#endif`.
        """
        files = source_files(source, name=name, include=include)
        read = {file: _read(file, text) for file, text in files.items()}
        conditions: set[str] = set()
        kept: dict[str, tuple[_Item, ...]] = {}
        while True:  # conditions read macros that files define under other conditions
            known = len(conditions), kept
            kept = {
                file: _prune(each.items, conditions, kept)
                for file, each in read.items()
                if each.declares or not each.names.isdisjoint({*conditions, *kept})
            }
            if known == (len(conditions), kept):
                break
        macros = frozenset().union(*(each.macros for each in read.values()))
        return cls(name, macros, frozenset(conditions), kept)

    def check_macros(self, macros: Iterable[str], helpers: Iterable[str] = ()) -> None:
        """Compares the names of macros (`NAME` or `NAME(a, b)`) with what is declared.

        Args:
            helpers: those that only the texts of others name.

        Raises:
            KernelInterfaceError: the template declares no such macro, or declares one of `helpers`.
        """
        unknown = {macro_name(macro) for macro in macros} - self.macros
        if unknown:
            raise KernelInterfaceError(
                f"unknown macros: {', '.join(sorted(unknown))}",
                where=self.name,
                why=f"declared: {', '.join(sorted(self.macros))}",
                next="correct the name, or declare it in the template: with a default (#ifndef NAME"
                " before #define NAME ...), or with #pragma purevk macro NAME",
            )
        taken = {macro_name(macro) for macro in helpers} & self.macros
        if taken:
            raise KernelInterfaceError(
                f"the template declares these macros itself: {', '.join(sorted(taken))}",
                where=self.name,
                next="pass them in macros={...}, or choose other names",
            )

    def kernel(self, macros: Mapping[str, str]) -> KernelInterface:
        """What the template takes with these macros.

        Raises:
            KernelInterfaceError: a name or a number is declared twice, or a condition cannot be
                evaluated.
        """
        given = {macro_name(macro): text for macro, text in macros.items()}
        read = self.conditions & set(given)
        waiting = list(read)
        while waiting:  # their texts may name others
            named = set(_NAME.findall(given[waiting.pop()])) & set(given) - read
            read |= named
            waiting += named
        key = tuple(
            (name, text)
            for name, text in sorted(given.items())
            if name in read or declarations(text)
        )
        found = self._kernels.get(key)
        if found is None:
            if len(self._kernels) >= _MOST_KERNELS:
                self._kernels.clear()
            found = self._kernels[key] = _Evaluation(self, dict(key)).kernel()
        return found


def macro_name(macro: str) -> str:
    """The name of a macro that may be written with its parameters: `X(c0)` is X."""
    return macro.partition("(")[0].strip()


@lru_cache(maxsize=4096)
def declarations(text: str) -> tuple[Declaration, ...]:
    """The declarations in a line of GLSL, or in the text of a macro."""
    if not any(hint in text for hint in _HINTS):
        return ()
    found = [Declaration(m[1], m[3], int(m[2])) for m in _DECLARATION.finditer(text)]
    found += [Declaration("SPEC_CONSTANT", m[1], int(m[2])) for m in _LOCAL_SIZE.finditer(text)]
    return tuple(found)


@lru_cache(maxsize=512)
def _read(name: str, text: str) -> _File:
    macros: set[str] = set()
    names: set[str] = set()
    declares = False
    body: list[_Item] = []
    # The conditionals around a line: finished branches, the condition of this one, and what is
    # around them.
    stack: list[tuple[list[tuple[str, tuple[_Item, ...]]], str, list[_Item]]] = []
    tested = ""  # the macro of an #ifndef on the line before
    for line in text.replace("\\\n", " ").split("\n"):
        directive = _DIRECTIVE.match(line) if "#" in line else None
        if directive is None:
            if any(hint in line for hint in _HINTS):
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
                body.append(_Conditional(tuple(branches)))
        elif kind == "include":
            if included := _INCLUDED.match(rest):
                body.append(_Include(included[1]))
                names.add(included[1])
        elif kind == "pragma":
            if declared := _MACRO.match(rest):
                macros.update(declared[1].split())
        elif defined := _DEFINE.match(rest):
            macro, parameters, value = defined.groups()
            names.add(macro)
            body.append(_Define(macro, None if kind == "undef" else "" if parameters else value))
            if macro == before and not macro.startswith(_PRIVATE):
                macros.add(macro)
    if stack:
        raise KernelInterfaceError("#if without #endif", where=name)
    return _File(frozenset(macros), tuple(body), frozenset(names), declares)


def _condition(kind: str, rest: str) -> str:
    if kind in ("ifdef", "ifndef"):
        return f"{'!' * (kind == 'ifndef')}defined({rest})"
    return "1" if kind == "else" else rest


def _prune(
    items: Iterable[_Item], conditions: set[str], files: Mapping[str, tuple[_Item, ...]]
) -> tuple[_Item, ...]:
    """Without what cannot change the declarations. Adds the names that conditions read.

    Args:
        files: what is left of each included file, as far as that is known.
    """
    kept: list[_Item] = []
    for item in items:
        if isinstance(item, _Conditional):
            branches = tuple(
                (condition, _prune(body, conditions, files)) for condition, body in item.branches
            )
            if any(body for _, body in branches):
                for condition, _ in branches:
                    conditions.update(_NAME.findall(condition))
                kept.append(_Conditional(branches))
        elif isinstance(item, Declaration):
            kept.append(item)
        elif isinstance(item, _Include):
            if files.get(item.name):
                kept.append(item)
        elif item.name in conditions:
            conditions.update(_NAME.findall(item.text or ""))
            kept.append(item)
    return tuple(kept)


# -- one kernel ----------------------------------------------------------------------------------
class _Evaluation:
    """Goes through a template as the preprocessor would, with macros."""

    def __init__(self, template: TemplateInterface, macros: Mapping[str, str]) -> None:
        self.template, self.given = template, macros
        self.defined = dict(macros)
        self.included: set[str] = set()
        self.params: dict[str, int] = {}
        self.constants: dict[str, int] = {}
        self.push_only: set[str] = set()

    def kernel(self) -> KernelInterface:
        self._include(self.template.name)
        for text in self.given.values():
            for declaration in declarations(text):
                self._declare(declaration)
        for name, number in self.params.items():
            if name not in self.push_only and number in self.constants.values():
                raise self._refused(f"parameter {name} has the number of a constant, {number}")
        return KernelInterface(
            self.template.name, self.params, self.constants, frozenset(self.push_only)
        )

    def _include(self, file: str) -> None:
        if file not in self.included:
            self.included.add(file)
            self._visit(self.template._files.get(file, ()))

    def _visit(self, items: Iterable[_Item]) -> None:
        for item in items:
            if isinstance(item, Declaration):
                self._declare(item)
            elif isinstance(item, _Include):
                self._include(item.name)
            elif isinstance(item, _Conditional):
                for condition, branch in item.branches:
                    if _Expression(self.template.name, condition, self.defined).value():
                        self._visit(branch)
                        break
            elif item.text is None:
                self.defined.pop(item.name, None)
            else:
                self.defined[item.name] = item.text

    def _declare(self, declaration: Declaration) -> None:
        name, number = declaration.name, declaration.number
        into = self.constants if declaration.kind == "SPEC_CONSTANT" else self.params
        if name in into:
            raise self._refused(f"{name} is declared twice")
        if number in into.values():
            raise self._refused(f"{name} is declared with number {number}, which another has")
        into[name] = number
        if declaration.kind in ("PUSH_CONSTANT", "RAW_PUSH_CONSTANT"):
            self.push_only.add(name)

    def _refused(self, what: str) -> KernelInterfaceError:
        return KernelInterfaceError(what, where=self.template.name)


# -- conditions ----------------------------------------------------------------------------------
_TOKEN = re.compile(r"\s*(?:(\d\w*)|([A-Za-z_]\w*)|(\|\||&&|==|!=|<=|>=|<<|>>|[-+*/%<>!~&|^()]))")
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
        "/": lambda a, b: int(a / b) if b else 0,
        "%": lambda a, b: a % b if b else 0,
    },
)  # operators of the preprocessor, those that bind least first
_UNARY: dict[str, Callable[[int], int]] = {
    "!": lambda a: int(not a),
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
}


class _Expression:
    """The integer expression of an `#if`. Names of no macro are 0, as for the GLSL compiler."""

    def __init__(
        self, template: str, text: str, defined: Mapping[str, str], trail: tuple[str, ...] = ()
    ) -> None:
        self.template, self.text, self.defined, self.trail = template, text, defined, trail
        self.tokens: list[str] = []
        position, text = 0, text.rstrip()
        while position < len(text):
            token = _TOKEN.match(text, position)
            if token is None:
                raise self._refused()
            self.tokens.append(token[0].strip())
            position = token.end()

    def value(self) -> int:
        made = self._level(0)
        if self.tokens:
            raise self._refused()
        return made

    def _level(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._operand()
        made = self._level(level + 1)
        while self.tokens and self.tokens[0] in _LEVELS[level]:
            apply = _LEVELS[level][self.tokens.pop(0)]
            made = apply(made, self._level(level + 1))
        return made

    def _operand(self) -> int:
        token = self._next()
        if token in _UNARY:
            return _UNARY[token](self._operand())
        if token == "(":
            made = self._level(0)
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
        if not _NAME.fullmatch(token):
            raise self._refused()
        if token in self.trail or (token not in self.defined and not self.trail):
            return 0
        if token not in self.defined:
            raise self._refused()
        text = self.defined[token]
        if not text:
            raise self._refused()
        return _Expression(self.template, text, self.defined, (*self.trail, token)).value()

    def _next(self) -> str:
        if not self.tokens:
            raise self._refused()
        return self.tokens.pop(0)

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise self._refused()

    def _refused(self) -> KernelInterfaceError:
        return KernelInterfaceError(
            f"the condition {self.text!r} cannot be evaluated",
            where=self.template,
            why="it is no integer expression of macros",
            next="conditions around declarations use integers, defined() and operators",
        )

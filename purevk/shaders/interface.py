"""What a kernel template takes: its parameters, specialization constants, buffers and macros, by
name.

`declarations.py` has the form of the declarations. Macros are declared by

    #ifndef VEC4                    macro VEC4 with a default
    #define VEC4 0
    #pragma purevk macro HAS_8BIT   macro without a default

A declaration inside `#if` counts for the kernels whose macros make the condition true. The text of
a macro may hold declarations too. Buffers in such a text start at the binding that the template
defines as EXTRA_BINDING.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from purevk.errors import KernelInterfaceError
from purevk.shaders.declarations import (
    BufferDeclaration,
    ConstantDeclaration,
    Declaration,
    LoopDeclaration,
    declarations,
    macro_name,
)
from purevk.shaders.preprocessor import (
    NAME,
    Conditional,
    Expression,
    IncludeLine,
    Item,
    Tree,
    parse_file,
    prune,
)
from purevk.shaders.source import Include, source_files

_MOST_KERNELS = 1000  # that are remembered of a template
EXTRA_BINDING = "EXTRA_BINDING"  # what the texts of macros may read without a condition on it


class BufferSlot(NamedTuple):
    """A buffer that a kernel takes.

    Attributes:
        binding: its number.
        access: "r", "w" or "rw".
        texel: whether it is a uniform texel buffer.
    """

    binding: int
    access: str
    texel: bool


class KernelInterface(NamedTuple):
    """What one kernel, a template with its macros, takes.

    Attributes:
        template: its name, for messages.
        params: word of the push constants by name. A parameter that is fixed when the pipeline is
            made is the specialization constant of the same number.
        constants: specialization constant by name, of those that are never push constants.
        push_only: names among `params` that are never specialization constants.
        buffers: buffers by name, in the order of their bindings, which are 0, 1, ....
        loops: iterations of the loops of an invocation, to be added up.
        unrolled: the same of loops that are unrolled.
    """

    template: str
    params: Mapping[str, int]
    constants: Mapping[str, int]
    push_only: frozenset[str]
    buffers: Mapping[str, BufferSlot]
    loops: tuple[Tree, ...] = ()
    unrolled: tuple[Tree, ...] = ()

    def check(
        self,
        params: Iterable[str],
        constants: Mapping[str, object],
        specialize: Iterable[str],
        buffers: Mapping[str, str],
    ) -> None:
        """Compares the names that a dispatch passes with those that are declared.

        Args:
            buffers: how each is used: "r", "w" or "rw", and ":" with a texel format for a uniform
                texel buffer.

        Raises:
            KernelInterfaceError: a name is unknown or missing, a word is to become a constant, a
                constant is no known number, or a buffer is used in another way than declared.
        """
        checks: tuple[tuple[str, set[str], Mapping[str, object]], ...] = (
            ("parameters", set(params), self.params),
            ("constants", set(constants), self.constants),
            ("buffers", set(buffers), self.buffers),
        )
        for kind, given, known in checks:
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
        for name, mode in buffers.items():
            slot, (access, _, form) = self.buffers[name], mode.partition(":")
            # What is read and written may be passed as written: both make later work wait.
            accepted = ("rw", "w") if slot.access == "rw" else (slot.access,)
            if access not in accepted or slot.texel != bool(form):
                raise KernelInterfaceError(
                    f"the buffer {name} is used as {mode!r}",
                    where=self.template,
                    why=f"with these macros it is declared as {slot.access!r}, "
                    + ("a uniform texel buffer" if slot.texel else "a storage buffer"),
                    next="make the mode and the declaration agree",
                )


@dataclass(frozen=True)
class TemplateInterface:
    """What a template and all that it includes declare.

    Attributes:
        name: of the template, for messages.
        macros: the macros that Python may define.
        conditions: macros on which it depends what parameters, constants and buffers there are.
    """

    name: str
    macros: frozenset[str]
    conditions: frozenset[str]
    _files: Mapping[str, tuple[Item, ...]] = field(repr=False, compare=False)
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
        read = {file: parse_file(file, text) for file, text in files.items()}
        conditions = {EXTRA_BINDING}
        kept: dict[str, tuple[Item, ...]] = {}
        while True:  # conditions read macros that files define under other conditions
            known = len(conditions), kept
            kept = {
                file: prune(each.items, conditions, kept)
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
        for text in given.values():
            for declaration in declarations(text):
                if isinstance(declaration, LoopDeclaration):
                    read |= set(NAME.findall(declaration.iterations)) & set(given)
        waiting = list(read)
        while waiting:  # their texts may name others
            named = set(NAME.findall(given[waiting.pop()])) & set(given) - read
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
        self.buffers: dict[str, BufferSlot] = {}
        self.loops: list[LoopDeclaration] = []

    def kernel(self) -> KernelInterface:
        self._include(self.template.name)
        for text in self.given.values():
            for declaration in declarations(text):
                self._declare(declaration)
        for name, number in self.params.items():
            if name not in self.push_only and number in self.constants.values():
                raise self._refused(f"parameter {name} has the number of a constant, {number}")
        ordered = sorted(self.buffers.items(), key=lambda item: item[1].binding)
        if [slot.binding for _, slot in ordered] != list(range(len(ordered))):
            bindings = ", ".join(f"{name} {slot.binding}" for name, slot in ordered)
            raise self._refused(f"the bindings are not 0, 1, ... without gaps: {bindings}")
        return KernelInterface(
            self.template.name,
            self.params,
            self.constants,
            frozenset(self.push_only),
            dict(ordered),
            self._trees(False),
            self._trees(True),
        )

    def _trees(self, unrolled: bool) -> tuple[Tree, ...]:
        """The declarations of loops, or of unrolled loops."""
        return tuple(
            Expression(self.template.name, loop.iterations, self.defined, free=True).tree()
            for loop in self.loops
            if loop.unrolled == unrolled
        )

    def _include(self, file: str) -> None:
        if file not in self.included:
            self.included.add(file)
            self._visit(self.template._files.get(file, ()))

    def _visit(self, items: Iterable[Item]) -> None:
        for item in items:
            if isinstance(item, (ConstantDeclaration, BufferDeclaration, LoopDeclaration)):
                self._declare(item)
            elif isinstance(item, IncludeLine):
                self._include(item.name)
            elif isinstance(item, Conditional):
                for condition, branch in item.branches:
                    if Expression(self.template.name, condition, self.defined).value():
                        self._visit(branch)
                        break
            elif item.text is None:
                self.defined.pop(item.name, None)
            else:
                self.defined[item.name] = item.text

    def _declare(self, declaration: Declaration) -> None:
        if isinstance(declaration, LoopDeclaration):
            self.loops.append(declaration)
            return
        name = declaration.name
        if isinstance(declaration, BufferDeclaration):
            if name in self.buffers:
                raise self._refused(f"the buffer {name} is declared twice")
            expression = Expression(
                self.template.name, declaration.number, self.defined, trail=(name,)
            )
            self.buffers[name] = BufferSlot(
                expression.value(), declaration.access, declaration.texel
            )
            return
        number = declaration.number
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

"""How many iterations the loops of an invocation have, by what templates declare (`LOOPS`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from purevk.errors import KernelInterfaceError
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.shaders.preprocessor import Tree

_LOOP = re.compile(r"(?<!UNROLL )(?<!\[\[unroll\]\] )\b(?:for|while) ?\(")


def check_declared(template: str, macros: Collection[str]) -> None:
    """Raises `KernelInterfaceError` if the text of a macro has a loop, and none declares it."""
    if any(_LOOP.search(each) for each in macros) and not any("LOOPS(" in each for each in macros):
        raise KernelInterfaceError(
            "the text of a macro has a loop that it does not declare",
            where=template,
            next="write LOOPS(loop(iterations)) before the loop, or UNROLL",
        )


def _loop(count: Size, body: Size = 0) -> Size:
    """One more than `count` times the body: a device that counts iterations counts the last test of
    the condition too."""
    return _dims.maximum(count, 0) * (1 + body) + 1


def _ceil(left: Size, right: Size) -> Size:
    return _dims.ceil_div(left, _dims.maximum(right, 1))


def _log2(number: Size) -> Size:
    return max(_dims.upper(number) - 1, 0).bit_length()


_FUNCTIONS: dict[str, Callable[..., Size]] = {
    "loop": _loop,
    "ceil": _ceil,
    "min": _dims.minimum,
    "max": _dims.maximum,
    "log2": _log2,
}


def iterations(template: str, loops: tuple[Tree, ...], values: Mapping[str, Size]) -> Size:
    """The sum of what a template declares.

    Args:
        values: parameters, constants and the other names that a declaration may have.

    Raises:
        KernelInterfaceError: a declaration has another name.
    """

    def value(tree: Tree) -> Size:
        if isinstance(tree, int):
            return tree
        if isinstance(tree, str):
            if tree not in values:
                raise unknown(tree)
            return values[tree]
        function = tree.function
        if isinstance(function, str):
            if function not in _FUNCTIONS:
                raise unknown(function)
            return _FUNCTIONS[function](*map(value, tree.arguments))
        apply: Callable[..., Size] = function
        return apply(*map(value, tree.arguments))

    def unknown(name: str) -> KernelInterfaceError:
        return KernelInterfaceError(
            f"LOOPS names {name!r}, which is no parameter, constant or macro of this kernel",
            where=template,
            next="correct the declaration in the template",
        )

    return sum((value(tree) for tree in loops), values["functions"])

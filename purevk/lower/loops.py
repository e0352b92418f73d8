"""How many iterations the loops of an invocation have, by what templates declare (`LOOPS`), and what
follows from it: loops that stay loops, and dispatches that a device would not finish."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from purevk.errors import KernelInterfaceError, UnsupportedOperatorError
from purevk.ir import Node, Size
from purevk.ir import dims as _dims
from purevk.shaders.interface import KernelInterface, TemplateInterface
from purevk.shaders.preprocessor import Tree
from purevk.shaders.source import UNOPTIMIZED
from purevk.tuning import DeviceProfile

_LOOP = re.compile(r"(?<!UNROLL )(?<!\[\[unroll\]\] )\b(?:for|while) ?\(")


def check_declared(template: str, macros: Collection[str]) -> None:
    """Raises `KernelInterfaceError` if the text of a macro has a loop, and none declares it."""
    if any(_LOOP.search(macro) for macro in macros) and not any(
        "LOOPS(" in macro for macro in macros
    ):
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


def without_large_code(
    interface: TemplateInterface,
    takes: KernelInterface,
    text: dict[str, str],
    values: Mapping[str, Size],
    profile: DeviceProfile,
) -> KernelInterface:
    """What a kernel takes. If compilers would take seconds for what it unrolls, or registers do not
    hold it, loops stay loops (macro ROLLED, added to `text`), or else the optimizer for SPIR-V leaves
    it as it is."""
    rolls = "ROLLED" in interface.macros
    limit = profile.max_depthwise_code if rolls else profile.max_unrolled_code
    for level in range(3):
        if not takes.unrolled:
            return takes
        known = {name: _dims.upper(size) for name, size in values.items()}
        code = iterations(takes.template, takes.unrolled, {**known, "functions": 0})
        if _dims.upper(code) <= limit or level == 2:
            return takes
        if not rolls:
            text[UNOPTIMIZED] = "1"
            return takes
        text["ROLLED"] = str(level + 1)
        takes = interface.kernel(text)
    return takes


def check_loops(
    takes: KernelInterface,
    values: Mapping[str, Size],
    limit: int,
    node: Node | None,
    require: Callable[[Size, int, str, str, str], None],
) -> int:
    """Raises if a device would end the loops of a dispatch before they are done: it says nothing
    then, and results are what memory held before. Returns the iterations of an invocation, at most.

    Args:
        values: what the declarations of loops may name. "functions" are the iterations of functions
            that the macros call, each call once.
        limit: iterations that the device runs.
        require: has sizes checked at each call, see `Lowering.require`.
    """
    if not takes.loops and not values["functions"]:
        return 0
    largest = {name: _dims.upper(size) for name, size in values.items()}
    count = iterations(takes.template, takes.loops, largest)
    assert isinstance(count, int)
    if count > limit:
        exact = iterations(takes.template, takes.loops, values)
        message = f"an operator has loops of more than {limit} iterations"
        if _dims.range_of(exact)[0] > limit or isinstance(exact, int):
            raise UnsupportedOperatorError(
                message,
                where=f"{node.op} @ {node.source}" if node else takes.template,
                why=f"{takes.template} needs {count} iterations for one invocation, and the device"
                " may end them before they are done",
                next="cut the operator into smaller ones, such as sums of slices",
            )
        require(
            exact,
            limit,
            message,
            f"{takes.template} needs {{left}} iterations for one invocation, and the device may end"
            " them after {right}",
            "pass smaller inputs, or compile the model with smaller bounds",
        )
    return count

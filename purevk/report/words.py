"""Guards, sizes, bytes and choices of kernels in words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from purevk.ir import Dim, Graph, Guard, Size, Symbol, Value
from purevk.tuning.choices import Choice, question

_TRUE = {
    "==": "is",
    "!=": "is not",
    "<": "is less than",
    "<=": "is at most",
    ">": "is more than",
    ">=": "is at least",
}
_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", "<=": ">", ">": "<="}
_SWAPPED = {"==": "==", "!=": "!=", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
_REMAINDER = re.compile(r"\((\w+) % (\d+)\)")


def guard_in_words(guard: Guard) -> str:
    """What a guard asks of the sizes of a call: "s0 is a multiple of 4"."""
    left, op, right = guard.left, guard.op, guard.right
    if not guard.answer:
        op = _OPPOSITE[op]
    left, right = _without_common_factors(left, right)
    if isinstance(left, int) and isinstance(right, Dim):
        left, op, right = right, _SWAPPED[op], left
    elif op in ("==", "!=") and isinstance(right, Dim):
        left, right = sorted((left, right), key=lambda size: (len(str(size)), str(size)))
    remainder = _REMAINDER.fullmatch(str(left))
    if remainder and right == 0 and op in ("==", "!="):
        return f"{remainder[1]} {_TRUE[op]} a multiple of {remainder[2]}"
    if op == "==" and isinstance(right, Dim):
        return f"{_plain(left)} equals {_plain(right)}"
    return f"{_plain(left)} {_TRUE[op]} {_plain(right)}"


def _without_common_factors(left: Size, right: Size) -> tuple[Size, Size]:
    """Both sides of a comparison, divided by the symbols that are factors of both and are not 0."""
    difference = left - right
    if not isinstance(difference, Dim):
        return left, right
    products = [(list(atoms), factor) for atoms, factor in difference.terms]
    reduced = False
    for symbol in products[0][0][:]:
        common = all(symbol in atoms for atoms, _ in products)
        if isinstance(symbol, Symbol) and symbol.lower >= 1 and common:
            for atoms, _ in products:
                atoms.remove(symbol)
            reduced = True
    if not reduced:
        return left, right
    sides: list[Size] = [0, 0]
    for atoms, factor in products:
        count = abs(factor)
        term: Size = Dim(((tuple(atoms), count),)) if atoms else count
        sides[factor < 0] = sides[factor < 0] + term
    return sides[0], sides[1]


def _plain(size: object) -> str:
    """A size, without brackets around all of it."""
    text = str(size)
    depths = accumulate((each == "(") - (each == ")") for each in text)
    return text[1:-1] if text.startswith("(") and all(list(depths)[:-1]) else text


def symbol_origins(graph: Graph, names: list[str]) -> dict[str, str]:
    """Where the value of each symbol comes from, in words: "dim 0 of x".

    Args:
        graph: the method.
        names: of its inputs.
    """
    positions = {value: at for at, value in enumerate(graph.inputs) if isinstance(value, Value)}
    found = {}
    for symbol, source in graph.symbols.items():
        if source.value is None:
            found[symbol.name] = f"the integer {names[source.element]}"
        elif source.value not in positions:
            found[symbol.name] = f"known only during a call, from {source.value.name}"
        elif source.dim is None:
            found[symbol.name] = f"an element of {names[positions[source.value]]}"
        else:
            found[symbol.name] = f"dim {source.dim} of {names[positions[source.value]]}"
    return found


def size_text(nbytes: int) -> str:
    """A number of bytes: "1.5 MiB"."""
    number = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} B" if unit == "B" else f"{number:.4g} {unit}"


def problem_line(name: str) -> str:
    """What a question asks, in a few words: "matmul 196 x 1024 x 256, half". Others stay as they
    are."""
    kind, _, problem = name.partition(": ")
    sizes = dict(re.findall(r"\b(m|n|k|batches|half|window)=(\w+)", problem))
    if not problem.startswith("Problem(") or not {"m", "n", "k"} <= sizes.keys():
        fields = problem[problem.find("(") :]  # without the name of a class
        return f"{kind}: {fields}"
    kind = "convolution" if sizes.get("window") == "True" else kind
    batches = f"{sizes['batches']} of " if sizes.get("batches", "1") != "1" else ""
    half = ", half" if sizes.get("half") == "True" else ""
    return f"{kind} {batches}{sizes['m']} x {sizes['n']} x {sizes['k']}{half}"


def kernel_line(text: str) -> str:
    """A candidate without the names of its fields: "Coopmat(64, 64, 64, 16, 32, ...)"."""
    return re.sub(r"\b\w+=", "", text)


def choice_rows(choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """Kernels that were chosen: "problem" (the question), "kernel" (None: none fits) and "cost" (by the
    cost model, of matmuls and attention in microseconds; None without one). "others" has the kinds of
    kernels that were not, each with "kernel", "count" and "why": what it needs, or what it costs."""
    return [
        {
            "problem": question(choice.kind, choice.problem),
            "kernel": None if choice.kernel is None else str(choice.kernel),
            "cost": choice.cost or None,
            "others": _refused(choice.others),
        }
        for choice in choices
    ]


def _refused(others: Iterable[tuple[object, str | float]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[float]] = {}
    for kernel, why in others:
        text = f"needs {why}" if isinstance(why, str) else ""
        costs = found.setdefault((str(kernel).partition("(")[0], text), [])
        costs.append(0.0 if isinstance(why, str) else why)
    return [
        {
            "kernel": kernel,
            "count": len(costs),
            "why": text
            or (f"costs {min(costs):.3g} or more" if any(costs) else "is preferred less"),
        }
        for (kernel, text), costs in found.items()
    ]

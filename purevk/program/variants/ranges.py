"""The sizes and integers for which an exported graph holds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from purevk.errors import SizeConstraintError
from purevk.ir import Graph, Symbol
from purevk.program.arguments import describe_given, name_of_input


def refused_sizes(
    graph: Graph,
    env: Mapping[Symbol, int],
    arrays: Sequence[Any],
    where: str,
    bounds: str,
    lenient: bool,
    above: bool,
) -> SizeConstraintError | None:
    """Why a graph does not hold for the sizes of a call; None if it does.

    Args:
        graph: as it was exported.
        env: the values of the symbols that the inputs bring.
        arrays: the inputs, for messages.
        where: the method, for messages.
        bounds: of the program, see `purevk.load`.
        lenient: whether sizes may be outside of the exported ranges.
        above: whether a size is above what memory was planned for.
    """
    for symbol, value in env.items():
        if symbol not in graph.ranges and (not symbol.is_size or lenient):
            continue
        lower, upper = graph.ranges.get(symbol, (0, symbol.upper))
        if bounds == "strict" and symbol.is_size:
            upper = symbol.upper if upper is None else upper
        if lower <= value and (upper is None or value <= upper):
            continue
        if lenient and symbol.is_size:
            continue
        limits = f"at least {lower}" if upper is None else f"{lower} to {upper}"
        return SizeConstraintError(
            f"{shown(graph, symbol.name)} is {value}",
            where=where,
            why=f"the model was exported for {limits}; given: {describe_given(graph, arrays)}",
            next="export it with other bounds (torch.export.Dim with min and max)"
            + (', or load it with bounds="grow"' if symbol.is_size else ""),
        )
    if above:
        return None  # guards are over the bounds; a lowering for larger ones has its own
    for guard in graph.constraints:
        if guard.symbols <= env.keys() and not guard.holds(env):
            values = ", ".join(sorted(f"{shown(graph, s.name)} is {env[s]}" for s in guard.symbols))
            return SizeConstraintError(
                values,
                where=where,
                why=f"the model was exported for {shown(graph, str(guard))}: export decided by it"
                " which operators run",
                next="export it with example inputs of this kind; purevk.compile(module, ...) does"
                " so by itself",
            )
    return None


def shown(graph: Graph, text: str) -> str:
    """A text with sizes in place of symbols: "x.shape[0]"."""
    names = {}
    for symbol, source in graph.symbols.items():
        if source.value is None:
            names[symbol.name] = name_of_input(graph, source.element)
        elif source.value in graph.inputs and source.dim is not None:
            name = name_of_input(graph, graph.inputs.index(source.value))
            names[symbol.name] = f"{name}.shape[{source.dim}]"
    return re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), text)

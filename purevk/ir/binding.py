"""The values of symbols, read from the inputs of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from purevk.ir.graph import Graph, SymbolSource
from purevk.ir.symbols import Symbol
from purevk.ir.types import Value

InputSymbols = tuple[tuple[Symbol, int, SymbolSource], ...]


def input_symbols(graph: Graph) -> InputSymbols:
    """The symbols that the inputs of a call bring, each with the position of its input."""
    position = {value: n for n, value in enumerate(graph.inputs) if isinstance(value, Value)}
    return tuple(
        (symbol, source.element if source.value is None else position[source.value], source)
        for symbol, source in graph.symbols.items()
        if source.value is None or source.value in position
    )


def bind_symbols(symbols: InputSymbols, inputs: Sequence[Any]) -> dict[Symbol, int]:
    """The values of symbols for the inputs of a call: arrays, integers, and None for what is not
    there."""
    env: dict[Symbol, int] = {}
    for symbol, position, source in symbols:
        given = inputs[position] if position < len(inputs) else None
        if source.value is not None:
            env[symbol] = source.read(given)
        elif isinstance(given, int):
            env[symbol] = given
    return env

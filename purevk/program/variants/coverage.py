"""The sizes within the exported bounds that a lowering does not serve: they break a guard, or are
below what it was lowered for. A call of such sizes is lowered again: first with the sizes of 1 fixed
and the others dynamic, or if none is 1, with decisions that are true of its sizes; and if that does
not serve it, for its own sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from purevk.ir import Dim, Graph, Guard, Size, Symbol, Value
from purevk.ir import dims as _dims
from purevk.ir.binding import input_symbols
from purevk.ir.expected import Expected
from purevk.ir.symbols import Bound

if TYPE_CHECKING:
    from purevk.frontends.importer import InputSizes

MAX_COMBINATIONS = 1 << 14
"""Combinations of sizes to try the guards on. Of more, a part is tried."""


@dataclass(frozen=True)
class Uncovered:
    """Sizes that a lowering does not serve.

    Attributes:
        sizes: for each call of them, the values of the symbols. Those that differ most come first.
        complete: whether all sizes within the bounds were tried.
    """

    sizes: tuple[dict[Symbol, int], ...]
    complete: bool


def uncovered_sizes(graph: Graph, guards: Sequence[Guard]) -> Uncovered:
    """The sizes of inputs, within the exported bounds, that a lowering does not serve. Sizes that
    the exporter excluded are left out. Without a stated bound, sizes begin at 1.

    Args:
        graph: lowered for the exported bounds.
        guards: of this lowering.
    """
    bounds = _bounds(graph)
    symbols = set(bounds)
    guards = [guard for guard in guards if guard.symbols and guard.symbols <= symbols]
    excluded = [guard for guard in graph.constraints if guard.symbols <= symbols]
    if not guards and all(symbol.lower <= lower for symbol, (lower, _) in bounds.items()):
        return Uncovered((), True)
    values, complete = _values(bounds)
    groups: dict[tuple[object, ...], list[dict[Symbol, int]]] = {}
    for combination in itertools.product(*values.values()):
        env = dict(zip(values, combination))
        below: list[object] = [symbol for symbol in env if env[symbol] < symbol.lower]
        broken = (*below, *(n for n, guard in enumerate(guards) if not guard.holds(env)))
        if broken and all(guard.holds(env) for guard in excluded):
            groups.setdefault(broken, []).append(env)
    # One of each group of broken guards in turn, the ends of a group before its middle.
    ordered = itertools.zip_longest(*map(_spread, groups.values()))
    return Uncovered(tuple(env for row in ordered for env in row if env is not None), complete)


def input_sizes(graph: Graph, env: dict[Symbol, int]) -> list[tuple[int, ...] | None]:
    """The sizes of the inputs for values of the symbols, as front ends take them. The dims of an
    input that has others are left to its bounds."""
    return [_sizes_of(value, env) for value in graph.inputs]


def wider_sizes(graph: Graph, sizes: InputSizes) -> InputSizes | None:
    """What to lower for in place of the sizes of a call: those of 1, by which broadcasting decides,
    and the exported bounds of the others; None if that fixes none or all of them.

    Args:
        graph: lowered for the exported bounds.
        sizes: of the inputs, as `input_sizes` gives them.
    """
    wider_dims = [_wider(value, dims) for value, dims in zip(graph.inputs, sizes)]
    numbers = [
        wider
        for value, dims in zip(graph.inputs, wider_dims)
        if isinstance(value, Value) and dims is not None
        for size, wider in zip(value.type.dims, dims)
        if isinstance(size, Dim)
    ]
    return (
        wider_dims
        if 1 in numbers and any(isinstance(number, Bound) for number in numbers)
        else None
    )


def by_sizes(env: Mapping[Symbol, int]) -> dict[str, Expected]:
    """Has a lowering decide by the sizes of a call what its bounds leave open, such as whether two
    are equal. It serves all calls of whose sizes the same is true."""
    return {
        symbol.name: Expected(max(symbol.upper, size), size)
        for symbol, size in env.items()
        if symbol.is_size and not symbol.unbacked
    }


def decided_by(guards: Sequence[Guard], env: Mapping[Symbol, int]) -> dict[str, Expected] | None:
    """What a lowering for the exported bounds decides by, so that it serves these sizes; None if one
    is 1, since what is true of that is true of no other.

    The sizes are those below the bounds by which the guards are as at the call: they are the same
    for many calls. Else they are those of the call.

    Args:
        guards: of the lowering for the exported bounds that does not serve these sizes.
        env: values of the symbols.
    """
    sizes = {symbol: size for symbol, size in env.items() if symbol.is_size}
    if 1 in sizes.values():
        return None
    typical = dict(env)
    for symbol, size in sizes.items():
        larger = {n for s, n in sizes.items() if s.upper == symbol.upper and n > size}
        typical[symbol] = symbol.upper - len(larger) * (symbol.upper // 4)
    known = [guard for guard in guards if guard.symbols <= env.keys()]
    alike = all(guard.holds(typical) == guard.holds(dict(env)) for guard in known)
    return by_sizes(typical if alike else env)


def _wider(value: object, dims: tuple[int | Bound, ...] | None) -> tuple[int | Bound, ...] | None:
    if not isinstance(value, Value) or dims is None:
        return dims
    return tuple(
        number if isinstance(size, int) or number == 1 else Bound(_dims.upper(size))
        for size, number in zip(value.type.dims, dims)
    )


def serves(graph: Graph, guards: Sequence[Guard], env: dict[Symbol, int]) -> bool:
    """Whether a lowering for `wider_sizes` serves these values of the symbols.

    Args:
        graph: lowered for them, with `guards`.
        env: values of the symbols of the lowering for the exported bounds. They have its names.
    """
    open_symbols = {symbol.name: symbol for symbol, _, _ in input_symbols(graph)}
    own = {open_symbols[s.name]: value for s, value in env.items() if s.name in open_symbols}
    return (
        all(value == 1 for symbol, value in env.items() if symbol.name not in open_symbols)
        and all(symbol.lower <= value <= symbol.upper for symbol, value in own.items())
        and all(guard.holds(own) for guard in guards if guard.symbols <= own.keys())
    )


def _sizes_of(value: object, env: dict[Symbol, int]) -> tuple[int, ...] | None:
    dims: tuple[Size, ...] = ()
    if isinstance(value, Value):
        dims = value.type.dims
    elif isinstance(value, Dim):
        dims = (value,)
        if not any(symbol.is_size for symbol in _dims.symbols(value)):
            return None
    else:
        return None
    if not all(_dims.symbols(size) <= env.keys() for size in dims):
        return None
    return tuple(_dims.evaluate(size, env) for size in dims)


def _bounds(graph: Graph) -> dict[Symbol, tuple[int, int]]:
    """The sizes that inputs bring, with their bounds."""
    bounds = {}
    for symbol, _, _ in input_symbols(graph):
        if symbol.is_size and not symbol.unbacked:
            lower, upper = graph.ranges.get(symbol, (1, None))
            bounds[symbol] = (lower, symbol.upper if upper is None else min(upper, symbol.upper))
    return bounds


def _values(bounds: dict[Symbol, tuple[int, int]]) -> tuple[dict[Symbol, list[int]], bool]:
    """The values of each symbol to combine, and whether they are all."""
    spans = {symbol: upper - lower + 1 for symbol, (lower, upper) in bounds.items()}
    if math.prod(spans.values()) <= MAX_COMBINATIONS:
        return {s: list(range(lower, upper + 1)) for s, (lower, upper) in bounds.items()}, True
    room = max(int(MAX_COMBINATIONS ** (1 / len(bounds))), 2)
    return {s: _sampled(*bounds[s], room) for s in bounds}, False


def _sampled(lower: int, upper: int, count: int) -> list[int]:
    """Up to `count` integers of a range: its ends, powers of two and their neighbors, and some at
    equal distances."""
    if upper - lower < count:
        return list(range(lower, upper + 1))
    chosen = dict.fromkeys((lower, upper, min(lower + 1, upper)))
    for power in (1 << n for n in range(upper.bit_length())):
        chosen.update(
            dict.fromkeys(v for v in (power, power - 1, power + 1) if lower <= v <= upper)
        )
    step = (upper - lower) / count
    chosen.update(dict.fromkeys(lower + int(step * n) for n in range(count)))
    return sorted(list(chosen)[:count])


def _spread(items: Sequence[dict[Symbol, int]]) -> Iterator[dict[Symbol, int]]:
    """The items, first the first and the last, then the middle ones, by bisection."""
    seen: set[int] = set()
    spans = [(0, len(items) - 1)]
    for number in spans[0]:
        if number not in seen:
            seen.add(number)
            yield items[number]
    while spans:
        first, last = spans.pop(0)
        middle = (first + last) // 2
        if middle not in seen:
            seen.add(middle)
            yield items[middle]
        if last - first > 1:
            spans += [(first, middle), (middle, last)]

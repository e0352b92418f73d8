"""Patterns of nodes: a pass writes what it recognizes as the expression that it is.

    total = op("aten.add.Tensor", x=Var("x"), y=Num("eps"), alpha=1)
    root = one_of(op("aten.rsqrt.default", x=total), op("aten.pow.Tensor_Tensor", x=total, y=-0.5))
    match = Matcher(graph).match(root, node.result)

An argument is a pattern, a tuple of them for a list, or what it has to be. A number is also a tensor all
of whose elements are this number. What a variable stands for twice is the same tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from purevk.ir import Arg, Graph, Node, Value
from purevk.passes.rewrite import reader_counts
from purevk.passes.simplify import static_value

# Operators that fill a tensor with a number, and the argument that is the number.
_FILLS = {
    "aten.full.default": "fill_value",
    "aten.full_like.default": "fill_value",
    "aten.scalar_tensor.default": "s",
}


@dataclass(frozen=True)
class Var:
    """Any tensor."""

    name: str


@dataclass(frozen=True)
class Num:
    """Any number."""

    name: str


@dataclass(frozen=True, eq=False)
class Op:
    """The only result of a node.

    Attributes:
        names: the operators that it may have; none: any.
        arguments: those that a pattern states.
        swap: x and y may be exchanged.
        when: what else is true of the node.
    """

    names: tuple[str, ...]
    arguments: Mapping[str, Pattern]
    swap: bool
    when: Callable[[Node], bool]


@dataclass(frozen=True, eq=False)
class OneOf:
    """The first of several patterns that fits."""

    patterns: tuple[Pattern, ...]


@dataclass(frozen=True, eq=False)
class Via:
    """A tensor of which a function gives what matches a pattern."""

    function: Callable[[Matcher, Value], Arg]
    pattern: Pattern


Pattern: TypeAlias = "Var | Num | Op | OneOf | Via | tuple[Pattern, ...] | Arg"


def op(
    *names: str, swap: bool = False, when: Callable[[Node], bool] = lambda _: True, **args: Pattern
) -> Op:
    """A pattern of a node, see `Op`."""
    return Op(names, args, swap, when)


def one_of(*patterns: Pattern) -> OneOf:
    """A pattern that fits where one of several does."""
    return OneOf(patterns)


class Match(NamedTuple):
    """What the variables of a pattern stand for, and its nodes: arguments come after those that read
    them."""

    variables: Mapping[str, Arg]
    nodes: tuple[Node, ...]

    def value(self, name: str) -> Value:
        """The tensor that a variable stands for."""
        value = self.variables[name]
        assert isinstance(value, Value)
        return value

    def number(self, name: str) -> float:
        """The number that a variable stands for."""
        number = self.variables[name]
        assert isinstance(number, float)
        return number


class Matcher:
    """Follows the values of a graph, as it was before a pass, back to the nodes that make them.

    Attributes:
        made: the node that makes each value.
        readers: how many nodes read it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made = graph.producers()
        self.readers = reader_counts(graph)

    def match(self, pattern: Pattern, value: Value, shared: bool = False) -> Match | None:
        """How a value matches; None if it does not. Nobody but the nodes of the pattern reads what is
        inside, unless `shared`."""
        return next(self._matches(pattern, value, Match({}, ()), True, shared), None)

    def producer(self, arg: Arg, *names: str) -> Node | None:
        """The node that makes an argument, if its operator has one of these names; none: any."""
        node = self.made.get(arg) if isinstance(arg, Value) else None
        return node if node is not None and (not names or node.op in names) else None

    def number(self, arg: Arg) -> float | None:
        """The number that all elements of an argument are, or None."""
        if not isinstance(arg, Value):
            known = isinstance(arg, (int, float)) and not isinstance(arg, bool)
            return float(arg) if known else None  # type: ignore[arg-type]
        node = self.producer(arg, *_FILLS)
        if node is None:
            static = static_value(self.graph.constants, arg)
            return None if static is None else float(static)
        number = node.scalar(_FILLS[node.op])  # a fill of integers holds another number
        is_held = arg.type.dtype.is_float and isinstance(number, (int, float))
        return float(number) if is_held else None  # type: ignore[arg-type]

    def through(
        self, value: Value, moves: Callable[[Node], bool]
    ) -> tuple[Node | None, tuple[Node, ...]]:
        """The node behind those that move elements only, and these, the last one first. Each result is
        read once."""
        passed: list[Node] = []
        while self.readers.get(value) == 1 and (node := self.made.get(value)) is not None:
            if not moves(node):
                return node, tuple(passed)
            passed.append(node)
            value = node.inputs[0]
        return None, tuple(passed)

    def _matches(
        self, pattern: Pattern, arg: Arg, match: Match, is_root: bool, shared: bool
    ) -> Iterator[Match]:
        if isinstance(pattern, OneOf):
            for choice in pattern.patterns:
                yield from self._matches(choice, arg, match, is_root, shared)
        elif isinstance(pattern, (Var, Num)):
            found = arg if isinstance(pattern, Var) else self.number(arg)
            if found is None or (isinstance(pattern, Var) and not isinstance(arg, Value)):
                return
            known = match.variables.get(pattern.name, found)
            if known is found or (isinstance(pattern, Num) and known == found):
                yield match._replace(variables={**match.variables, pattern.name: found})
        elif isinstance(pattern, Via):
            if isinstance(arg, Value):
                arg = pattern.function(self, arg)
                yield from self._matches(pattern.pattern, arg, match, False, shared)
        elif isinstance(pattern, Op):
            node = self.producer(arg, *pattern.names)
            if node is None or len(node.results) != 1 or not pattern.when(node):
                return
            if is_root or shared or self.readers[node.result] == 1:
                match = match._replace(nodes=(*match.nodes, node))
                for order in ("xy", "yx")[: 1 + pattern.swap]:
                    names = dict(zip("xy", order))
                    pairs = [
                        (sub, node.arg(names.get(name, name)))
                        for name, sub in pattern.arguments.items()
                    ]
                    yield from self._all(pairs, match, shared)
        elif isinstance(pattern, tuple):
            if isinstance(arg, tuple) and len(arg) == len(pattern):
                yield from self._all([*zip(pattern, arg)], match, shared)
        elif isinstance(pattern, (int, float)) and not isinstance(pattern, bool):
            if self.number(arg) == pattern:
                yield match
        elif arg == pattern:
            yield match

    def _all(self, pairs: list[tuple[Pattern, Arg]], match: Match, shared: bool) -> Iterator[Match]:
        if not pairs:
            yield match
            return
        (pattern, arg), *others = pairs
        for partial in self._matches(pattern, arg, match, False, shared):
            yield from self._all(others, partial, shared)

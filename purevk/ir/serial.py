"""Graphs as plain data (what JSON can hold) and back. The bytes of constants stay outside: the data
names them by number.

`docs/formats.md` describes the data. Arguments of nodes are written by kind (`_KINDS`): a new kind
of argument is one more row there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from purevk.dtypes import DType
from purevk.errors import UnsupportedProgramError
from purevk.ir import dims as _dims
from purevk.ir.dims import Dim, Size
from purevk.ir.graph import Constant, FixedInput, Graph, Label, Node, SymbolSource
from purevk.ir.guards import Guard
from purevk.ir.signature import KINDS, LEAF, LEAF_TREE, Parameter, Signature, Tree
from purevk.ir.symbols import Symbol
from purevk.ir.types import TensorType, Value

_SYMBOL = [field.name for field in fields(Symbol)]
_NODE = [field.name for field in fields(Node)]
_SOURCE = [field.name for field in fields(SymbolSource)]


def to_data(size: Size) -> Any:
    """A size as plain data: an integer, or the list of its terms `[factor, [atom, ...]]`, where an
    atom is the name of a symbol, or `[kind, left, right]` for `//`, `%`, `min` and `max` of two
    sizes."""
    if not isinstance(size, Dim):
        return int(size)
    return [
        [
            factor,
            [
                atom.name
                if isinstance(atom, Symbol)
                else [atom.kind, to_data(atom.left), to_data(atom.right)]
                for atom in atoms
            ],
        ]
        for atoms, factor in size.terms
    ]


def from_data(data: Any, symbols: Mapping[str, Symbol]) -> Size:
    """What `to_data` wrote. Raises KeyError for a symbol or kind that there is not, ValueError or
    TypeError for other data."""
    if not isinstance(data, list):
        return _integer(data)
    total: Size = 0
    for factor, atoms in data:
        part: Size = _integer(factor)
        for atom in atoms:
            if isinstance(atom, str):
                part = part * Dim.of(symbols[atom])
            else:
                kind, left, right = atom
                part = part * _dims.apply(kind, from_data(left, symbols), from_data(right, symbols))
        total = total + part
    return total


class GraphWriter:
    """Writes graphs as plain data.

    Args:
        tensor: called with the bytes of each constant; gives the number by which the data names
            them.
    """

    def __init__(self, tensor: Callable[[memoryview], int]) -> None:
        self._tensor = tensor
        self._values: dict[Value, int] = {}
        self._symbols: dict[str, Symbol] = {}
        self._where = ""

    def method(
        self, graph: Graph, guards: Sequence[Guard], kept: Sequence[Guard]
    ) -> dict[str, Any]:
        """A method's graph.

        Args:
            graph: as the front end made it.
            guards: all that must hold of the sizes of a call. kept: those of them that the front
                end decided itself, which no shape function decides again.

        Raises:
            UnsupportedProgramError: an argument of a node is of a kind that cannot be written.
        """
        self._values, self._symbols = {}, {}
        self._where = f"method {graph.name}"
        body = self._graph(graph)
        return {
            "symbols": [
                [getattr(symbol, name) for name in _SYMBOL] for symbol in self._symbols.values()
            ],
            "values": [[value.name, *self._type(value.type)] for value in self._values],
            "graph": body,
            "guards": [self.guard(guard) for guard in guards],
            "kept_guards": [self.guard(guard) for guard in kept],
        }

    def _graph(self, graph: Graph) -> dict[str, Any]:
        for symbol in graph.symbols:
            if self._symbols.setdefault(symbol.name, symbol) != symbol:
                raise UnsupportedProgramError(
                    f"two sizes are named {symbol.name}", where=self._where
                )
        return {
            "name": graph.name,
            "inputs": [self._arg(value) for value in graph.inputs],
            "constants": [
                [self._number(value), self._bytes(constant)]
                for value, constant in graph.constants.items()
            ],
            "states": [
                [self._number(value), self._bytes(first)] for value, first in graph.states.items()
            ],
            "nodes": [[self._arg(getattr(node, name)) for name in _NODE] for node in graph.nodes],
            "outputs": [self._arg(output) for output in graph.outputs],
            "sources": [
                [symbol.name, *(self._arg(getattr(source, name)) for name in _SOURCE)]
                for symbol, source in graph.symbols.items()
            ],
            "checks": [[self.guard(guard), message] for guard, message in graph.checks],
            "outer": sorted(symbol.name for symbol in graph.outer),
            "updates": list(graph.updates),
            "labels": [
                [self._number(value), label.name, label.key]
                for value, label in graph.labels.items()
            ],
            "constraints": [self.guard(guard) for guard in graph.constraints],
            "ranges": [[symbol.name, *bounds] for symbol, bounds in graph.ranges.items()],
            "signature": None if graph.signature is None else self.signature(graph.signature),
            "lines": self._lines(graph.lines),
        }

    @staticmethod
    def _lines(lines: Mapping[str, str]) -> list[Any]:
        """The nodes of each line: [[line, [source, ...]], ...]."""
        found: dict[str, list[str]] = {}
        for source, line in lines.items():
            found.setdefault(line, []).append(source)
        return [[line, sources] for line, sources in found.items()]

    def signature(self, signature: Signature) -> dict[str, Any]:
        """How a method is called. Raises `UnsupportedProgramError` for keys of dicts that are neither
        texts nor integers."""
        return {
            "parameters": [
                [parameter.name, self._tree(parameter.tree), parameter.positional]
                for parameter in signature.parameters
            ],
            "order": list(signature.order),
            "defaults": {name: self._arg(value) for name, value in signature.defaults.items()},
            "outputs": self._tree(signature.outputs),
            "numbers": [list(number) for number in signature.numbers],
            "free": list(signature.free),
            "exact": signature.exact,
            "layouts": [list(layout) for layout in signature.layouts],
        }

    def _tree(self, tree: Tree) -> list[Any] | None:
        if tree.kind == LEAF:
            return None
        for key in tree.keys:
            if not isinstance(key, (str, int)):
                raise UnsupportedProgramError(
                    f"a dict with the key {key!r} cannot be saved",
                    where=self._where,
                    why="keys that are texts or integers can",
                )
        return [tree.kind, list(tree.keys), [self._tree(item) for item in tree.items], tree.name]

    def _number(self, value: Value) -> int:
        return self._values.setdefault(value, len(self._values))

    def _bytes(self, constant: Constant | None) -> int | None:
        return None if constant is None else self._tensor(constant.data)

    def _type(self, type: TensorType) -> list[Any]:
        return [type.dtype.name, [to_data(size) for size in type.dims]]

    def guard(self, guard: Guard) -> list[Any]:
        """A guard."""
        return [to_data(guard.left), guard.op, to_data(guard.right), guard.answer]

    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, np.generic):
            arg = arg.item()
        if (
            arg is None
            or isinstance(arg, (bool, int, str))
            or (isinstance(arg, float) and math.isfinite(arg))
        ):
            return arg
        if isinstance(arg, tuple):
            return [self._arg(item) for item in arg]
        for tag, (kind, write, _) in _KINDS.items():
            if isinstance(arg, kind):
                return {tag: write(self, arg)}
        raise UnsupportedProgramError(
            f"an argument of type {type(arg).__name__} cannot be saved",
            where=self._where,
            why=f"tensors, sizes, numbers, texts, None, lists and {', '.join(_KINDS)} can",
            next="load the program from the file or module that it was made from",
        )


class GraphReader:
    """Reads what `GraphWriter` wrote.

    Args:
        tensor: gives the bytes for a number. symbols: by name, for guards outside of a method.

    Data that is not what a writer made raises KeyError, IndexError, ValueError or TypeError.
    """

    def __init__(
        self, tensor: Callable[[int], memoryview], symbols: Mapping[str, Symbol] | None = None
    ) -> None:
        self._tensor = tensor
        self._values: list[Value] = []
        self._symbols: dict[str, Symbol] = dict(symbols or {})

    def method(self, data: Mapping[str, Any]) -> tuple[Graph, tuple[Guard, ...], tuple[Guard, ...]]:
        """The graph, its guards, and those of them that the front end decided."""
        symbols = [_checked(Symbol(**dict(zip(_SYMBOL, each)))) for each in data["symbols"]]
        self._symbols = {symbol.name: symbol for symbol in symbols}
        self._values = [
            _checked(Value(name, TensorType(DType[dtype], self._sizes(dims))))
            for name, dtype, dims in data["values"]
        ]
        graph = self._graph(data["graph"])
        return (
            graph,
            tuple(map(self.guard, data["guards"])),
            tuple(map(self.guard, data["kept_guards"])),
        )

    def _graph(self, data: Mapping[str, Any]) -> Graph:
        return Graph(
            name=_text(data["name"]),
            inputs=tuple(map(self._input, data["inputs"])),
            constants={
                self._value(number): self._constant(number, at) for number, at in data["constants"]
            },
            states={
                self._value(number): None if at is None else self._constant(number, at)
                for number, at in data["states"]
            },
            nodes=tuple(
                _checked(Node(**dict(zip(_NODE, map(self._arg, node))))) for node in data["nodes"]
            ),
            outputs=tuple(map(self._arg, data["outputs"])),
            symbols={
                self._symbols[name]: _checked(
                    SymbolSource(**dict(zip(_SOURCE, map(self._arg, source))))
                )
                for name, *source in data["sources"]
            },
            checks=tuple(
                (self.guard(guard), str(message)) for guard, message in data.get("checks", ())
            ),
            outer=frozenset(self._symbols[name] for name in data.get("outer", ())),
            updates=tuple(map(int, data.get("updates", ()))),
            labels={
                self._value(number): Label(str(name), str(key))
                for number, name, key in data.get("labels", ())
            },
            constraints=tuple(map(self.guard, data.get("constraints", ()))),
            ranges={
                self._symbols[name]: (int(lower), None if upper is None else int(upper))
                for name, lower, upper in data.get("ranges", ())
            },
            signature=self.signature(data.get("signature")),
            lines={
                str(source): str(line)
                for line, sources in data.get("lines", ())
                for source in sources
            },
        )

    def signature(self, data: Mapping[str, Any] | None) -> Signature | None:
        """How a method is called."""
        if data is None:
            return None
        return Signature(
            tuple(
                Parameter(str(name), self._tree(tree), bool(positional))
                for name, tree, positional in data["parameters"]
            ),
            tuple(map(str, data["order"])),
            {str(name): self._arg(value) for name, value in data["defaults"].items()},
            self._tree(data["outputs"]),
            tuple((int(position), str(kind)) for position, kind in data.get("numbers", ())),
            tuple(map(str, data.get("free", ()))),
            bool(data.get("exact", False)),
            tuple((int(position), str(text)) for position, text in data.get("layouts", ())),
        )

    def _tree(self, data: Sequence[Any] | None) -> Tree:
        if data is None:
            return LEAF_TREE
        kind, keys, items, name = data
        if kind not in KINDS or (keys and len(keys) != len(items)):
            raise ValueError(f"{kind!r} with {len(keys)} keys is no container")
        return Tree(kind, tuple(keys), tuple(map(self._tree, items)), name=str(name))

    def _constant(self, number: int, at: int) -> Constant:
        data = self._tensor(_integer(at))
        needed = self._value(number).type.nbytes
        if len(data) < needed:
            raise ValueError(
                f"{self._values[number]!r} needs {needed} bytes, {len(data)} are there"
            )
        return Constant(data)

    def _sizes(self, data: Sequence[Any]) -> tuple[Any, ...]:
        sizes = tuple(from_data(size, self._symbols) for size in data)
        for size in sizes:
            if isinstance(size, int) and not 0 <= _integer(size) < 1 << 62:
                raise ValueError(f"{size} is no size")
        return sizes

    def _value(self, number: Any) -> Value:
        if _integer(number) < 0:
            raise IndexError(number)
        value: Value = self._values[number]
        return value

    def _input(self, data: Any) -> Any:
        made = self._arg(data)
        if made is None or isinstance(made, (Value, Dim, FixedInput)):
            return made
        raise TypeError(f"{made!r} is no input")

    def guard(self, data: Sequence[Any]) -> Guard:
        """A guard over the symbols that are known."""
        left, op, right, answer = data
        if op not in ("==", "!=", "<", "<=", ">", ">="):
            raise ValueError(f"{op!r} is no comparison")
        return Guard(
            from_data(left, self._symbols), op, from_data(right, self._symbols), bool(answer)
        )

    def _arg(self, data: Any) -> Any:
        if isinstance(data, list):
            return tuple(map(self._arg, data))
        if isinstance(data, dict):
            ((tag, content),) = data.items()
            return _KINDS[tag][2](self, content)
        return data


_Checked = TypeVar("_Checked", Symbol, Value, Node, SymbolSource)

# What the fields of objects that are read from data have to be, by their annotations.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "str": lambda each: isinstance(each, str),
    "bool": lambda each: isinstance(each, bool),
    "int": lambda each: type(each) is int,
    "int | None": lambda each: each is None or type(each) is int,
    "Value | None": lambda each: each is None or isinstance(each, Value),
    "TensorType": lambda each: isinstance(each, TensorType),
    "tuple[Arg, ...]": lambda each: isinstance(each, tuple),
    "tuple[Value, ...]": lambda each: (
        isinstance(each, tuple) and all(isinstance(item, Value) for item in each)
    ),
}


def _checked(made: _Checked) -> _Checked:
    """An object, if its fields are of the types that its class states."""
    for field in fields(made):
        found = getattr(made, field.name)
        if not _FIELDS[str(field.type)](found):
            raise TypeError(f"{field.name} of a {type(made).__name__} is {found!r}")
    return made


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise TypeError(f"{data!r} is no text")
    return data


def _integer(data: Any) -> int:
    if type(data) is not int:
        raise TypeError(f"{data!r} is no integer")
    return data


# Kinds of arguments that JSON has no form for: type, what is written, how it is read.
_KINDS: dict[
    str, tuple[type, Callable[[GraphWriter, Any], Any], Callable[[GraphReader, Any], Any]]
] = {
    "value": (Value, GraphWriter._number, lambda reader, data: reader._value(data)),
    "size": (
        Dim,
        lambda writer, arg: to_data(arg),
        lambda reader, data: from_data(data, reader._symbols),
    ),
    "dtype": (DType, lambda writer, arg: arg.name, lambda reader, data: DType[data]),
    "float": (float, lambda writer, arg: repr(arg), lambda reader, data: float(data)),
    "complex": (
        complex,
        lambda writer, arg: [arg.real, arg.imag],
        lambda reader, data: complex(*data),
    ),
    "graph": (Graph, GraphWriter._graph, GraphReader._graph),
    "fixed": (
        FixedInput,
        lambda writer, arg: writer._arg(arg.value),
        lambda reader, data: FixedInput(reader._arg(data)),
    ),
}

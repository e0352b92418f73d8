"""The intermediate representation: a flat list of nodes in SSA form. `docs/ir.md` has the grammar.

Everything here is frozen; a pass builds a new `Graph`. Values and nodes are compared by identity.
"""

from __future__ import annotations

import contextvars
import functools
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from purevk.errors import UnsupportedProgramError
from purevk.ir.arguments import Arg, Arguments
from purevk.ir.dims import Dim
from purevk.ir.guards import Guard
from purevk.ir.signature import Signature
from purevk.ir.symbols import Symbol
from purevk.ir.types import TensorType, Value
from purevk.mapped import address_of, own


class Sealed:
    """Stands for an argument until someone reads the arguments of its node; see `Node.sealed`."""

    def open(self) -> Arg:
        """The argument."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Node(Arguments):
    """One application of an operator: `results = op(*args)`.

    `args` follow the operator's schema by position, keyword-only ones included. `source` says where
    in the file it stood, for messages. `alias` is the name that the file used, if it is another one
    of the same operator. Code for one operator reads its arguments by name, as `Arguments` has it:
    `node.tensor("weight")`.
    """

    op: str
    args: tuple[Arg, ...]
    results: tuple[Value, ...]
    source: str = ""
    alias: str = ""

    @staticmethod
    def sealed(
        op: str,
        args: tuple[Arg | Sealed, ...],
        results: tuple[Value, ...],
        source: str,
        alias: str,
        inputs: tuple[Value, ...],
    ) -> Node:
        """A node with arguments that take long to make, and are made when they are read. None of its
        arguments is a graph, and those that are sealed have no tensors.

        Args:
            inputs: the tensors among the arguments.
        """
        node = object.__new__(Node)
        known = {"op": op, "results": results, "source": source, "alias": alias}
        node.__dict__.update(known, inputs=inputs, graphs=(), _sealed=args)
        return node

    def __getattr__(self, name: str) -> Any:
        """Called for what a node does not have: the arguments of a sealed one."""
        if name != "args" or "_sealed" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        packed = self.__dict__["_sealed"]
        args = tuple(arg.open() if isinstance(arg, Sealed) else arg for arg in packed)
        self.__dict__["args"] = args
        return args

    @property
    def result(self) -> Value:
        return self.results[0]

    @functools.cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The tensors among the arguments, in order, also those inside lists."""
        return tuple(values_in(self.args))

    @functools.cached_property
    def graphs(self) -> tuple[Graph, ...]:
        """The sub-graphs among the arguments, in order."""
        return tuple(arg for arg in self.args if isinstance(arg, Graph))

    def graph(self, name: str) -> Graph:
        """A sub-graph among the arguments, by the name of the parameter."""
        return self.attribute(name, Graph)

    def with_arguments(self, **arguments: Arg) -> Node:
        """The node with other arguments for the parameters of these names."""
        args = list(self.args)
        for name, arg in arguments.items():
            args[self.position(name)] = arg
        return replace(self, args=tuple(args))


def values_in(args: Iterable[Arg]) -> Iterator[Value]:
    """Every `Value` among the arguments, depth first."""
    for arg in args:
        if isinstance(arg, Value):
            yield arg
        elif isinstance(arg, tuple):
            yield from values_in(arg)


def dims_in(args: Iterable[Arg]) -> Iterator[Dim]:
    """Every `Dim` among the arguments, depth first."""
    for arg in args:
        if isinstance(arg, Dim):
            yield arg
        elif isinstance(arg, tuple):
            yield from dims_in(arg)


def map_values(arg: Arg, function: Callable[[Value], Arg]) -> Arg:
    """The argument with each `Value` in it replaced by `function(value)`."""
    if isinstance(arg, Value):
        return function(arg)
    if isinstance(arg, tuple):
        items = tuple([map_values(item, function) for item in arg])
        return arg if all(map(operator.is_, items, arg)) else items
    return arg


_reads: contextvars.ContextVar[ReadLog | None] = contextvars.ContextVar("reads", default=None)


class ReadLog:
    """Collects, while entered, the bytes of every constant whose elements are read.

    Attributes:
        borrowed: those of a `BorrowedConstant` are read.
    """

    def __init__(self) -> None:
        self.data: list[memoryview] = []
        self.borrowed = False

    def __enter__(self) -> ReadLog:
        self._token = _reads.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _reads.reset(self._token)


@dataclass(frozen=True, eq=False)
class Constant:
    """Bytes of a tensor, dense and row-major, usually a view of the mapped file.

    Attributes:
        known: False for a weight that is not there: a graph with one can be planned, but not run.
    """

    data: memoryview
    known: bool = True

    def array(self, type: TensorType) -> np.ndarray:
        """The bytes as a read-only numpy array (bfloat16 as uint16); of a mapped file, a copy. What is
        decided by elements depends on them: the innermost `ReadLog` notes it.

        Raises:
            UnsupportedProgramError: they are not there.
        """
        if not self.known:
            raise UnsupportedProgramError(
                f"a weight {type} has no data",
                why="it is on the meta device",
                next="load the model's weights",
            )
        return np.frombuffer(self._read(), dtype=type.dtype.numpy).reshape(type.dims)

    def _read(self) -> memoryview:
        log = _reads.get()
        if log is not None:
            log.data.append(self.data)
        return own(self.data)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def memory(self) -> Hashable:
        """What tells the bytes from those of other constants, as long as this one lives."""
        return address_of(self.data)

    @classmethod
    def of(cls, array: np.ndarray) -> Constant:
        return cls(np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b""))


class BorrowedConstant(Constant):
    """Bytes in memory that somebody else may release, such as that of a tensor of torch. They are
    looked up when they are needed, and no view of them may outlive that.

    Args:
        memory, nbytes: see `Constant`.
        read: gives a view of the bytes. Raises `InputError` if they were released.
        name: by which who made the graph finds the constant again; "": it does not.

    Attributes:
        name: as the argument.
    """

    name: str

    def __init__(
        self, memory: Hashable, nbytes: int, read: Callable[[], memoryview], name: str = ""
    ) -> None:
        vars(self).update(known=True, name=name, _memory=memory, _nbytes=nbytes, _view=read)

    @property
    def data(self) -> memoryview:
        view: memoryview = vars(self)["_view"]()
        return view

    @property
    def nbytes(self) -> int:
        nbytes: int = vars(self)["_nbytes"]
        return nbytes

    @property
    def memory(self) -> Hashable:
        memory: Hashable = vars(self)["_memory"]
        return memory

    def _read(self) -> memoryview:
        log = _reads.get()
        if log is not None:
            log.borrowed = True
        return memoryview(bytes(self.data))  # passes keep arrays


@dataclass(frozen=True)
class SymbolSource:
    """Where a symbol's value comes from at a call.

    `value` is an input of the graph or the result of a node; the symbol is its size along `dim`,
    or, if `dim` is None, its element number `element` (in row-major order, negative from the end).
    A `value` of None is an integer argument of the call, number `element` among the inputs.
    """

    value: Value | None
    dim: int | None = None
    element: int = 0

    def read(self, array: Any) -> int:
        """The symbol's value, from the array of `value`."""
        if self.dim is not None:
            size: int = array.shape[self.dim]
            return size
        return int(array.reshape(-1)[self.element])


@dataclass(frozen=True)
class Label:
    """What a state is called: `name`, for the user, and `key`, under which it is one with states of
    other methods ("": it is the method's own)."""

    name: str
    key: str = ""


@dataclass(frozen=True)
class FixedInput:
    """An argument of a call that is part of the graph: a call has to give this value.

    `value` is None, a bool, int, float or str. What `torch.export` traced a Python number as is one.
    """

    value: Any


# What a graph takes for one argument of a call; see `Graph.inputs`.
Input: TypeAlias = Value | Dim | FixedInput | None


@dataclass(frozen=True, eq=False)
class Graph:
    """A method, or a sub-graph of a node: inputs, nodes in an order in which they can run, outputs.

    Attributes:
        name: the method's name.
        inputs: tensors that a call brings, in the order of the call; an integer input is a `Dim` of
            one symbol; a `FixedInput` is checked; None is not read.
        nodes: in execution order.
        outputs: tensors, integers or None, in the order of the result.
        updates: inputs, by position, that a call writes: their new elements are the last outputs,
            which it does not return.
        constants: values whose bytes are known.
        states: values that live on the device between calls, with their initial bytes (None:
            zeros).
        symbols: where each symbol's value comes from.
        checks: relations of data-dependent sizes that each call must keep, with the message if it
            does not.
        labels: what the states are called.
        constraints: what the exporter decided from the sizes of its example inputs. The graph is
            wrong for sizes that break one; no other lowering of it helps.
        ranges: bounds that the exporter states of sizes and integers of a call, both included (an
            upper one of None: there is none). Where it states none, that of the symbol holds.
        signature: how Python code calls the method; None: with its inputs, in order.
        outer: of a sub-graph, the symbols of the graphs around it, whose values it is given.
        lines: where nodes stand in the user's code, such as "model.py:12, in forward", by the
            `source` of the node that the front end made. Those of sub-graphs are here too.
        shares_weights: other methods may read the same weights, with other numbers of rows. The order of
            a weight on the device must not depend on the rows of one method then.
        trusted: made from a module of this process, whose operators are the caller's own. The graph
            of a file runs only operators that are known to be pure. Never read from a file.
    """

    name: str
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Arg, ...]
    constants: Mapping[Value, Constant] = field(default_factory=dict)
    states: Mapping[Value, Constant | None] = field(default_factory=dict)
    symbols: Mapping[Symbol, SymbolSource] = field(default_factory=dict)
    checks: tuple[tuple[Guard, str], ...] = ()
    outer: frozenset[Symbol] = frozenset()
    updates: tuple[int, ...] = ()
    labels: Mapping[Value, Label] = field(default_factory=dict)
    constraints: tuple[Guard, ...] = ()
    ranges: Mapping[Symbol, tuple[int, int | None]] = field(default_factory=dict)
    signature: Signature | None = None
    shares_weights: bool = False
    trusted: bool = False
    lines: Mapping[str, str] = field(default_factory=dict)

    def lines_of(self, source: str) -> str:
        """The lines of a node, also of one that stands for several: "model.py:12, in forward"."""
        parts = re.split(r" [+|] ", source)
        return "; ".join(dict.fromkeys(self.lines[part] for part in parts if part in self.lines))

    @property
    def unbacked(self) -> dict[Symbol, SymbolSource]:
        """The unbacked symbols: a call gets their values from nodes."""
        return {
            symbol: source
            for symbol, source in self.symbols.items()
            if source.value is not None and source.value not in self.inputs
        }

    def with_nodes(self, nodes: Iterable[Node], **changes: Any) -> Graph:
        return replace(self, nodes=tuple(nodes), **changes)

    def producers(self) -> dict[Value, Node]:
        """The node that makes each value."""
        return {value: node for node in self.nodes for value in node.results}

    def users(self) -> dict[Value, list[Node]]:
        """The nodes that read each value, once per node, in order."""
        users: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                users.setdefault(value, []).append(node)
        return users

    def output_values(self) -> set[Value]:
        return set(values_in(self.outputs))

    def nested(self) -> Iterator[Graph]:
        """This graph and all its sub-graphs, outer ones first."""
        yield self
        for node in self.nodes:
            for inner in node.graphs:
                yield from inner.nested()


def map_leaves(graph: Graph, function: Callable[[Value], Value]) -> Graph:
    """The graph, with its sub-graphs, in which each constant and state is replaced by
    `function(value)`."""
    mapping = {leaf: function(leaf) for leaf in (*graph.constants, *graph.states)}
    changed = any(old is not new for old, new in mapping.items())
    if not changed and not any(node.graphs for node in graph.nodes):
        return graph
    swap = lambda value: mapping.get(value, value)  # noqa: E731

    def visit(node: Node) -> Node:
        args = tuple(
            map_leaves(arg, function) if isinstance(arg, Graph) else map_values(arg, swap)
            for arg in node.args
        )
        return node if all(a is b for a, b in zip(args, node.args)) else replace(node, args=args)

    return graph.with_nodes(
        [visit(node) for node in graph.nodes]
        if changed
        else [visit(node) if node.graphs else node for node in graph.nodes],
        outputs=tuple(map_values(output, swap) for output in graph.outputs),
        constants={mapping[value]: constant for value, constant in graph.constants.items()},
        states={mapping[value]: first for value, first in graph.states.items()},
        labels={mapping[value]: label for value, label in graph.labels.items()},
    )

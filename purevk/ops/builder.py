"""Makes nodes whose result types come from the operators' shape functions."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod

import numpy as np

from purevk.dtypes import DType
from purevk.errors import GraphError, UnsupportedOperatorError
from purevk.ir import Arg, Constant, Graph, Node, Size, TensorType, Value
from purevk.ir.equalities import Equalities
from purevk.ir.host import SEED
from purevk.ops import registry
from purevk.tuning import DeviceTraits

_MOST_NODES = 1 << 19  # an operator over a long dim may take some for each step


class Builder(ABC):
    """Collects nodes in order. `passes.rewrite.Rewriter` implements it.

    Attributes:
        graph: the graph that the nodes become a part of, as it was before.
        traits: the device.
        nodes: the nodes so far.
        random_operators: how many nodes with random results were expanded so far. Each takes the
            next number, so that their streams differ.
        source: where the nodes come from, for messages.
    """

    def __init__(
        self, graph: Graph, traits: DeviceTraits, source: str = "", names: NameSource | None = None
    ) -> None:
        self.graph = graph
        self.traits = traits
        self.nodes: list[Node] = []
        self.random_operators = 0
        self._seeds: dict[int, Value] = {}
        self.source = source
        self.names = names or NameSource()

    @abstractmethod
    def state(self, type: TensorType, first: Constant | None = None) -> Value:
        """A new value that lives on the device between calls, with its first bytes (None:
        zeros)."""

    @abstractmethod
    def constant(self, array: np.ndarray, dtype: DType) -> Value:
        """A new constant, with the elements of an array."""

    @abstractmethod
    def bind_symbol(self, size: Size, count: Value) -> None:
        """Takes the value of an unbacked symbol from a tensor of one element. Until then it was to
        be read from the size of a result."""

    def seed(self, generator: int) -> Value:
        """The seed that a run of the graph draws from a generator, see `purevk.generators`: one for
        all random operators of the generator."""
        if generator not in self._seeds:
            value = Value(self.names.fresh("seed"), TensorType(DType.int32, (2,)))
            self.nodes.append(Node(SEED, (generator,), (value,), self.source))
            self._seeds[generator] = value
        return self._seeds[generator]

    @functools.cached_property
    def _equalities(self) -> Equalities:
        return Equalities(self.graph.constraints)

    @property
    def aten(self) -> Namespace:
        """PyTorch's operators: `builder.aten.view(x, sizes)` appends `aten.view.default`."""
        return Namespace(self, "aten")

    @property
    def purevk(self) -> Namespace:
        """Operators of this package: `builder.purevk.softmax(x, dim=-1)`."""
        return Namespace(self, "purevk")

    def emit(
        self,
        op: str,
        *args: Arg,
        results: tuple[TensorType, ...] | None = None,
        **keywords: Arg,
    ) -> Value:
        """Appends a node and returns its result.

        Args:
            op: the operator's name.
            args, keywords: its arguments, by position and by name. The rest have their defaults.
            results: the types of the results; None: what the shape function gives.

        Raises:
            GraphError: no operator has this name, it has no such arguments, or it does not have
                exactly one result.
        """
        values = self.emit_all(op, *args, results=results, **keywords)
        if len(values) != 1:
            raise GraphError(
                f"{op} has {len(values)} results, and one was expected", where=self.source
            )
        return values[0]

    def emit_all(
        self,
        op: str,
        *args: Arg,
        results: tuple[TensorType, ...] | None = None,
        **keywords: Arg,
    ) -> tuple[Value, ...]:
        """Appends a node and returns all of its results; the arguments are those of `emit`."""
        definition = registry.find(op)
        if definition is None:
            raise GraphError(f"no operator {op}", where=self.source)
        bound = definition.bind(args, keywords)
        rewritten = self._equalities.rewritten
        full = rewritten(tuple(bound[name] for name in definition.parameters))
        types = rewritten(results if results is not None else tuple(definition.infer(full)))
        stem = definition.name.split(".")[1]
        values = tuple(Value(self.names.fresh(stem), type) for type in types)
        self.nodes.append(Node(definition.name, full, values, self.source))
        if len(self.nodes) > _MOST_NODES:
            raise UnsupportedOperatorError(
                f"the graph takes more than {_MOST_NODES} nodes", where=self.source
            )
        return values


class Namespace:
    """The operators of one namespace, as attributes: a call appends a node to a builder."""

    def __init__(self, builder: Builder, name: str) -> None:
        self._builder, self._name = builder, name

    def __getattr__(self, name: str) -> OperatorCall:
        return OperatorCall(self._builder, f"{self._name}.{name}")


class OperatorCall:
    """An operator of a builder; its overloads are attributes, as those of `torch.ops.aten.add`."""

    def __init__(self, builder: Builder, name: str) -> None:
        self._builder, self._name = builder, name

    def __getattr__(self, overload: str) -> OperatorCall:
        return OperatorCall(self._builder, f"{self._name}.{overload}")

    def __call__(
        self, *args: Arg, results: tuple[TensorType, ...] | None = None, **keywords: Arg
    ) -> Value:
        """Appends a node and returns its only result, see `Builder.emit`."""
        return self._builder.emit(self._full_name(), *args, results=results, **keywords)

    def all(
        self, *args: Arg, results: tuple[TensorType, ...] | None = None, **keywords: Arg
    ) -> tuple[Value, ...]:
        """Appends a node and returns all of its results, see `Builder.emit`."""
        return self._builder.emit_all(self._full_name(), *args, results=results, **keywords)

    def _full_name(self) -> str:
        default = f"{self._name}.default"
        return default if registry.find(default) else self._name


class NameSource:
    """Hands out names that are not taken. All begin with `prefix`."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._counts: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        count = self._counts.get(stem, 0)
        self._counts[stem] = count + 1
        return f"{self._prefix}{stem}_{count}"

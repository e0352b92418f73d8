"""The constants and states that the methods and the lowerings of a program share."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import NamedTuple, TypeAlias

from purevk.dtypes import DType
from purevk.ir import Constant, Graph, Label, Size, Value, map_leaves
from purevk.ir.types import TensorType


class ConstantKey(NamedTuple):
    """What tells constants apart: where their bytes are on the host, and their type."""

    address: Hashable
    nbytes: int
    dtype: DType
    dims: tuple[Size, ...]


class StateKey(NamedTuple):
    """What tells states apart: the key of their label, or their method and the name there; and their
    type."""

    name: str | tuple[str, str]
    dtype: DType
    dims: tuple[Size, ...]


LeafKey: TypeAlias = ConstantKey | StateKey


class Leaves:
    """One value for each constant and each state of a program, so that weights are on the device once
    and state is one."""

    def __init__(self) -> None:
        self._values: dict[LeafKey, Value] = {}
        self._keys: dict[Value, LeafKey] = {}
        # The bytes of constants: as long as they live, no other constant has their address.
        self._held: dict[LeafKey, Constant] = {}
        self._names: set[str] = set()

    def share(self, method: str, graph: Graph) -> Graph:
        """The graph of a method with these values in place of its own constants and states."""
        mapping: dict[Value, Value] = {}
        for inner in graph.nested():
            for value, constant in inner.constants.items():
                mapping[value] = self.constant(value.name, value.type, constant)
            for value in inner.states:
                if value not in mapping:
                    mapping[value] = self.state(value.name, _state_key(method, value, graph.labels))
        return map_leaves(graph, mapping.__getitem__)

    def constant(self, name: str, type: TensorType, constant: Constant) -> Value:
        """The value of a constant with these bytes. A new one gets the name, or one like it."""
        key = ConstantKey(constant.memory, constant.nbytes, type.dtype, type.dims)
        self._held.setdefault(key, constant)
        return self._value(key, name, type)

    def state(self, name: str, key: StateKey) -> Value:
        """The value of a state. A new one gets the name, or one like it."""
        return self._value(key, name, TensorType(key.dtype, key.dims))

    def key(self, value: Value) -> LeafKey | None:
        """The key of a value of this program; None: it is no constant and no state of a method as the
        front end made it."""
        return self._keys.get(value)

    def _value(self, key: LeafKey, name: str, type: TensorType) -> Value:
        leaf = self._values.get(key)
        if leaf is not None:
            return leaf
        free, count = name, 0
        while free in self._names:
            count += 1
            free = f"{name}_{count}"
        self._names.add(free)
        value = self._values[key] = Value(free, type)
        self._keys[value] = key
        return value

    def forget_constants(self, used: Collection[Value] = ()) -> None:
        """Forgets the constants that are not among `used`. Another one may get the address of one as
        soon as its bytes are released."""
        for key, value in list(self._values.items()):
            if isinstance(key, ConstantKey) and value not in used:
                del self._values[key], self._keys[value], self._held[key]


def _state_key(method: str, value: Value, labels: Mapping[Value, Label]) -> StateKey:
    label = labels.get(value) or Label(value.name)
    return StateKey(label.key or (method, label.name), value.type.dtype, value.type.dims)

"""Makes nodes whose result types come from the operators' shape functions."""

from __future__ import annotations

from typing import Any

from purevk.errors import GraphError
from purevk.ir import Node, TensorType, Value
from purevk.ops import registry


class Builder:
    """Collects nodes in order.

    Args:
        taken: names of values that are in use.
        source: where the nodes come from, for messages.
    """

    def __init__(self, source: str = "", names: NameSource | None = None) -> None:
        self.nodes: list[Node] = []
        self.source = source
        self.names = names or NameSource()

    def emit(self, op: str, *args: Any, results: tuple[TensorType, ...] | None = None) -> Any:
        """Appends `op(*args)`; returns its result, a tuple of them, or None where it has none."""
        row = registry.find(op)
        if row is None:
            raise GraphError(f"no operator {op}", where=self.source)
        bound = row.bind(args)
        full = tuple(bound[name] for name in row.parameters)
        types = results if results is not None else row.infer(full)
        stem = row.name.split(".")[1]
        values = tuple(Value(self.names.fresh(stem), type) for type in types)
        self.nodes.append(Node(row.name, full, values, self.source))
        if not values:
            return None
        return values[0] if len(values) == 1 else values


class NameSource:
    """Hands out names that are not taken."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        count = self._counts.get(stem, 0)
        self._counts[stem] = count + 1
        return f"{stem}_{count}"

"""The parameters of operators: their names, their order and their defaults.

A node has its arguments by position. What reads them by name (`Node.tensor("weight")`) asks this
table, which the registry of operators fills: `ir` itself knows no operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Schema:
    """The parameters of one operator.

    Attributes:
        positions: where each parameter stands among a node's arguments.
        defaults: the parameters that have a default.
    """

    positions: Mapping[str, int]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., object]) -> Schema:
        """The schema that a function's signature spells out."""
        parameters = inspect.signature(function).parameters
        return cls(
            {name: position for position, name in enumerate(parameters)},
            {
                name: parameter.default
                for name, parameter in parameters.items()
                if parameter.default is not parameter.empty
            },
        )


_declared: dict[str, Callable[..., object]] = {}
_schemas: dict[str, Schema] = {}  # of those that were asked for: signatures take time to read


def declare(op: str, function: Callable[..., object]) -> None:
    """Gives an operator the signature of a function as its schema."""
    withdraw(op)
    _declared[op] = function


def withdraw(op: str) -> None:
    """Takes an operator's schema away."""
    _declared.pop(op, None)
    _schemas.pop(op, None)


def find(op: str) -> Schema | None:
    """The schema of an operator, or None if none was declared."""
    found = _schemas.get(op)
    if found is None and op in _declared:
        found = _schemas[op] = Schema.of(_declared[op])
    return found

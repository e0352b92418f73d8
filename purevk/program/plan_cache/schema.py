"""Checks that the fields of objects have the types that their classes declare."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any, TypeAlias

from purevk.dtypes import DType
from purevk.ir import BorrowedConstant, Constant, Dim, Graph, Value
from purevk.ir.arguments import Attribute

Check: TypeAlias = "Callable[[Collection[Any]], None]"
"""Checks values that one field has in many objects, all at once."""
_PLAIN = (types.NoneType, bool, int, float, complex, str)
_ARGUMENT = (*_PLAIN, Value, Graph, Dim, DType)
_MAPPINGS = (dict, Mapping)


class Unreadable(Exception):
    """A record is not what purevk writes."""


def field_checks(cls: type) -> tuple[tuple[str, Check], ...]:
    """The fields of a dataclass or named tuple, in order, each with its check.

    Raises:
        Unreadable: it is another class, or a field may hold what is no data.
    """
    if "__dataclass_fields__" in vars(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        names = list(cls._fields)
    else:
        raise Unreadable(f"{cls.__name__} has no fields")
    hints: dict[str, Any] = {}
    try:
        for base in reversed(cls.__mro__):
            if dataclasses.is_dataclass(base) or base is cls:
                names_of = vars(sys.modules[base.__module__])
                hints |= inspect.get_annotations(base, globals=names_of, locals={}, eval_str=True)
    except NameError as error:
        raise Unreadable(f"the types of {cls.__name__} are not known") from error
    return tuple((name, check_of(hints[name])) for name in names)


def check_of(hint: Any) -> Check:
    """The check of values that are declared to be of a type."""
    exact: set[type] = set()
    generic: dict[type, Check] = {}
    _collect(hint, exact, generic)
    if not generic:
        return _Exact(frozenset(exact))
    return _Mixed(frozenset(exact), generic)


def _collect(hint: Any, exact: set[type], generic: dict[type, Check]) -> None:
    origin = typing.get_origin(hint)
    if hint is None or hint is types.NoneType:
        exact.add(types.NoneType)
    elif origin in (typing.Union, types.UnionType):
        for member in typing.get_args(hint):
            _collect(member, exact, generic)
    elif origin is typing.Literal:
        exact.update(map(type, typing.get_args(hint)))
    elif hint is Any:
        exact.update(_PLAIN)
        generic[tuple] = _Nested(frozenset(_PLAIN))
    elif hint is Attribute or isinstance(hint, typing.ForwardRef):  # members of `Arg`
        exact.update(_ARGUMENT)
        generic[tuple] = _Nested(frozenset(_ARGUMENT), attributes=True)
        generic[object] = _check_attributes
    elif origin is tuple and len(typing.get_args(hint)) == 2 and typing.get_args(hint)[1] is ...:
        generic.setdefault(tuple, _Items(check_of(typing.get_args(hint)[0])))
    elif origin is tuple:
        generic.setdefault(tuple, _Columns([check_of(arg) for arg in typing.get_args(hint)]))
    elif origin is frozenset:
        generic[frozenset] = _Items(check_of(typing.get_args(hint)[0]))
    elif origin in _MAPPINGS:
        keys, values = map(check_of, typing.get_args(hint))
        generic[dict] = _Pairs(keys, values)
    elif hint is bool:
        exact.add(bool)
    elif hint is int:
        exact.update((int, bool))
    elif hint is float:
        exact.update((float, int))
    elif isinstance(hint, type) and hint is not type and hint is not object:
        exact.add(hint)
        if hint is Constant:
            exact.add(BorrowedConstant)  # no record makes one: it names one that there is
    elif typing.get_origin(hint) is not type and hint is not type:
        raise Unreadable(f"a field of type {hint} cannot be checked")


class _Exact:
    def __init__(self, exact: frozenset[type]) -> None:
        self._exact = exact

    def __call__(self, values: Collection[Any]) -> None:
        if not self._exact.issuperset(map(type, values)):
            raise Unreadable(f"{sorted(cls.__name__ for cls in self._exact)} are expected")


class _Mixed:
    """Values of several types, some of which have items."""

    def __init__(self, exact: frozenset[type], generic: Mapping[type, Check]) -> None:
        self._exact, self._generic = exact, generic

    def __call__(self, values: Collection[Any]) -> None:
        for kind in set(map(type, values)) - self._exact:
            check = self._generic.get(kind) or self._generic.get(object)
            if check is None:
                raise Unreadable(f"a {kind.__name__} is not expected")
            check(list({id(value): value for value in values if type(value) is kind}.values()))


class _Items:
    def __init__(self, items: Check) -> None:
        self._items = items

    def __call__(self, values: Collection[Any]) -> None:
        self._items(list(chain.from_iterable(values)))


class _Columns:
    def __init__(self, columns: list[Check]) -> None:
        self._columns = columns

    def __call__(self, values: Collection[Any]) -> None:
        if set(map(len, values)) != {len(self._columns)}:
            raise Unreadable(f"{len(self._columns)} items are expected")
        for check, column in zip(self._columns, zip(*values)):
            check(column)


class _Pairs:
    def __init__(self, keys: Check, values: Check) -> None:
        self._keys, self._values = keys, values

    def __call__(self, values: Collection[Any]) -> None:
        for value in values:
            self._keys(value.keys())
            self._values(value.values())


class _Nested:
    """Tuples of these types, and of such tuples."""

    def __init__(self, exact: frozenset[type], attributes: bool = False) -> None:
        self._exact, self._attributes = exact, attributes

    def __call__(self, values: Collection[Any]) -> None:
        while values:
            items = {id(item): item for item in chain.from_iterable(values)}.values()
            values = [item for item in items if type(item) is tuple]
            others = set(map(type, items)) - self._exact - {tuple}
            if others and not self._attributes:
                raise Unreadable("a plain value is expected")
            _check_attributes([item for item in items if type(item) in others])


def _check_attributes(values: Collection[Any]) -> None:
    for kind in set(map(type, values)):
        if not dataclasses.is_dataclass(kind) and not hasattr(kind, "_fields"):
            raise Unreadable(f"a {kind.__name__} is no argument of a node")

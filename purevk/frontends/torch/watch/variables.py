"""Variables of Python that `forward` can read and write, and what they hold at one moment: entries of
dicts, attributes, default arguments, and variables of closures."""

from __future__ import annotations

import array
import collections
import itertools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from purevk.frontends.torch.watch.values import is_same, items_of, pairs_of

ABSENT = object()  # a variable has no value
# Containers whose items can be exchanged: derived ones before their bases.
_MUTABLE = (
    *(collections.OrderedDict, dict, list, collections.deque, set, bytearray, array.array),
    np.ndarray,
)
_TOLD = (itertools.count, itertools.repeat)  # iterators whose texts tell where they are


def read(owner: Any, key: Any) -> Any:
    """The value of a variable, or `ABSENT`.

    Args:
        owner, key: a dict and a key; a class and the name of an attribute; a variable of a closure
            and its name; a function and the name of its default arguments; an object and a
            descriptor of its class for an attribute in `__slots__`.
    """
    if isinstance(owner, dict):
        return dict.get(owner, key, ABSENT)
    if isinstance(owner, type):
        return vars(owner).get(key, ABSENT)
    if isinstance(owner, types.FunctionType):
        return getattr(owner, key)
    try:
        return owner.cell_contents if isinstance(owner, types.CellType) else key.__get__(owner)
    except (AttributeError, ValueError):  # not assigned yet, or deleted
        return ABSENT


def _write(owner: Any, key: Any, value: Any) -> None:
    """Gives a variable a value, or none if it is `ABSENT`. Calls no code of classes."""
    if value is ABSENT and read(owner, key) is ABSENT:
        return
    if isinstance(owner, dict):
        dict.__delitem__(owner, key) if value is ABSENT else dict.__setitem__(owner, key, value)
    elif isinstance(owner, type):
        type.__delattr__(owner, key) if value is ABSENT else type.__setattr__(owner, key, value)
    elif isinstance(owner, types.FunctionType):
        setattr(owner, key, value)
    elif not isinstance(owner, types.CellType):
        key.__delete__(owner) if value is ABSENT else key.__set__(owner, value)
    elif value is ABSENT:
        del owner.cell_contents
    else:
        owner.cell_contents = value


def slots_of(cls: type) -> list[Any]:
    """The descriptors of the attributes that a class and its bases have in `__slots__`."""
    return [
        descriptor
        for base in cls.__mro__
        if "__slots__" in vars(base)
        for descriptor in vars(base).values()
        if isinstance(descriptor, types.MemberDescriptorType)
    ]


@dataclass(frozen=True)
class State:
    """What a variable holds at one moment.

    Attributes:
        owner, key: the variable, as `read` takes it.
        value: its value, or `ABSENT`.
        contents: the containers and iterators in it, with their items.
    """

    owner: Any
    key: Any
    value: Any
    contents: list[tuple[Any, Any]]

    @classmethod
    def at(cls, owner: Any, key: Any) -> State:
        """The state of a variable now."""
        value = read(owner, key)
        return cls(owner, key, value, list(contents(value)))

    @property
    def name(self) -> str:
        """The name of the attribute or variable."""
        if isinstance(self.owner, types.FunctionType):
            return f"default arguments of {self.owner.__name__}"
        return str(getattr(self.key, "__name__", self.key))

    def lasts(self) -> bool:
        """Whether the variable holds the same now."""
        now = read(self.owner, self.key)
        return is_untouched(self.contents) and is_same(now, self.value)

    def restore(self) -> None:
        """Gives the variable its value again, and the containers in it their items. Iterators stay where
        they are."""
        _write(self.owner, self.key, self.value)
        for container, items in self.contents:
            _fill(container, items)


def contents(value: Any) -> Iterator[tuple[Any, Any]]:
    """The containers and iterators in a value, with what they hold now. Code of classes that are
    derived from containers is not called."""
    waiting, seen = [value], set[int]()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        if isinstance(current, (*_MUTABLE, tuple)):
            seen.add(id(current))
            if not isinstance(current, (bytearray, array.array, np.ndarray)):
                waiting += items_of(current)
            if not isinstance(current, tuple):
                yield current, _items(current)
        elif isinstance(current, Iterator):
            yield current, _position(current)


def is_untouched(contents: list[tuple[Any, Any]]) -> bool:
    """Whether containers hold what they held, and iterators are where they were."""
    return all(
        is_same((_position if isinstance(current, Iterator) else _items)(current), items)
        for current, items in contents
    )


def _items(container: Any) -> Any:
    """The items of a container; pairs of a dict; a copy of an array."""
    if isinstance(container, np.ndarray):
        return np.array(container)
    return pairs_of(container) if isinstance(container, dict) else items_of(container)


def _position(iterator: Any) -> Any:
    """What changes when an iterator gives an item, as far as that can be known without one."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return [frame.f_lasti, dict(frame.f_locals)] if frame else None
    if isinstance(iterator, _TOLD):
        return repr(iterator)
    return _parts(iterator.__reduce__()) if type(iterator).__module__ == "builtins" else None


def _parts(value: Any) -> Any:
    """What an iterator is reduced to, with the positions of iterators in it."""
    if isinstance(value, tuple):
        return [_parts(part) for part in value]
    return _position(value) if isinstance(value, Iterator) else value


def _fill(container: Any, items: Any) -> None:
    """Gives a container other items, in place."""
    kind: Any = next((kind for kind in _MUTABLE if isinstance(container, kind)), None)
    if kind is None or is_untouched([(container, items)]):
        return
    if kind in (list, bytearray):
        kind.__setitem__(container, slice(None), items)
    elif kind is array.array:
        kind.__setitem__(container, slice(None), array.array(container.typecode, items))
    elif kind is np.ndarray:
        if container.shape == items.shape and container.flags.writeable:
            container[...] = items
    else:
        kind.clear(container)
        if kind is collections.deque:
            kind.extend(container, items)
        elif kind is set:
            kind.update(container, items)
        else:
            for key, item in items:
                kind.__setitem__(container, key, item)

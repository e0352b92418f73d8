"""Python values: which are data, and whether two are the same. Code of classes that override what
containers do is not called."""

from __future__ import annotations

import array
import collections
import enum
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

ATOMS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice, np.generic)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)  # whose texts tell them apart
_LISTS = (list, tuple, collections.deque, bytearray, array.array)
SEQUENCES = (*_LISTS, set, frozenset)
CONTAINERS = (*SEQUENCES, Mapping)
MAX_ITEMS = 1000  # of a container whose content is compared
MAX_ARRAY = 1 << 20  # bytes of an array of numpy whose content is compared


def is_data(value: Any) -> bool:
    """Whether a variable of a class or of a file is compared by its content. Functions, classes and
    modules, and registries of these, seldom change."""
    import torch

    if isinstance(value, CONTAINERS):
        return is_plain(value) and all(map(is_data, items_of(value)))
    return isinstance(value, (*ATOMS, np.ndarray, torch.Tensor, torch.dtype))


def items_of(container: Any) -> list[Any]:
    """The items of a container, or the values of a mapping. A class may override what lists, dicts
    and the like do, with code that raises or never ends: that code is not called."""
    for base in SEQUENCES:
        if isinstance(container, base):
            read: Any = base.__iter__
            return list(read(container))
    return [value for _, value in pairs_of(container)]


def pairs_of(mapping: Any) -> list[tuple[Any, Any]]:
    """The keys and values of a mapping. Those of a mapping that is no dict are read by its own code,
    up to one more than `MAX_ITEMS`; none if that raises."""
    if isinstance(mapping, dict):
        return list(dict.items(mapping))
    try:
        return list(itertools.islice(mapping.items(), MAX_ITEMS + 1))
    except Exception:  # code of the class
        return []


def count_of(container: Any) -> int:
    """How many items a container has, without code of its class. That of mappings that are no dicts
    is not asked."""
    base = next((base for base in (dict, *SEQUENCES) if isinstance(container, base)), None)
    return 0 if base is None else int(base.__len__(container))


def is_plain(value: Any) -> bool:
    """Whether a container is compared by its content: atoms, tensors, and containers of these, not
    too many."""
    left = MAX_ITEMS
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if not isinstance(current, CONTAINERS):
            continue
        if count_of(current) > left:
            return False
        if isinstance(current, Mapping) and not all(
            isinstance(key, ATOMS) for key, _ in pairs_of(current)
        ):
            return False
        items = items_of(current)
        left -= len(items)
        if left < 0:
            return False
        waiting += items
    return True


def is_mutable(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.nbytes <= MAX_ARRAY
    if not isinstance(value, CONTAINERS) or not is_plain(value):
        return False
    if isinstance(value, (tuple, frozenset)):
        return any(map(is_mutable, items_of(value)))
    return True


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def is_text(value: Any) -> bool:
    """Whether a container holds only values that their texts tell apart."""
    if type(value) in (dict, *SEQUENCES):
        return all(map(is_text, items_of(value)))
    return type(value) in _PLAIN


def tensors_in(value: Any) -> Iterator[Any]:
    if _is_tensor(value):
        if not value.is_inference() and value.device.type != "meta":
            yield value
    elif isinstance(value, CONTAINERS) and is_plain(value):
        for item in items_of(value):
            yield from tensors_in(item)


def copied(value: Any) -> Any:
    """A container whose containers and arrays are copies too. All else are the same objects."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in pairs_of(value)}
    if isinstance(value, _LISTS):
        return [copied(item) for item in items_of(value)]
    if isinstance(value, np.ndarray):
        return value.copy()
    return set(items_of(value)) if isinstance(value, (set, frozenset)) else value


def is_same(new: Any, old: Any) -> bool:
    """Whether two values are equal and of one type; `old` may be what `_copy` returned. NaN is
    itself. What is neither an atom nor a container nor an array is the same if it is one object. What
    its class cannot compare has changed."""
    try:
        return new is old or _is_equal(new, old)
    except Exception:  # code of classes
        return False


def _is_equal(new: Any, old: Any) -> bool:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        items, old_items = dict(pairs_of(new)), dict(pairs_of(old))
        return items.keys() == old_items.keys() and all(
            is_same(items[key], old_items[key]) for key in old_items
        )
    if isinstance(old, _LISTS) and isinstance(new, _LISTS):
        items_of_new, items_of_old = items_of(new), items_of(old)
        return len(items_of_new) == len(items_of_old) and all(
            map(is_same, items_of_new, items_of_old)
        )
    if isinstance(old, (set, frozenset)) and isinstance(new, (set, frozenset)):
        return set(items_of(new)) == set(items_of(old))
    if type(new) is not type(old):
        return False
    if isinstance(new, np.ndarray):
        same: bool = new.dtype == old.dtype and new.shape == old.shape
        return same and new.tobytes() == old.tobytes()
    if isinstance(new, (float, np.floating)):
        return repr(new) == repr(old)  # 0.0 is not -0.0
    return isinstance(new, ATOMS) and bool(new == old)

"""The Python values that the `forward` of modules reads: taken down once, compared at each call.

Export makes them part of the graph, so a change asks for another export.
"""

from __future__ import annotations

import array
import collections
import dis
import enum
import functools
import itertools
import operator
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ATOMS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, range, slice, np.generic)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)  # whose texts tell them apart
_LISTS = (list, tuple, collections.deque, bytearray, array.array)
SEQUENCES = (*_LISTS, set, frozenset)
_CONTAINERS = (*SEQUENCES, Mapping)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
# Whose classes and objects hold no settings of a model.
_LIBRARIES = ("builtins", "torch", "numpy", "logging", "threading", "functools")
MAX_ITEMS = 1000  # of a container whose content is compared
MAX_ARRAY = 1 << 20  # bytes of an array of numpy whose content is compared
MAX_OBJECTS = 100  # in a container whose attributes are read
MAX_DEPTH = 3  # of objects in objects


class Attributes:
    """The Python values of modules. Most are compared by identity, which is fast enough for every
    call.

    Seen are:

    - the attributes of modules, and of plain objects in them or in their containers, such as a
      configuration;
    - numbers, strings and what else is immutable by value; lists, tuples, deques, dicts, sets and
      arrays by their content, up to `MAX_ITEMS` items and `MAX_ARRAY` bytes; all others by
      identity;
    - sub-modules and hooks that are added, removed or exchanged;
    - of classes that are not torch's: their attributes and functions, and what these functions name
      in their closures and among the global variables of their file, as far as it is data. Of
      classes and plain objects there, the attributes that these functions name and do not assign.

    Args:
        modules: each once.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        self._types = list(map(type, modules))
        self._dicts: list[dict[str, Any]] = []  # whose number of items is compared
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._classes: list[type] = []
        self._of_classes: list[tuple[type, str]] = []  # attributes of other classes
        self._cells: list[types.CellType] = []
        self._seen: set[int] = set()
        for module in modules:
            self._read_module(module)
        of_modules = len(self._slots)
        for type_ in dict.fromkeys(self._types):
            self._read_class(type_)
        self._lengths = list(map(len, self._dicts))
        self._owners = [owner for owner, _ in self._slots]
        self._keys = [key for _, key in self._slots]
        self._values = self._now()
        # Containers of functions and classes, such as registries, are data only in modules.
        self._mutable = [
            (number, _Content(value))
            for number, value in enumerate(self._values)
            if _is_mutable(value) and (number < of_modules or is_data(value))
        ]

    def _read_module(self, module: Any) -> None:
        attributes = vars(module)
        children: dict[str, Any] = attributes["_modules"]
        self._dicts += [attributes, children, *(attributes[name] for name in _HOOKS)]
        self._slots += [(children, key) for key in children]
        torchs = type(module).__module__.startswith("torch.nn.")
        for key, value in attributes.items():
            # What modules of torch keep in private attributes follows from their public ones.
            if key not in of_every_module() and not (torchs and key.startswith("_")):
                self._slots.append((attributes, key))
                self._read_object(value, MAX_DEPTH)

    def _read_object(self, value: Any, depth: int) -> None:
        """The attributes of an object, such as a configuration, and of objects in it or in a
        container."""
        if not depth or id(value) in self._seen:
            return
        for item in objects_in(value):
            self._read_object(item, depth - 1)
        if not is_plain_object(value):
            return
        self._seen.add(id(value))
        attributes = vars(value)
        self._dicts.append(attributes)
        for key, value_ in attributes.items():
            self._slots.append((attributes, key))
            self._read_object(value_, depth - 1)

    def _read_class(self, of_module: type) -> None:
        functions: list[types.FunctionType] = []
        names: set[str] = set()
        assigned: set[str] = set()
        variables: list[Any] = []
        for cls in of_module.__mro__:
            torchs = cls is object or cls.__module__.partition(".")[0] == "torch"
            if not torchs and cls not in self._classes:
                self._classes.append(cls)
                functions += [f for f in vars(cls).values() if isinstance(f, types.FunctionType)]
        while functions:
            function = functions.pop()
            if id(function) in self._seen:
                continue
            self._seen.add(id(function))
            names |= _names_in(function.__code__)
            assigned |= _assigned_in(function.__code__)
            for cell in function.__closure__ or ():
                value = _content(cell)
                functions += _of_the_same_file(value, function)
                variables.append(value)
                if is_data(value) or is_plain_object(value):
                    self._cells.append(cell)
            for name in sorted(_names_in(function.__code__) & function.__globals__.keys()):
                value = function.__globals__[name]
                functions += _of_the_same_file(value, function)
                if not _reads_global(function.__code__, name):
                    continue
                variables.append(value)
                if is_data(value) or is_plain_object(value):
                    self._slots.append((function.__globals__, name))
        for variable in variables:
            self._read_named(variable, names - assigned, MAX_DEPTH)

    def _read_named(self, value: Any, names: Set[str], depth: int) -> None:
        """The attributes of a class or a plain object, and of plain objects in it, by their names. Also
        those that an object takes from its class, and that it may hide later."""
        cls = value if isinstance(value, type) else type(value)
        if not depth or id(value) in self._seen:
            return
        if value is not cls and not is_plain_object(value):
            return
        self._seen.add(id(value))
        bases = [
            base for base in cls.__mro__ if base.__module__.partition(".")[0] not in _LIBRARIES
        ]
        data = {
            name
            for base in bases
            for name in names & vars(base).keys()
            if is_data(vars(base)[name])
        }
        self._of_classes += [(base, name) for base in bases for name in sorted(data)]
        if value is cls:
            return
        attributes = vars(value)
        for name in sorted(data | (names & attributes.keys())):
            self._slots.append((attributes, name))
            self._read_named(attributes.get(name), names, depth - 1)

    def _now(self) -> list[Any]:
        """All values, in the same order each time."""
        values = list(map(dict.get, self._owners, self._keys))
        for cls in self._classes:
            values += vars(cls).values()
        values += [vars(cls).get(name) for cls, name in self._of_classes]
        return values + list(map(_content, self._cells))

    def tensors(self) -> list[Any]:
        """The tensors in lists, tuples, dicts and sets."""
        containers = [value for value in self._values if isinstance(value, _CONTAINERS)]
        return [tensor for value in containers for tensor in _tensors_in(value)]

    def changed(self) -> bool:
        """Whether an export could read another value than before."""
        if list(map(len, self._dicts)) != self._lengths:
            return True
        if list(map(type, self._modules)) != self._types:
            return True
        now = self._now()
        if len(now) != len(self._values):
            return True
        if not all(map(operator.is_, now, self._values)):
            # An equal value that is another object is no change.
            if not all(map(is_same, now, self._values)):
                return True
            self._values = now
        return any(content.differs(now[number]) for number, content in self._mutable)


class _Content:
    """The content of a value that can change in place."""

    def __init__(self, value: Any) -> None:
        self._copy = copied(value)
        self._text = repr(value) if _is_text(value) else None

    def differs(self, value: Any) -> bool:
        """Whether the content of a value is another one."""
        # Equal texts are the fast way to see that numbers are the same and of the same type.
        if self._text is not None and repr(value) == self._text:
            return False
        return not is_same(value, self._copy)


@functools.cache
def of_every_module() -> frozenset[str]:
    import torch

    return frozenset(vars(torch.nn.Module()))


def is_plain_object(value: Any) -> bool:
    """Whether an object is one for its attributes: no tensor, module, function, class or number."""
    import torch

    if isinstance(value, (type, types.ModuleType, torch.Tensor, torch.nn.Module, *_ATOMS)):
        return False
    if type(value).__module__.partition(".")[0] in _LIBRARIES:
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, _FUNCTIONS)


def is_data(value: Any) -> bool:
    """Whether a variable of a class or of a file is compared by its content. Functions, classes and
    modules, and registries of these, seldom change."""
    import torch

    if isinstance(value, _CONTAINERS):
        return _is_plain(value) and all(map(is_data, items_of(value)))
    return isinstance(value, (*_ATOMS, np.ndarray, torch.Tensor, torch.dtype))


def _of_the_same_file(value: Any, function: types.FunctionType) -> list[types.FunctionType]:
    """The value, if it is a function of the file that a function is in."""
    same = isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__
    return [value] if same else []


def computes_by_mode(module: Any) -> bool:
    """Whether a module in training mode computes otherwise than in eval mode: its `forward` asks.
    Dropout with probability 0 does not count."""
    function = getattr(type(module).forward, "__wrapped__", type(module).forward)
    code = getattr(function, "__code__", None)
    if not module.training or code is None or "training" not in _names_in(code):
        return False
    rates = [getattr(module, name) for name in ("p", "dropout") if hasattr(module, name)]
    return not rates or any(rate != 0 for rate in rates)


def _names_in(code: types.CodeType) -> set[str]:
    """The global variables and attributes that the code of a function names."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _assigned_in(code: types.CodeType) -> set[str]:
    """The attributes that the code of a function assigns, but for those of its first argument."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    names = {
        step.argval
        for last, step in itertools.pairwise(dis.get_instructions(code))
        if step.opname == "STORE_ATTR" and not _loads(last, code.co_varnames[:1])
    }
    return names.union(*map(_assigned_in, inner))


def _loads(step: dis.Instruction, variable: Sequence[str]) -> bool:
    """Whether an instruction ends with a variable on the stack."""
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and names[-1:] == tuple(variable)


def _reads_global(code: types.CodeType, name: str) -> bool:
    """Whether the code of a function reads a global variable. An attribute of that name is none."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return any(
        step.opname == "LOAD_GLOBAL" and step.argval == name for step in dis.get_instructions(code)
    ) or any(_reads_global(code, name) for code in inner)


def _content(cell: types.CellType) -> Any:
    """The value of a variable of a closure; a function, which is no data, if it has none."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet, or deleted
        return _content


# -- comparing -----------------------------------------------------------------------------------
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


def _count(container: Any) -> int:
    """How many items a container has, without code of its class. That of mappings that are no dicts
    is not asked."""
    base = next((base for base in (dict, *SEQUENCES) if isinstance(container, base)), None)
    return 0 if base is None else int(base.__len__(container))


def objects_in(value: Any) -> list[Any]:
    """What a container of at most `MAX_OBJECTS` items holds: plain objects, and containers of them."""
    if not isinstance(value, (dict, *SEQUENCES)) or _count(value) > MAX_OBJECTS:
        return []
    return [item for item in items_of(value) if not isinstance(item, _ATOMS)]


def _is_plain(value: Any) -> bool:
    """Whether a container is compared by its content: atoms, tensors, and containers of these, not
    too many."""
    left = MAX_ITEMS
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if not isinstance(current, _CONTAINERS):
            continue
        if _count(current) > left:
            return False
        if isinstance(current, Mapping) and not all(
            isinstance(key, _ATOMS) for key, _ in pairs_of(current)
        ):
            return False
        items = items_of(current)
        left -= len(items)
        if left < 0:
            return False
        waiting += items
    return True


def _is_mutable(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.nbytes <= MAX_ARRAY
    if not isinstance(value, _CONTAINERS) or not _is_plain(value):
        return False
    if isinstance(value, (tuple, frozenset)):
        return any(map(_is_mutable, items_of(value)))
    return True


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_text(value: Any) -> bool:
    """Whether a container holds only values that their texts tell apart."""
    if type(value) in (dict, *SEQUENCES):
        return all(map(_is_text, items_of(value)))
    return type(value) in _PLAIN


def _tensors_in(value: Any) -> Iterator[Any]:
    if _is_tensor(value):
        if not value.is_inference() and value.device.type != "meta":
            yield value
    elif isinstance(value, _CONTAINERS) and _is_plain(value):
        for item in items_of(value):
            yield from _tensors_in(item)


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
    return isinstance(new, _ATOMS) and bool(new == old)

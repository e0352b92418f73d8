"""The Python values that the `forward` of modules reads: taken down once, compared at each call.

Export makes them part of the graph, so a change asks for another export.
"""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from purevk.frontends.torch.watch.values import (
    ATOMS,
    CONTAINERS,
    SEQUENCES,
    copied,
    count_of,
    is_data,
    is_mutable,
    is_same,
    is_text,
    items_of,
    tensors_in,
)
from purevk.frontends.torch.watch.variables import ABSENT, State, read, slots_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
# Whose classes and objects hold no settings of a model.
_LIBRARIES = ("builtins", "torch", "numpy", "logging", "threading", "functools")
_DEFAULTS = ("__defaults__", "__kwdefaults__")
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
    - of classes that are not torch's: their attributes and functions, and what these functions have
      as default arguments, and name in their closures and among the global variables of their file,
      as far as it is data. Of classes and plain objects there, the attributes that these functions
      name and do not assign.

    Args:
        modules: each once.
        writable: see what these functions can change too: attributes that they or methods of the
            objects assign, and containers and iterators that are no data.
    """

    def __init__(self, modules: Sequence[Any], writable: bool = False) -> None:
        self._modules, self._writable = modules, writable
        self._types = list(map(type, modules))
        self._objects: list[dict[str, Any]] = []  # the attributes of modules and of objects
        self._dicts: list[dict[str, Any]] = []  # others whose number of items is compared
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._others: list[tuple[Any, Any]] = []  # variables that are no entries of dicts
        self._classes: list[type] = []
        self._seen: set[int] = set()
        self._added: set[tuple[int, Any]] = set()
        for module in modules:
            self._read_module(module)
        of_modules, in_objects = len(self._slots), len(self._others)
        for type_ in dict.fromkeys(self._types):
            self._read_class(type_)
        self._dicts += self._objects
        self._lengths = list(map(len, self._dicts))
        self._owners = [owner for owner, _ in self._slots]
        self._keys = [key for _, key in self._slots]
        self._values = self._now()
        # Containers of functions and classes, such as registries, are data only in modules.
        first = len(self._slots)
        numbers = {*range(of_modules), *range(first, first + in_objects)}
        self._mutable = [
            (number, _Content(value))
            for number, value in enumerate(self._values)
            if is_mutable(value) and (number in numbers or is_data(value))
        ]

    def _add(self, owner: Any, *keys: Any) -> None:
        """Adds variables that are not among those to compare."""
        for key in keys:
            if (id(owner), key) not in self._added:
                self._added.add((id(owner), key))
                (self._slots if isinstance(owner, dict) else self._others).append((owner, key))

    def _read_module(self, module: Any) -> None:
        attributes = vars(module)
        children: dict[str, Any] = attributes["_modules"]
        self._objects.append(attributes)
        self._dicts += [children, *(attributes[name] for name in _HOOKS)]
        self._add(children, *children)
        torchs = type(module).__module__.startswith("torch.nn.")
        for key, value in attributes.items():
            # What modules of torch keep in private attributes follows from their public ones.
            if key not in of_every_module() and not (torchs and key.startswith("_")):
                self._add(attributes, key)
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
        attributes = _attributes_of(value)
        self._objects.append(attributes)
        self._add(attributes, *attributes)
        members = slots_of(type(value))
        self._add(value, *members)
        for inner in (*attributes.values(), *(read(value, member) for member in members)):
            self._read_object(inner, depth - 1)

    def _read_class(self, of_module: type) -> None:
        functions: list[types.FunctionType] = []
        names: set[str] = set()
        assigned: set[str] = set()
        variables: list[Any] = []
        for cls in of_module.__mro__:
            torchs = cls is object or cls.__module__.partition(".")[0] == "torch"
            if not torchs and cls not in self._classes:
                self._classes.append(cls)
                functions += [f for value in vars(cls).values() for f in _functions_in(value)]
        while functions:
            function = functions.pop()
            if id(function) in self._seen:
                continue
            self._seen.add(id(function))
            code, variables_of_file = function.__code__, function.__globals__
            names |= _names_in(code)
            assigned |= _assigned_in(code)
            self._add(function, *(key for key in _DEFAULTS if getattr(function, key)))
            self._objects.append(vars(function))
            self._add(vars(function), *vars(function))
            named: list[tuple[Any, str]] = [
                *zip(function.__closure__ or (), code.co_freevars),
                *((variables_of_file, name) for name in _names_in(code) & variables_of_file.keys()),
            ]
            for owner, name in sorted(named, key=lambda variable: variable[1]):
                value = read(owner, name)
                in_file = owner is variables_of_file
                for inner in _functions_in(value):
                    same_file = inner.__globals__ is variables_of_file
                    # What a decorator wraps may be of another file than it.
                    if same_file or (not in_file and not _is_of_library(inner)):
                        functions.append(inner)
                if in_file and not _reads_global(code, name):
                    continue
                variables.append(value)
                if self._is_seen(value):
                    self._add(owner, name)
        for variable in variables:
            self._read_named(variable, names - assigned, MAX_DEPTH)

    def _is_seen(self, value: Any) -> bool:
        """Whether a variable of a file or a closure is one that forward reads as data."""
        if self._writable and isinstance(value, (*CONTAINERS, Iterator)):
            return True
        return is_data(value) or is_plain_object(value)

    def _read_named(self, value: Any, names: Set[str], depth: int) -> None:
        """The attributes of a class or a plain object, and of plain objects in it, by their names; all
        where methods can change them. Also those that an object takes from its class, and that it may
        hide later."""
        cls = value if isinstance(value, type) else type(value)
        if not depth or id(value) in self._seen:
            return
        for item in objects_in(value):
            self._read_named(item, names, depth - 1)
        if value is not cls and not is_plain_object(value):
            return
        self._seen.add(id(value))
        bases = [base for base in cls.__mro__ if not _is_of_library(base)]
        data = {
            name
            for base in bases
            for name in self._of(names, vars(base))
            if self._is_seen(vars(base)[name])
        }
        for base in bases:
            self._add(base, *sorted(data))
        if value is cls:
            return
        attributes = _attributes_of(value)
        if self._writable:
            self._objects.append(attributes)
        keys = sorted(data | self._of(names, attributes))
        slots = {slot.__name__: slot for slot in slots_of(cls)}
        members = [slots[name] for name in self._of(names, slots)]
        self._add(attributes, *keys)
        self._add(value, *members)
        for inner in (*map(attributes.get, keys), *(read(value, member) for member in members)):
            self._read_named(inner, names, depth - 1)

    def _of(self, names: Set[str], attributes: Mapping[str, Any]) -> Set[str]:
        """The names of the attributes to read, of those that functions name."""
        return set(attributes) if self._writable else names & attributes.keys()

    def _now(self) -> list[Any]:
        """All values, in the same order each time."""
        values = list(map(dict.get, self._owners, self._keys))
        values += [read(owner, key) for owner, key in self._others]
        for cls in self._classes:
            values += vars(cls).values()
        return values

    def watched(self) -> Callable[[], list[tuple[State, State]]]:
        """A function that gives what variables hold by then, if it is something else than now: the
        states before and after. Attributes that are new are among them."""
        of_classes = ((cls, name) for cls in self._classes for name in vars(cls))
        before = [State.at(*each) for each in (*self._slots, *self._others, *of_classes)]
        owners: list[Any] = [*self._objects, *self._classes]
        keys = [frozenset(_keys_of(owner)) for owner in owners]

        def changes() -> list[tuple[State, State]]:
            old = [state for state in before if not state.lasts()]
            for owner, known in zip(owners, keys):
                old += [
                    State(owner, key, ABSENT, []) for key in _keys_of(owner) if key not in known
                ]
            return [(state, State.at(state.owner, state.key)) for state in old]

        return changes

    def tensors(self) -> list[Any]:
        """The tensors in lists, tuples, dicts and sets."""
        containers = [value for value in self._values if isinstance(value, CONTAINERS)]
        return [tensor for value in containers for tensor in tensors_in(value)]

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
        self._text = repr(value) if is_text(value) else None

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

    if isinstance(value, (type, types.ModuleType, torch.Tensor, torch.nn.Module, *ATOMS)):
        return False
    if _is_of_library(type(value)):
        return False
    if isinstance(value, _FUNCTIONS):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(slots_of(type(value)))


def _is_of_library(thing: Any) -> bool:
    """Whether a class or function is one that has no settings of a model."""
    return str(thing.__module__).partition(".")[0] in _LIBRARIES


def _attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of a plain object; an empty dict if all are in `__slots__`."""
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    return attributes


def _keys_of(owner: Any) -> Iterable[str]:
    """The names of the attributes of a class, or the keys of a dict."""
    return vars(owner) if isinstance(owner, type) else owner


def _functions_in(value: Any) -> list[types.FunctionType]:
    """The functions of a function, a method of a class, or a property."""
    if isinstance(value, property):
        inner = [value.fget, value.fset]
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        inner = [value.__func__]
    else:
        inner = [value]
    return [function for function in inner if isinstance(function, types.FunctionType)]


def computes_by_mode(module: Any) -> bool:
    """Whether a module in training mode computes otherwise than in eval mode: its `forward` asks.
    Dropout with probability 0 does not count."""
    function = getattr(type(module).forward, "__wrapped__", type(module).forward)
    code = getattr(function, "__code__", None)
    if not module.training or code is None or "training" not in _names_in(code):
        return False
    rates = [getattr(module, name) for name in ("p", "dropout") if hasattr(module, name)]
    return not rates or any(rate != 0 for rate in rates)


@functools.lru_cache(maxsize=10_000)
def _names_in(code: types.CodeType) -> set[str]:
    """The global variables and attributes that the code of a function names."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


@functools.lru_cache(maxsize=10_000)
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


@functools.lru_cache(maxsize=10_000)
def _reads_global(code: types.CodeType, name: str) -> bool:
    """Whether the code of a function reads a global variable. An attribute of that name is none."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return any(
        step.opname == "LOAD_GLOBAL" and step.argval == name for step in dis.get_instructions(code)
    ) or any(_reads_global(code, name) for code in inner)


def objects_in(value: Any) -> list[Any]:
    """What a container of at most `MAX_OBJECTS` items holds: plain objects, and containers of them."""
    if not isinstance(value, (dict, *SEQUENCES)) or count_of(value) > MAX_OBJECTS:
        return []
    return [item for item in items_of(value) if not isinstance(item, ATOMS)]

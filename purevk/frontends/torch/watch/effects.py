"""What a module does while torch.export traces it that the exported program does not show: it
changes containers of its caller or its own attributes, or asks for the strides of a tensor."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import functools
import operator
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from purevk.errors import UnsupportedProgramError
from purevk.frontends.torch.watch.attributes import (
    MAX_DEPTH,
    is_plain_object,
    is_same,
    items_of,
    objects_in,
    of_every_module,
    pairs_of,
)

# Methods and functions that answer by the strides of a tensor.
_ASKING = frozenset(("stride", "is_contiguous", "storage_offset", "as_strided", "dim_order"))
# Methods and functions that give a view or a copy, by the strides of a tensor.
VIEW_OR_COPY = frozenset(("reshape", "reshape_as", "flatten", "ravel", "contiguous", "to"))
# Containers that may hold others: derived ones before their bases.
_NESTING = (tuple, list, collections.deque, collections.OrderedDict, collections.defaultdict, dict)
_OF_ARRAYS = ("array", "builtins", "numpy")  # modules whose arrays are copied
_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True)
class Changed:
    """An attribute that `forward` changed.

    Attributes:
        owner: the attributes of a module, or of an object in it.
        existed: whether there was such an attribute.
        old: its value, or a copy if it can change in place.
    """

    owner: dict[str, Any]
    key: str
    existed: bool
    old: Any
    new: Any

    def restore(self) -> None:
        """Gives the attribute its old value again."""
        if self.existed:
            self.owner[self.key] = self.old
        else:
            self.owner.pop(self.key, None)


@dataclass
class Effects:
    """What `forward` did beside computing its result.

    Attributes:
        containers: the lists and dicts among its arguments that it changed, by their kind.
        attributes: the attributes that it changed.
        asked_for_strides: whether the code of the module, not torch's own, asked for strides.
        viewed_or_copied: whether it called what gives a view or a copy, by the strides.
    """

    containers: list[str] = field(default_factory=list)
    attributes: list[Changed] = field(default_factory=list)
    asked_for_strides: bool = False
    viewed_or_copied: bool = False


@contextlib.contextmanager
def watched(module: Any) -> Iterator[Effects]:
    """Within, a call of the module adds to the effects. At the end, the module has the attributes
    that it had before."""
    effects = Effects()
    if isinstance(module, torch.jit.ScriptModule):
        yield effects
        return
    forward, own = module.forward, vars(module)
    patched = "forward" in own
    objects = [(vars(submodule), dict(vars(submodule))) for submodule in module.modules()]

    @functools.wraps(forward)
    def watching(*args: Any, **kwargs: Any) -> Any:
        containers = [
            (container, _items(container)) for container in _containers((*args, *kwargs.values()))
        ]
        before = _attributes(module)
        with _Asking(effects), _same_autocast():
            result = forward(*args, **kwargs)
        effects.containers += [
            type(container).__name__
            for container, old in containers
            if not _is_untouched(container, old)
        ]
        effects.attributes = list(_changes(before, _attributes(module)))
        return result

    own["forward"] = watching
    try:
        yield effects
    finally:
        if patched:
            own["forward"] = forward
        else:
            del own["forward"]
        # torch.export leaves copies of lists, tuples and dicts in modules.
        for attributes, before_export in objects:
            attributes.update(before_export)
        for attribute in effects.attributes:
            attribute.restore()


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Within, torch does not warn of what no user can change."""
    with warnings.catch_warnings():
        # torch.export copies a class of its own that it has deprecated.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        # Recurrent layers keep a list of their parameters, and set it anew in each call.
        warnings.filterwarnings(
            "ignore",
            r"The tensor attributes? (self\.[\w.]*_flat_weights\[\d+\](, )?)+ (was|were) assigned",
        )
        # `watched` takes notes while dynamo traces the body of a loop or branch.
        warnings.filterwarnings(
            "ignore",
            r"(?s)While compiling, we found certain side effects.*"
            r"\['___get_torch_function_mode_stack_at\(\d+\)\._effects'\]$",
        )
        yield


def _same_autocast() -> contextlib.AbstractContextManager[Any]:
    """`torch.autocast` as it is around the export. torch.export records only a context that `forward`
    enters, not one that is around it."""
    if not torch.is_autocast_enabled("cpu"):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.autocast(
        "cpu", dtype=torch.get_autocast_dtype("cpu")
    )
    return context


class _Asking(TorchFunctionMode):
    """Notes that code outside of torch asks for strides."""

    def __init__(self, effects: Effects) -> None:
        super().__init__()
        self._effects = effects

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _ASKING:
            caller = sys._getframe(1).f_code.co_filename
            self._effects.asked_for_strides |= not caller.startswith(_TORCH)
        self._effects.viewed_or_copied |= name in VIEW_OR_COPY
        return function(*args, **(kwargs or {}))


def refuse_effects(module: Any, effects: Effects, program: Any) -> None:
    """Raises `UnsupportedProgramError` if a call changes what an exported program cannot change: a
    container of the caller, or a tensor that it reads and replaces."""
    where = type(module).__name__
    if effects.containers:
        raise UnsupportedProgramError(
            f"forward changes a {effects.containers[0]} that it is given",
            where=where,
            why="torch.export records what is computed, not what is done to Python objects",
            next="copy the container first, and return what the caller needs",
        )
    read = {id(value) for value in program.constants.values()}
    for attribute in effects.attributes:
        if isinstance(attribute.new, torch.Tensor) and id(attribute.old) in read:
            raise UnsupportedProgramError(
                f"forward reads the tensor {attribute.key!r} and replaces it",
                where=where,
                why="torch.export takes a tensor that is no buffer for a constant",
                next=f"make it a buffer: self.register_buffer({attribute.key!r}, ...)",
            )


def refuse_other(module: Any, effects: Effects, first: Any, second: Any) -> None:
    """Raises `UnsupportedProgramError` if the second call of a module computes otherwise than the
    first.

    Args:
        one: the exported program of the first call.
        second: that of a call with the attributes that the first has changed; None: it failed.
    """
    if second is not None and _alike(first, second):
        return
    changes = python_changes(effects)
    names = ", ".join(dict.fromkeys(repr(change.key) for change in changes))
    cure = "keep it in a buffer (register_buffer) and write into that, or pass it as an input"
    if any(
        change.key == "is_updated" and "cross_attention_cache" in change.owner for change in changes
    ):
        cure = (
            "make a method for each value of is_updated, one for the first token and one for the "
            "others: docs/state.md, Caches of transformers"
        )
    elif all(map(_is_of_sizes, changes)) and len(changes) < len(effects.attributes):
        cure = (
            "if the tensors that forward keeps follow from these sizes alone, call the module once with"
            " the example inputs, then compile it; for dynamic sizes, have forward compute them in each"
            f" call; else {cure}"
        )
    raise UnsupportedProgramError(
        f"forward changes what the next call reads: {names}",
        where=type(module).__name__,
        why="torch.export records what is computed, not what is done to Python objects",
        next=cure,
    )


def python_changes(effects: Effects) -> list[Changed]:
    """The attributes that changed to other Python values, lists of tensors included. A dict of
    tensors, or a tensor in place of None, is taken for a cache of what any call computes."""
    return [
        attribute
        for attribute in effects.attributes
        if not isinstance(attribute.new, torch.Tensor)
        and not (isinstance(attribute.new, dict) and any(map(_has_tensors, attribute.new.values())))
    ]


def _is_of_sizes(change: Changed) -> bool:
    """Whether the new value is a size, or several."""
    items = items_of(change.new) if isinstance(change.new, (list, tuple)) else [change.new]
    return all(isinstance(item, (int, torch.SymInt, tuple)) for item in items)


@contextlib.contextmanager
def applied(changes: list[Changed]) -> Iterator[None]:
    """Within, the attributes have their new values."""
    for change in changes:
        change.owner[change.key] = change.new
    try:
        yield
    finally:
        for change in changes:
            change.restore()


def _alike(one: Any, other: Any) -> bool:
    """Whether two exported programs compute the same."""
    if one.graph_module.code != other.graph_module.code:
        return False
    first, second = list(one.constants.values()), list(other.constants.values())
    return len(first) == len(second) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b for a, b in zip(first, second)
    )


# -- snapshots -----------------------------------------------------------------------------------
def _containers(arguments: Sequence[Any]) -> Iterator[Any]:
    """The lists and dicts in arguments."""
    waiting = [*arguments]
    while waiting:
        current = waiting.pop()
        if isinstance(current, (list, tuple, dict)):
            waiting += items_of(current)
        if isinstance(current, (list, dict)):
            yield current


def _items(container: Any) -> list[Any]:
    """The items of a list; the keys and values of a dict."""
    if isinstance(container, dict):
        return [part for pair in pairs_of(container) for part in pair]
    return items_of(container)


def _is_untouched(container: Any, old: list[Any]) -> bool:
    new = _items(container)
    return len(new) == len(old) and all(a is b for a, b in zip(new, old))


_Taken = list[tuple[dict[str, Any], dict[str, Any]]]


def _attributes(module: Any) -> _Taken:
    """The attributes of modules, and of plain objects in them or in their containers, copied where
    they can change in place."""
    attributes: _Taken = []
    seen: set[int] = set()

    def read(owner: dict[str, Any], keys: Sequence[str], depth: int) -> None:
        attributes.append((owner, {key: _copied(owner[key]) for key in keys}))
        for key in keys:
            read_object(owner[key], depth)

    def read_object(value: Any, depth: int) -> None:
        if not depth or id(value) in seen:
            return
        for item in objects_in(value):
            read_object(item, depth - 1)
        if is_plain_object(value):
            seen.add(id(value))
            read(vars(value), list(vars(value)), depth - 1)

    for submodule in module.modules():
        own = vars(submodule)
        keys = [key for key in own if key not in of_every_module() and key != "forward"]
        read(own, keys, MAX_DEPTH)
    return attributes


def _copied(value: Any, depth: int = 20) -> Any:
    """A copy of a container or an array, of the same type; other values, and what is deeper in
    containers, as they are. Code of classes that are derived from containers is not called."""
    if not depth or isinstance(value, frozenset):
        return value
    if isinstance(value, (np.ndarray, bytearray, array.array)):
        return copy.copy(value) if type(value).__module__ in _OF_ARRAYS else value
    if isinstance(value, set):
        return set.copy(value)
    base: Any = next((base for base in _NESTING if isinstance(value, base)), None)
    if base is None:
        return value
    items = [_copied(item, depth - 1) for item in items_of(value)]
    if base is tuple:
        if all(map(operator.is_, items, items_of(value))):
            return value
        return tuple.__new__(type(value), items)
    new = base.__new__(type(value))
    if isinstance(getattr(value, "__dict__", None), dict):
        vars(new).update(vars(value))
    if base is list:
        list.extend(new, items)
    elif base is collections.deque:
        collections.deque.__init__(new, items, value.maxlen)
    else:
        if base is collections.defaultdict:
            new.default_factory = value.default_factory
        for (key, _), item in zip(pairs_of(value), items):
            base.__setitem__(new, key, item)
    return new


def _changes(before: _Taken, after: _Taken) -> Iterator[Changed]:
    values_of = {id(owner): values for owner, values in before}
    for owner, values in after:
        old = values_of.get(id(owner))
        if old is None:
            continue
        for key, value in values.items():
            if key not in old:
                yield Changed(owner, key, False, None, value)
            elif not is_same(value, old[key]):
                yield Changed(owner, key, True, old[key], value)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)

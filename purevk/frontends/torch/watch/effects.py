"""What a module does while torch.export traces it that the exported program does not show: it
changes containers of its caller or its own attributes, or asks for the strides of a tensor."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from purevk.errors import UnsupportedProgramError
from purevk.frontends.torch.elements.traced_numbers import NUMBERS, name_of, writes
from purevk.frontends.torch.watch.attributes import Attributes
from purevk.frontends.torch.watch.values import items_of
from purevk.frontends.torch.watch.variables import State, contents, is_untouched

# Methods and functions that answer by the strides of a tensor.
_ASKING = frozenset(("stride", "is_contiguous", "storage_offset", "as_strided", "dim_order"))
# Methods and functions that give a view or a copy, by the strides of a tensor.
VIEW_OR_COPY = frozenset(("reshape", "reshape_as", "flatten", "ravel", "contiguous", "to"))
# Methods and functions that read no elements of their first argument, and of all others.
_LIKE_FIRST = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full"
    " new_tensor".split()
)
_LIKE_OTHERS = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))
_TORCH = os.path.dirname(torch.__file__)


@dataclass(frozen=True)
class Change:
    """A value that `forward` changed, in an attribute or in another variable.

    Attributes:
        old, new: what the variable held before and after.
        is_cache: whether it is taken for a cache of what any call computes: a tensor, a dict with
            tensors, or a list with tensors in place of None, that follow from no input.
        is_of_sizes: whether the new value is a size, or several.
    """

    old: State
    new: State
    is_cache: bool
    is_of_sizes: bool

    @classmethod
    def of(cls, old: State, new: State, calls: _Calls) -> Change:
        value = new.value
        tensors = _tensors_in(value)
        is_cache = isinstance(value, (dict, torch.Tensor)) or _fills_gaps(old, new)
        is_cache = is_cache and bool(tensors) and not any(map(calls.follows, tensors))
        return cls(old, new, is_cache, _is_of_sizes(value))


@dataclass
class Effects:
    """What `forward` did beside computing its result.

    Attributes:
        containers: the lists and dicts among its arguments that it changed, by their kind.
        changes: what it changed in attributes and variables.
        asked_for_strides: whether the code of the module, not torch's own, asked for strides.
        viewed_or_copied: whether it called what gives a view or a copy, by the strides.
        has_numbers: whether it made numbers of elements of inputs, or has a loop or branch: any tensor
            may follow from inputs then.
    """

    containers: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    asked_for_strides: bool = False
    viewed_or_copied: bool = False
    has_numbers: bool = False


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
        arguments = list(contents((args, kwargs)))
        changes = Attributes(list(module.modules()), writable=True).watched()
        calls = _Calls(effects, (args, kwargs))
        try:
            with calls, _same_autocast():
                return forward(*args, **kwargs)
        finally:
            effects.containers += [
                type(argument[0]).__name__ for argument in arguments if not is_untouched([argument])
            ]
            effects.changes = [Change.of(*states, calls) for states in changes()]

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
        for change in effects.changes:
            change.old.restore()


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


class _Calls(TorchFunctionMode):
    """Notes that code outside of torch asks for strides, and which tensors follow from the elements of
    inputs."""

    def __init__(self, effects: Effects, inputs: Any) -> None:
        super().__init__()
        self._effects = effects
        self._following: dict[int, torch.Tensor] = {}  # held, so that identities stay their own
        self._add(inputs)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in _ASKING:
            caller = sys._getframe(1).f_code.co_filename
            self._effects.asked_for_strides |= not caller.startswith(_TORCH)
        self._effects.viewed_or_copied |= name in VIEW_OR_COPY
        if torch.compiler.is_dynamo_compiling():  # traces this for the body of a loop or branch
            self._effects.has_numbers = True
            return function(*args, **kwargs)
        result, name = function(*args, **kwargs), name_of(function)
        read = args[:1] if name in _LIKE_OTHERS else args[name in _LIKE_FIRST :]
        if any(map(self.follows, tree_leaves((read, kwargs)))):
            self._effects.has_numbers |= name in NUMBERS
            self._add(result)
            if writes(function, name) or "out" in kwargs:
                self._add((args[:1], kwargs.get("out")))
        return result

    def follows(self, value: Any) -> bool:
        """Whether a value is a tensor that follows from the elements of inputs."""
        return isinstance(value, torch.Tensor) and (
            self._effects.has_numbers
            or id(value) in self._following
            or id(_base_of(value)) in self._following
        )

    def _add(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                self._following[id(value)] = value
                base = _base_of(value)
                if base is not None:
                    self._following[id(base)] = base


def _base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a tensor is a view of. Other modes do not see that it is asked for."""
    with torch._C.DisableTorchFunction():
        return tensor._base


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
    for change in effects.changes:
        if isinstance(change.new.value, torch.Tensor) and id(change.old.value) in read:
            name = change.old.name
            raise UnsupportedProgramError(
                f"forward reads the tensor {name!r} and replaces it",
                where=where,
                why="torch.export takes a tensor that is no buffer for a constant",
                next=f"make it a buffer: self.register_buffer({name!r}, ...)",
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
    names = ", ".join(dict.fromkeys(repr(change.old.name) for change in changes))
    cure = "keep it in a buffer (register_buffer) and write into that, or pass it as an input"
    if any(
        change.old.name == "is_updated" and "cross_attention_cache" in change.old.owner
        for change in changes
    ):
        cure = (
            "make a method for each value of is_updated, one for the first token and one for the "
            "others: docs/state.md, Caches of transformers"
        )
    elif all(change.is_of_sizes for change in changes) and len(changes) < len(effects.changes):
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


def python_changes(effects: Effects) -> list[Change]:
    """The changes to other Python values, lists of tensors included."""
    return [change for change in effects.changes if not change.is_cache]


@contextlib.contextmanager
def applied(changes: list[Change]) -> Iterator[None]:
    """Within, attributes and variables have their new values."""
    for change in changes:
        change.new.restore()
    try:
        yield
    finally:
        for change in changes:
            change.old.restore()


def _alike(one: Any, other: Any) -> bool:
    """Whether two exported programs compute the same."""
    if one.graph_module.code != other.graph_module.code:
        return False
    first, second = list(one.constants.values()), list(other.constants.values())
    return len(first) == len(second) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b for a, b in zip(first, second)
    )


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dicts."""
    if isinstance(value, (list, tuple, dict)):
        return [tensor for item in items_of(value) for tensor in _tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _fills_gaps(old: State, new: State) -> bool:
    """Whether a list has other items only where it had None."""
    if not isinstance(old.value, list) or not isinstance(new.value, list):
        return False
    before, after = old.contents[0][1], new.contents[0][1]
    return len(before) == len(after) and all(a is None or a is b for a, b in zip(before, after))


def _is_of_sizes(value: Any) -> bool:
    items = items_of(value) if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(item, (int, torch.SymInt, tuple)) for item in items)

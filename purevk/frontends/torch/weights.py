"""Sees when a module changes after it was compiled: its tensors, and the Python values in it."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from purevk.frontends.torch.module import ModuleSource, ProgramSource

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ATOMS = (type(None), bool, int, float, complex, str, bytes, enum.Enum)


class Weights:
    """The tensors and Python values of the modules that were compiled.

    Seen are:

    - a write into a tensor that torch counts (`Tensor._version`), a tensor whose memory moves, and
      another tensor under the same name;
    - a module that goes from training to evaluation or back;
    - an attribute of a module that is a number, a string, None, or a list, tuple, dict or set of
      such values and tensors; a new attribute; a hook that is added or removed.

    Writes through `.data` or numpy are not seen, and neither are values inside other objects, such
    as those of a configuration.
    """

    def __init__(self, sources: Sequence[ProgramSource | ModuleSource]) -> None:
        self.sources = list(sources)
        self._read()

    def _read(self) -> None:
        self._slots: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._by_id: dict[int, Any] = {}
        for source in self.sources:
            self._take_over(source)
        roots = [source.module for source in self.sources if isinstance(source, ModuleSource)]
        self._modules = list({id(part): part for root in roots for part in root.modules()}.values())
        self._modes = list(map(_mode, self._modules))
        self._attributes = _Attributes(self._modules)
        # An export copies tensors that are not attributes themselves: it has to be repeated.
        self._loose = self._attributes.tensors()
        self._by_id |= {id(tensor): tensor for tensor in self._loose}
        self._snapshot()

    def _take_over(self, source: ProgramSource | ModuleSource) -> None:
        for name, tensor in source.tensors().items():
            if tensor.is_inference() or tensor.device.type == "meta":
                continue
            self._by_id[id(tensor)] = tensor
            found = _slots(getattr(source, "module", None), name)
            if found and found[-1][0].get(found[-1][1]) is tensor:
                self._slots.update(((id(owner), key), (owner, key)) for owner, key in found)

    def _snapshot(self) -> None:
        self._tensors = list(self._by_id.values())
        self._versions = list(map(_version, self._tensors))
        self._addresses = list(map(_address, self._tensors))
        self._types = list(map(_type, self._tensors))
        self._owners: list[dict[str, Any]] = [owner for owner, _ in self._slots.values()]
        self._keys = [key for _, key in self._slots.values()]
        self._held = list(map(dict.get, self._owners, self._keys))

    def include(self, source: ProgramSource | ModuleSource) -> None:
        """Watches the tensors of another export of a module too. They are up to date."""
        self._take_over(source)
        self._snapshot()

    def changed(self) -> bool:
        """Whether a module is another one than when it was read."""
        return (
            list(map(_version, self._tensors)) != self._versions
            or list(map(_address, self._tensors)) != self._addresses
            or self._replaced()
        )

    def _replaced(self) -> bool:
        """Whether an export of a module would give another graph."""
        return (
            list(map(_mode, self._modules)) != self._modes
            or not all(map(operator.is_, map(dict.get, self._owners, self._keys), self._held))
            or self._attributes.changed()
        )

    def update(self, program: Any) -> None:
        """Has the sources read the modules as they are now, and writes buffers that are states on
        the device and that the user changed."""
        changed = {
            id(tensor)
            for tensor, version in zip(self._tensors, self._versions)
            if tensor._version != version
        }
        loose = any(id(tensor) in changed for tensor in self._loose)
        if loose or self._replaced() or list(map(_type, self._tensors)) != self._types:
            for source in self.sources:
                if isinstance(source, ModuleSource):
                    source.renew()
        known = set(map(id, self._tensors))
        for source in self.sources:
            for name, tensor in source.tensors().items():
                written = id(tensor) in changed or id(tensor) not in known
                # Methods with different states of one name have the method's in front.
                for key in (name, f"{source.name}.{name}"):
                    if written and key in program.state:
                        program.state[key] = tensor.detach().cpu()
        self._read()


class _Attributes:
    """The Python values of modules. Most are compared by identity, which is fast enough for every
    call."""

    def __init__(self, modules: Sequence[Any]) -> None:
        import torch

        self._dicts: list[dict[str, Any]] = [vars(module) for module in modules]
        self._lengths = list(map(len, self._dicts))
        self._hooks = [vars(module)[name] for module in modules for name in _HOOKS]
        self._hook_counts = list(map(len, self._hooks))
        of_every_module = vars(torch.nn.Module()).keys()
        found = [
            (attributes, key, value)
            for module, attributes in zip(modules, self._dicts)
            for key, value in attributes.items()
            if key not in of_every_module
            # What modules of torch keep in private attributes follows from their public ones.
            and not (key.startswith("_") and type(module).__module__.startswith("torch.nn."))
            and _is_plain(value)
        ]
        self._owners = [owner for owner, _, _ in found]
        self._keys = [key for _, key, _ in found]
        self._values = [value for _, _, value in found]
        # Lists, dicts and sets can change in place.
        self._mutable = [
            (number, _copy(value))
            for number, value in enumerate(self._values)
            if _is_mutable(value)
        ]

    def tensors(self) -> list[Any]:
        """The tensors in lists, tuples, dicts and sets."""
        return [each for value in self._values for each in _tensors_in(value)]

    def changed(self) -> bool:
        """Whether a value, or a number of hooks, is another one."""
        if list(map(len, self._dicts)) != self._lengths:
            return True
        if list(map(len, self._hooks)) != self._hook_counts:
            return True
        now = list(map(dict.get, self._owners, self._keys))
        if not all(map(operator.is_, now, self._values)):
            # An equal value that is another object is no change.
            if not all(map(_is_same, now, self._values)):
                return True
            self._values = now
        if not self._mutable:
            return False
        return not all(_is_same(now[number], content) for number, content in self._mutable)


def _is_plain(value: Any) -> bool:
    """Whether a value is compared: atoms, tensors inside containers, and containers of these."""
    if isinstance(value, _ATOMS):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(each) or _is_tensor(each) for each in value)
    if isinstance(value, Mapping):
        return all(
            isinstance(key, _ATOMS) and (_is_plain(each) or _is_tensor(each))
            for key, each in value.items()
        )
    return _is_torch_constant(value)


def _is_mutable(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(map(_is_mutable, value))
    return isinstance(value, (list, set, Mapping))


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_torch_constant(value: Any) -> bool:
    import torch

    return isinstance(value, (torch.dtype, torch.device, torch.memory_format))


def _tensors_in(value: Any) -> Iterator[Any]:
    if _is_tensor(value):
        if not value.is_inference() and value.device.type != "meta":
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _tensors_in(each)


def _copy(value: Any) -> Any:
    """A container whose containers are copies too. Atoms and tensors are the same objects."""
    if isinstance(value, Mapping):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(each) for each in value]
    return set(value) if isinstance(value, (set, frozenset)) else value


def _is_same(new: Any, old: Any) -> bool:
    """Whether two values are equal and of one type; `old` may be what `_copy` returned. Tensors are
    the same if they are one object, and NaN is itself."""
    if new is old:
        return True
    if isinstance(old, dict) and isinstance(new, Mapping):
        return new.keys() == old.keys() and all(_is_same(new[key], old[key]) for key in old)
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(new) == len(old) and all(map(_is_same, new, old))
    if _is_tensor(new) or _is_tensor(old):
        return False
    if isinstance(old, (set, frozenset)) and isinstance(new, (set, frozenset)):
        return set(new) == set(old)
    if type(new) is not type(old):
        return False
    if isinstance(new, float):
        return repr(new) == repr(old)  # 0.0 is not -0.0
    return bool(new == old)


_version = operator.attrgetter("_version")
_mode = operator.attrgetter("training")
_address = operator.methodcaller("data_ptr")


def _type(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape)


def _slots(module: Any, name: str) -> list[tuple[dict[str, Any], str]]:
    """The dicts of modules in which a tensor is found, from the outermost module to its own."""
    if module is None:
        return []
    *path, last = name.split(".")
    found: list[tuple[dict[str, Any], str]] = []
    for part in path:
        if part not in module._modules:
            return []
        found.append((module._modules, part))
        module = module._modules[part]
    for tensors in (module._parameters, module._buffers, vars(module)):
        if last in tensors:
            return [*found, (tensors, last)]
    return []

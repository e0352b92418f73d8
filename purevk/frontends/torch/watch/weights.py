"""Sees when a module changes after it was compiled: its tensors, and the Python values in it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from purevk.frontends.torch.module import ModuleSource, ProgramSource, tracing
from purevk.frontends.torch.watch.attributes import Attributes
from purevk.frontends.torch.watch.samples import Samples, addresses_of, refuse_released


class Weights:
    """The tensors and Python values of the modules that were compiled.

    Seen are:

    - a write into a tensor that torch counts (`Tensor._version`), a tensor whose memory moves, and
      another tensor under the same name;
    - a write into most elements of a tensor that torch does not count, see `Samples`;
    - a module that goes from training to evaluation or back;
    - Python values, see `Attributes`;
    - another default dtype, or another state of `torch.autocast`.

    Writes into single elements through `.data` or numpy, and into tensors of the inference mode, are
    not seen: torch does not count them.
    """

    def __init__(self, sources: Sequence[ProgramSource | ModuleSource]) -> None:
        self.sources = list(sources)
        self._named: set[tuple[int, str]] = set()  # sources and names that were ever watched
        with tracing.reading(self._parts()):
            self._read()

    def _parts(self) -> list[Any]:
        """The modules that were compiled, with those in them."""
        roots = [source.module for source in self.sources if isinstance(source, ModuleSource)]
        return list({id(part): part for root in roots for part in root.modules()}.values())

    def _read(self) -> None:
        self._slots: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._by_id: dict[int, Any] = {}
        self._exported: dict[tuple[int, str], Any] = {}
        for source in self.sources:
            self._take_over(source)
        self._modules = self._parts()
        self._modes = list(map(_mode, self._modules))
        self._attributes = Attributes(self._modules)
        self._settings = _settings()
        # An export copies tensors that are not attributes themselves: it has to be repeated.
        self._loose = self._attributes.tensors()
        self._by_id |= {id(tensor): tensor for tensor in self._loose}
        self._snapshot()

    def _take_over(self, source: ProgramSource | ModuleSource) -> None:
        for name, tensor in source.tensors().items():
            if tensor.is_inference() or tensor.device.type == "meta":
                continue
            self._by_id[id(tensor)] = tensor
            slots = _slots(getattr(source, "module", None), name)
            if not slots:
                continue
            owner, key = slots[-1]
            if owner.get(key) is tensor:
                self._named.add((id(source), name))
            elif (id(source), name) not in self._named:
                continue  # else another thread has replaced it while the module was exported
            self._exported.setdefault((id(owner), key), tensor)
            self._slots.update(((id(owner), key), (owner, key)) for owner, key in slots)

    def _snapshot(self) -> None:
        self._tensors = list(self._by_id.values())
        self._versions = list(map(_version, self._tensors))
        self._addresses = addresses_of(self._tensors)
        self._samples = Samples(self._tensors)
        self._types = list(map(_type, self._tensors))
        # The export may have an older tensor than the module has by now.
        self._holders = _Holders(
            (owner, key, self._exported[slot])
            for slot, (owner, key) in self._slots.items()
            if slot in self._exported
        )
        self._parents = _Holders(
            (owner, key, owner.get(key))
            for slot, (owner, key) in self._slots.items()
            if slot not in self._exported
        )

    def include(self, source: ProgramSource | ModuleSource) -> None:
        """Watches the tensors of another export of a module too. They are up to date."""
        with tracing.reading(self._parts()):
            self._take_over(source)
            self._snapshot()

    def written(self) -> bool:
        """Whether tensors of a module were written in a way that torch counts, moved in memory, or
        replaced. It takes some microseconds for 100 tensors, so that a call can wait for it."""
        return self._confirmed(self._written)

    def changed(self) -> bool:
        """Whether a module is another one than when it was read."""
        return self._confirmed(lambda: self._written() or self._altered())

    def altered(self) -> bool:
        """Whether a module was changed in a way that `written` does not see. Tensors that `written`
        sees do not count: another thread may write them during a call."""
        return self._confirmed(self._altered) and self._confirmed(
            lambda: self._replaced() or not self._sampled() <= self._counted()
        )

    def _altered(self) -> bool:
        return self._samples.changed() or self._replaced()

    def _sampled(self) -> set[int]:
        """Ids of the tensors of which an element is another one."""
        return {id(self._tensors[at]) for at in self._samples.owners()}

    def _counted(self) -> set[int]:
        """Ids of the tensors that were written as torch counts it, or that moved in memory."""
        return {
            id(tensor)
            for tensor, version, address in zip(self._tensors, self._versions, self._addresses)
            if tensor._version != version or tensor.data_ptr() != address
        }

    def _confirmed(self, differs: Callable[[], bool]) -> bool:
        if not differs():
            return False
        # Another thread may export the module now: it has other tensors meanwhile.
        with tracing.reading(self._modules):
            return differs()

    def _written(self) -> bool:
        return (
            list(map(_version, self._tensors)) != self._versions
            or addresses_of(self._tensors) != self._addresses
            or self._holders.changed()
        )

    def _replaced(self) -> bool:
        """Whether an export of a module would give another graph."""
        return (
            list(map(_mode, self._modules)) != self._modes
            or self._holders.changed()
            or self._parents.changed()
            or (bool(self._modules) and _settings() != self._settings)
            or self._attributes.changed()
        )

    def update(self, program: Any) -> None:
        """Has the sources read the modules as they are now, and writes buffers that are states on
        the device and that the user changed."""
        with tracing.reading(self._modules):
            self._update(program)

    def _update(self, program: Any) -> None:
        changed = {
            id(tensor)
            for tensor, version in zip(self._tensors, self._versions)
            if tensor._version != version
        }
        elsewhere = {
            id(tensor)
            for tensor, address in zip(self._tensors, self._addresses)
            if tensor.data_ptr() != address
        }
        if not elsewhere:
            changed |= self._sampled()
        moved = changed | elsewhere
        for source in self.sources:
            source.mutable.follow((each.name, each.program) for each in self.sources)
        loose = any(id(tensor) in changed for tensor in self._loose)
        all_modules = loose or self._replaced() or list(map(_type, self._tensors)) != self._types
        for source in self.sources:
            tensors = source.tensors() if source.known else {}
            deciding = {name for name in source.known if id(tensors[name]) in moved}
            source.moving |= deciding - source.decisive
            if deciding or (all_modules and isinstance(source, ModuleSource)):
                source.renew()
        known_ids = set(map(id, self._tensors))
        for source in self.sources:
            for name, tensor in source.tensors().items():
                written = id(tensor) in changed or id(tensor) not in known_ids
                # Methods with different states of one name have the method's in front.
                for key in (name, f"{source.name}.{name}"):
                    if written and key in program.state:
                        refuse_released(tensor, name, f"method {source.name}")
                        program.state[key] = tensor.detach().cpu()
        self._read()


_version = operator.attrgetter("_version")
_mode = operator.attrgetter("training")


class _Holders:
    """What modules have under some names.

    Args:
        slots: a dict of a module, a key in it, and the object there.
    """

    def __init__(self, slots: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
        slots = list(slots)
        self._owners = [owner for owner, _, _ in slots]
        self._keys = [key for _, key, _ in slots]
        self._objects = [slot_object for _, _, slot_object in slots]

    def changed(self) -> bool:
        """Whether another object, or none, is under a name."""
        return not all(map(operator.is_, map(dict.get, self._owners, self._keys), self._objects))


def _settings() -> tuple[Any, ...]:
    """What torch is set to, as far as it decides the dtypes of results."""
    import torch

    return (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
    )


def _type(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape)


def _slots(module: Any, name: str) -> list[tuple[dict[str, Any], str]]:
    """The dicts of modules in which a tensor is found, from the outermost module to its own."""
    if module is None:
        return []
    *path, last = name.split(".")
    slots: list[tuple[dict[str, Any], str]] = []
    for part in path:
        if part not in module._modules:
            return []
        slots.append((module._modules, part))
        module = module._modules[part]
    for tensors in (module._parameters, module._buffers, vars(module)):
        if last in tensors:
            return [*slots, (tensors, last)]
    return []

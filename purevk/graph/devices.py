"""The devices of this machine, and contexts on them by index or name."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass

from purevk import api, knobs
from purevk.errors import DeviceError, InputError
from purevk.graph.context import Context, context_of, default_context

_lock = threading.Lock()
_contexts: dict[Hashable, Context] = {}


@dataclass(frozen=True)
class DeviceInfo:
    """A Vulkan device that purevk can use.

    Attributes:
        index: what `purevk.load(device=...)` and PUREVK_DEVICE take.
        kind: "discrete", "integrated", "virtual", "cpu" or "other".
        driver: its name and version.
        api_version: (major, minor, patch).
        uuid: of the device, as text.
        memory_bytes: of the memory that is local to the device.
        default: whether programs run on it if no device is named.
    """

    index: int
    name: str
    kind: str
    driver: str
    api_version: tuple[int, int, int]
    uuid: str
    memory_bytes: int
    default: bool


def devices() -> list[DeviceInfo]:
    """The Vulkan devices, by index: those of PUREVK_VISIBLE_DEVICES, or all.

    Raises:
        DeviceError: there is none; or PUREVK_DEVICE or PUREVK_VISIBLE_DEVICES names one that is not
            there.
    """
    with api.Instance() as instance:
        default = instance.pick()
        return [
            DeviceInfo(
                device.index,
                device.name,
                device.kind,
                device.driver,
                device.api_version,
                str(device.uuid),
                sum(heap.size for heap in device.heaps if heap.device_local),
                device is default,
            )
            for device in instance.physical_devices
        ]


def choose_context(device: Context | int | str | bytes | None, context: Context | None) -> Context:
    """The context that the arguments `device` and `context` of a function name. Programs on one
    device share a context.

    Raises:
        InputError: both are given, or `device` is something else, such as bytes.
        DeviceError: no device fits; the error lists those there are.
    """
    if device is None:
        return context_of(context)
    if context is not None:
        raise InputError("both device and context are given", next="leave one of them out")
    if isinstance(device, Context):
        return device
    if isinstance(device, bool) or not isinstance(device, (int, str)):
        several = isinstance(device, (list, tuple))
        raise InputError(
            f"device={device!r}",
            why='an index, a part of a name, a kind such as "cpu", or a Context is accepted',
            next="save the program, and load it on several devices: purevk.load(file, device=[0, 1])"
            if several
            else "purevk.devices() lists the devices; leave device out for the best one",
        )
    api.check_fork()
    with _lock:
        return _context_on(device)


def _context_on(selector: int | str) -> Context:
    instance = api.Instance()
    try:
        chosen = instance.pick(selector)
        key = _key(chosen)
        held = _contexts.get(key)
        if held is None and _is_default(chosen, instance):
            held = default_context()
            # The default context may be older than PUREVK_DEVICE is.
            held = held if _key(held.device.physical) == key else None
        if held is not None and not held.closed and not held.lost:
            instance.close()
            return held
        made = _contexts[key] = Context(api.Device(chosen))
        return made
    except BaseException:
        instance.close()
        raise


def _key(device: api.PhysicalDevice) -> Hashable:
    return knobs.VISIBLE_DEVICES(), device.index, device.name, device.uuid


def _is_default(device: api.PhysicalDevice, instance: api.Instance) -> bool:
    try:
        return device is instance.pick()
    except DeviceError:  # PUREVK_DEVICE names no device
        return False

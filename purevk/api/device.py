"""The logical device: one compute queue, the functions, and the count of live objects."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from purevk.api import features as feature_table
from purevk.api import vk
from purevk.api.instance import Instance, _strings, fork_error
from purevk.api.physical import PhysicalDevice
from purevk.errors import DeviceError

if TYPE_CHECKING:
    from purevk.api.memory import Allocator
    from purevk.api.queue import Queue, _QueueState


_COMPUTE_STAGE = 0x20  # VK_SHADER_STAGE_COMPUTE_BIT


class DeviceCore:
    """What must outlive the Python object: the VkDevice, and how to destroy each object made from
    it.

    Objects that are garbage-collected only note their number (`forget`), because a collection may
    start at any moment, in any thread, and also inside the allocator. `collect` destroys them at
    the next safe point.

    Nothing is destroyed while the device works: a call that was interrupted may still run. What is
    released then is deferred until every submission up to that moment has finished.
    """

    def __init__(self, handle: Any, functions: vk.Functions, instance: Any) -> None:
        self.handle, self.functions, self.instance = handle, functions, instance
        self.messages: list[str] = instance.messages
        self.lock = threading.RLock()
        self.objects: dict[int, tuple[str, Callable[[], None]]] = {}
        self.forgotten: collections.deque[int] = collections.deque()
        # (number of the newest submission at the time, kind, how to destroy it), oldest first
        self.deferred: collections.deque[tuple[int, str, Callable[[], None]]] = collections.deque()
        self.numbers = itertools.count(1)
        self.queue: _QueueState | None = None
        self.lost = False  # whether the driver said so
        self.forked = False
        _cores.add(self)

    def closed_error(self, name: str) -> DeviceError:
        """The error of a call that needs the device after it is closed."""
        if self.forked:
            return fork_error(name)
        return DeviceError(f"{name} is closed", next="make a new device")

    def register(self, kind: str, destroy: Callable[[], None]) -> int:
        if self.handle is None:
            raise DeviceError(
                f"A {kind or 'device part'} was made on a device that is closed",
                next="make a new device",
            )
        if self.forgotten or self.deferred:
            self.collect()
        number = next(self.numbers)
        self.objects[number] = (kind, destroy)
        return number

    def release(self, number: int) -> None:
        entry = self.objects.pop(number, None)
        if entry is None:
            return
        kind, destroy = entry
        queue = self.queue
        if queue is None:
            destroy()
            return
        with queue.lock:  # so that no other thread submits between the question and the end
            if queue.pending and queue.unfinished():
                self.deferred.append((queue.submitted, kind, destroy))
            else:
                destroy()

    def collect(self) -> None:
        with self.lock:
            while self.forgotten:
                self.release(self.forgotten.popleft())
            if self.deferred and self.queue is not None:
                with self.queue.lock:
                    running = min(self.queue.unfinished(), default=None)
                    while self.deferred and (running is None or self.deferred[0][0] < running):
                        self.deferred.popleft()[2]()

    def close(self) -> None:
        if self.handle is None:
            return
        handle = self.handle
        if self.queue is not None and not self.queue.settle():
            self.abandon()  # what the device may still use must not be destroyed
            return
        # All that was submitted has a fence, so it has finished even if this fails. If nothing was,
        # there is nothing to wait for, and RADV's null device has no function to wait with.
        if self.queue is not None and self.queue.submitted:
            self.functions.vkDeviceWaitIdle(handle)
        with self.lock:
            while self.deferred:
                self.deferred.popleft()[2]()
            while self.objects:  # the newest first: nothing outlives what it was made from
                self.objects.popitem()[1][1]()
            self.forgotten.clear()
            self.handle = None
            self.functions.vkDestroyDevice(handle, vk.NULL)
            self.functions.close()

    def abandon(self) -> None:
        """Leaves the device and all that was made from it as they are, for ever."""
        self.instance.abandon()
        self.handle = None
        self.objects.clear()
        self.deferred.clear()
        self.forgotten.clear()

    def leave(self) -> None:
        """Closes the device because the interpreter exits. If daemon threads are alive, nothing is
        destroyed, because one may be inside of a call."""
        if self.handle is None:
            return
        idle = self.queue is None or self.queue.leave()
        if idle and threading.active_count() == 1:
            self.close()
        else:
            self.abandon()

    def after_fork(self) -> None:
        """Abandons the device in a forked process, where the threads of the driver are gone."""
        self.lock = threading.RLock()  # another thread of the parent may have held it
        self.forked = True
        if self.queue is not None:
            self.queue.pending.clear()
        self.abandon()


_cores: weakref.WeakSet[DeviceCore] = weakref.WeakSet()


def _after_fork() -> None:
    for core in list(_cores):
        core.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class DeviceObject:
    """Base of what is made from a device. `destroy()` may be called twice; garbage collection does
    it too."""

    _number = 0

    def __init__(self, device: Device, destroy: Callable[[], None]) -> None:
        self.device = device
        self._core = device.core
        self._number = self._core.register(type(self).__name__, destroy)

    def destroy(self) -> None:
        """Destroys the Vulkan object. The device must have finished using it."""
        number, self._number = self._number, 0
        if number:
            self._core.release(number)

    @property
    def alive(self) -> bool:
        """Whether the Vulkan object still exists."""
        return self._number in self._core.objects if self._number else False

    def __del__(self) -> None:
        if self._number:
            self._core.forgotten.append(self._number)


class Device:
    """A device with one compute queue.

    Args:
        physical: from `Instance.pick()`.
        disable: names of features to leave off; None reads PUREVK_DISABLE.
        request: names of features that are off unless they are asked for, such as
            "pipeline_statistics".

    Attributes:
        physical, limits, name, uuid, driver, kind, core_count: see `PhysicalDevice`.
        features: the `Features` switched on.
        is_unified: whether the host reads and writes device memory at full speed.
        queue: the `Queue`. allocator: the `Allocator`.

    Use as a context manager, or call `close()`. Everything made from the device is destroyed with
    it.
    """

    def __init__(
        self,
        physical: PhysicalDevice,
        *,
        disable: tuple[str, ...] | None = None,
        request: tuple[str, ...] = (),
    ) -> None:
        from purevk.api.memory import Allocator
        from purevk.api.queue import Queue

        self.physical, self.instance = physical, physical.instance
        self.limits, self.name, self.uuid = physical.limits, physical.name, physical.uuid
        self.driver, self.kind, self.core_count = (
            physical.driver,
            physical.kind,
            physical.core_count,
        )
        self.is_unified = physical.is_unified
        self.features = feature_table.choose(physical.available, disable, request)
        handle = self._create()
        self.functions = vk.Functions(self.instance.functions.vkGetDeviceProcAddr, handle)
        self.core = DeviceCore(handle, self.functions, self.instance._core)
        self.layouts: weakref.WeakValueDictionary[tuple[tuple[str, ...], int], Any] = (
            weakref.WeakValueDictionary()
        )
        self._finalizer = weakref.finalize(self, self.core.close)
        self._finalizer.atexit = False  # the instance closes its devices then
        self.instance._core.devices.add(self.core)
        try:
            self.allocator: Allocator = Allocator(self)
            self.queue: Queue = Queue(self)
            self.core.queue = self.queue.state
            self.check()
        except BaseException:
            self._finalizer()
            raise

    def _create(self) -> Any:
        physical = self.physical
        chain, extensions, kept = feature_table.enable(physical, self.features)
        if (
            "VK_KHR_portability_subset" in physical.extensions
        ):  # must be named wherever it is offered
            extensions.append("VK_KHR_portability_subset")
        priority = vk.ffi.new("float[]", [1.0])
        queue = vk.struct(
            "VkDeviceQueueCreateInfo",
            queueFamilyIndex=physical.queue_family,
            queueCount=1,
            pQueuePriorities=priority,
        )
        info = vk.struct(
            "VkDeviceCreateInfo",
            chain,
            queueCreateInfoCount=1,
            pQueueCreateInfos=queue,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=_strings([name.encode() for name in extensions], kept),
        )
        handle = vk.ffi.new("VkDevice *")
        result = self.instance.functions.vkCreateDevice(physical.handle, info, vk.NULL, handle)
        vk.check(result, "vkCreateDevice", where=physical.name)
        return handle[0]

    @property
    def handle(self) -> Any:
        """The VkDevice.

        Raises:
            DeviceError: the device is closed.
        """
        handle = self.core.handle
        if handle is None:
            raise self.core.closed_error(self.name)
        return handle

    def check(self) -> None:
        """Raises ValidationError if the validation layer said something since the last call."""
        if self.core.messages:
            self.instance.check()

    def live_objects(self) -> dict[str, int]:
        """Live objects made from this device, by class name. Empty after `close()`."""
        self.core.collect()
        kinds = [kind for kind, _ in list(self.core.objects.values())]
        kinds += [kind for _, kind, _ in list(self.core.deferred)]
        return dict(collections.Counter(kind for kind in kinds if kind))

    def set_name(self, kind: int, handle: Any, label: str) -> None:
        """Names an object in validation messages; does nothing unless validation is on."""
        if not self.instance.validation or not label:
            return
        text = vk.ffi.new("char[]", label.encode())
        number = int(vk.ffi.cast("uintptr_t", handle))
        info = vk.struct(
            "VkDebugUtilsObjectNameInfoEXT", objectType=kind, objectHandle=number, pObjectName=text
        )
        self.functions.vkSetDebugUtilsObjectNameEXT(self.handle, info)

    @property
    def chooses_subgroup_size(self) -> bool:
        """Whether a compute pipeline may require a subgroup size. A device with a single size may have
        the feature subgroup_size_control but take no size."""
        stages = self.physical.required_subgroup_stages
        return bool(self.features.subgroup_size_control and stages & _COMPUTE_STAGE)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self.core.handle is None

    @property
    def lost(self) -> bool:
        """Whether the driver has reported that the device is lost. It runs nothing any more."""
        return self.core.lost

    def check_process(self) -> None:
        """Raises DeviceError in a process that was forked after the device was made."""
        if self.core.forked:
            raise self.core.closed_error(self.name)

    def close(self) -> None:
        """Waits for the device, then destroys it and everything made from it. Safe to call twice.

        Raises:
            ValidationError: the validation layer had something to say that no other call has raised
                yet.
        """
        self._finalizer()
        self.check()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        if kind is None:
            self.close()
        else:
            self._finalizer()  # do not cover the first error with another

    def __repr__(self) -> str:
        return f"<Device {self.name}{' (closed)' * self.closed}>"


def open_device(selector: str | int | None = None, *, validation: bool | None = None) -> Device:
    """A device of a new instance, which lives as long as the device: see `Instance` and
    `Instance.pick`."""
    instance = Instance(validation)
    try:
        return Device(instance.pick(selector))
    except BaseException:
        instance.close()
        raise

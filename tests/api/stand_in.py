"""A stand-in for the Vulkan driver. It passes calls on, keeps account of objects, and fails a call on
request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from purevk.api import vk

OUT_OF_HOST_MEMORY = vk.const("VK_ERROR_OUT_OF_HOST_MEMORY")
OUT_OF_DEVICE_MEMORY = vk.const("VK_ERROR_OUT_OF_DEVICE_MEMORY")
DEVICE_LOST = vk.const("VK_ERROR_DEVICE_LOST")
TIMEOUT = vk.const("VK_TIMEOUT")
NOT_READY = vk.const("VK_NOT_READY")
INCOMPLETE = vk.const("VK_INCOMPLETE")
_WAITS = ("vkWaitForFences", "vkWaitSemaphores")
# Results that are no errors, and the calls that may return them.
STATUSES = {
    TIMEOUT: _WAITS,
    NOT_READY: ("vkGetFenceStatus", "vkGetQueryPoolResults"),
    INCOMPLETE: (
        "vkEnumeratePhysicalDevices",
        "vkEnumerateInstanceLayerProperties",
        "vkEnumerateInstanceExtensionProperties",
        "vkEnumerateDeviceExtensionProperties",
        "vkGetPipelineCacheData",
        "vkGetPipelineExecutablePropertiesKHR",
        "vkGetPipelineExecutableStatisticsKHR",
    ),
}
# Once a device is lost, these calls say so.
_LOSS = (*_WAITS, "vkQueueSubmit", "vkGetFenceStatus", "vkDeviceWaitIdle")
_MADE = {"vkAllocateMemory": "Memory", "vkCreateComputePipelines": "Pipeline"}
_ENDED = {"vkFreeMemory": "Memory"}
_LOCAL, _VISIBLE, _CACHED = 1, 2, 8  # VkMemoryPropertyFlagBits


class VulkanStandIn:
    """Replaces the two places where `purevk.api.vk` gets functions from: the library of the loader,
    and `Functions`.

    It notes a fault where a caller

    * destroys what is not there, or a device before its objects;
    * destroys anything, or records a command buffer again, while it cannot know that the device has
      finished: only a wait or a question that succeeds says so;
    * submits with a fence that is signaled.

    Args:
        patch: undoes the replacement.
        discrete: whether the memory of the device is invisible to the host, and the memory that is
            visible is not coherent. So data goes the way that it goes on a graphics card.

    Attributes:
        calls: the names of calls that can fail, since the last `fail`.
        live: live objects, as (kind, handle), with what each was made from.
        faults: what callers did wrong.
        failed: the name of the call that was made to fail, if it came.
    """

    def __init__(self, patch: pytest.MonkeyPatch, discrete: bool = False) -> None:
        self.calls: list[str] = []
        self.live: dict[tuple[str, int], int] = {}
        self.faults: list[str] = []
        self.failed = ""
        self._at, self._result = -1, 0
        self._discrete = discrete
        self._wait_idle: dict[int, Callable[[], Any]] = {}  # by device
        self._lost: set[int] = set()  # devices
        self._device_of: dict[int, int] = {}  # of queues and command buffers
        self._running: dict[int, tuple[int, set[int]]] = {}  # fence -> device, command buffers
        self._signaled: set[int] = set()  # fences
        stand_in, real, base = self, vk.library(), vk.Functions

        class Functions(base):  # type: ignore[misc, valid-type]
            def __init__(self, get_address: Any, owner: Any) -> None:
                super().__init__(get_address, owner)
                if vk.ffi.typeof(owner) is vk.ffi.typeof("VkDevice"):
                    wait = super().__getattr__("vkDeviceWaitIdle")
                    del self.vkDeviceWaitIdle
                    stand_in._wait_idle[_number(owner)] = lambda: wait(owner)

            def __getattr__(self, name: str) -> Any:
                made = stand_in._wrap(name, super().__getattr__(name))
                setattr(self, name, made)
                return made

        class Library:
            def __getattr__(self, name: str) -> Any:
                function = getattr(real, name)
                looks_up = name == "vkGetInstanceProcAddr"
                return function if looks_up else stand_in._wrap(name, function)

        library = Library()
        patch.setattr(vk, "Functions", Functions)
        patch.setattr(vk, "library", lambda: library)

    def fail(self, at: int = -1, result: int = 0) -> None:
        """Has the call number `at` from here on fail with a result, or none. A result in `STATUSES`
        is only for some calls. A list that is not complete is empty."""
        self.calls.clear()
        self._at, self._result, self.failed = at, result, ""

    def kinds(self) -> dict[str, int]:
        """How many objects of each kind are live."""
        return dict(Counter(kind for kind, _ in self.live))

    # -- every call -------------------------------------------------------------------------------
    def _wrap(self, name: str, function: Any) -> Any:
        fallible = vk.ffi.typeof(function).result is vk.ffi.typeof("VkResult")
        before = getattr(self, f"_before_{name}", None)
        after = getattr(self, f"_after_{name}", None)
        makes = _MADE.get(name) or name.partition("vkCreate")[2]
        ends = _ENDED.get(name) or name.partition("vkDestroy")[2]

        def call(*args: Any) -> Any:
            if before is not None:
                before(*args)
            if ends:
                self._end(ends, _number(args[-2]), _number(args[0]))
            answer = self._answer(name, args[0]) if fallible else 0
            if answer:
                if answer == INCOMPLETE:
                    args[-2][0] = 0
                return answer
            result = function(*args)
            if makes and not result:
                owner = _number(args[0]) if len(args) > 3 else 0
                self.live[makes, _number(args[-1][0])] = owner
            if after is not None and not (fallible and result):
                after(*args)
            return result

        return call

    def _answer(self, name: str, first: Any) -> int:
        """What a call gives without being made; 0 if it is made."""
        number = len(self.calls)
        self.calls.append(name)
        handle = _number(first) if isinstance(first, vk.ffi.CData) else 0
        device = self._device_of.get(handle, handle)
        if device in self._lost and name in _LOSS:
            return int(DEVICE_LOST)
        if number != self._at or name not in STATUSES.get(self._result, (name,)):
            return 0
        self.failed = name
        if self._result == DEVICE_LOST and device in self._wait_idle:
            # It does finish, so that the real driver lets everything be destroyed.
            self._wait_idle[device]()
            self._all_finished(device)
            self._lost.add(device)
        return self._result

    def _end(self, kind: str, handle: int, owner: int) -> None:
        if kind == "Device":
            left = {each for (each, _), made_from in self.live.items() if made_from == handle}
            self._check(not left, f"a device was destroyed before its {', '.join(left)}")
            self._lost.discard(handle)
            self._wait_idle.pop(handle, None)
            for child in [child for child, of in self._device_of.items() if of == handle]:
                del self._device_of[child]  # another object may get its address
        running = any(device == owner for device, _ in self._running.values())
        self._check(not running, f"{kind}: destroyed while the device may use it")
        self._check((kind, handle) in self.live, f"{kind}: destroyed, and it is not there")
        self.live.pop((kind, handle), None)

    def _check(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)

    # -- single calls -----------------------------------------------------------------------------
    def _after_vkGetDeviceQueue(self, device: Any, *args: Any) -> None:
        self._device_of[_number(args[-1][0])] = _number(device)

    def _after_vkAllocateCommandBuffers(self, device: Any, _: Any, made: Any) -> None:
        self._device_of[_number(made[0])] = _number(device)

    def _before_vkBeginCommandBuffer(self, commands: Any, _: Any) -> None:
        used = set().union(*(buffers for _, buffers in self._running.values()))
        self._check(_number(commands) not in used, "a command buffer in use is recorded again")

    def _before_vkQueueSubmit(self, _: Any, count: int, infos: Any, fence: Any) -> None:
        number = _number(fence)
        unused = number not in self._signaled and number not in self._running
        self._check(unused, "a fence was given to the queue that is signaled or in use")

    def _after_vkQueueSubmit(self, queue: Any, count: int, infos: Any, fence: Any) -> None:
        buffers = infos[0].pCommandBuffers
        used = {_number(buffers[index]) for index in range(infos[0].commandBufferCount)}
        self._running[_number(fence)] = self._device_of[_number(queue)], used

    def _finished(self, fence: int) -> None:
        if self._running.pop(fence, None) is not None:
            self._signaled.add(fence)

    def _after_vkWaitForFences(self, _: Any, count: int, fences: Any, *args: Any) -> None:
        for index in range(count):
            self._finished(_number(fences[index]))

    def _after_vkGetFenceStatus(self, _: Any, fence: Any) -> None:
        self._finished(_number(fence))

    def _after_vkDeviceWaitIdle(self, device: Any) -> None:
        self._all_finished(_number(device))

    def _all_finished(self, device: int) -> None:
        for fence, (of, _) in list(self._running.items()):
            if of == device:
                self._finished(fence)

    def _after_vkCreateFence(self, *args: Any) -> None:
        self._signaled.discard(_number(args[-1][0]))

    def _after_vkResetFences(self, _: Any, count: int, fences: Any) -> None:
        for index in range(count):
            self._signaled.discard(_number(fences[index]))

    # -- the memory of a graphics card ------------------------------------------------------------
    def _after_vkGetPhysicalDeviceMemoryProperties(self, _: Any, memory: Any) -> None:
        if self._discrete:
            memory.memoryTypeCount = 2
            memory.memoryTypes[1].heapIndex = memory.memoryTypes[0].heapIndex
            memory.memoryTypes[0].propertyFlags = _LOCAL
            memory.memoryTypes[1].propertyFlags = _VISIBLE | _CACHED

    def _after_vkGetBufferMemoryRequirements(self, _: Any, __: Any, needs: Any) -> None:
        if self._discrete:
            needs.memoryTypeBits = 3

    def _before_vkAllocateMemory(self, _: Any, info: Any, *args: Any) -> None:
        if self._discrete:
            info.memoryTypeIndex = 0  # the only one that there is


def _number(handle: Any) -> int:
    return int(vk.ffi.cast("uintptr_t", handle))

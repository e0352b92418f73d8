"""Timestamps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from purevk.api import vk
from purevk.api.device import DeviceObject
from purevk.errors import DeviceError

if TYPE_CHECKING:
    from purevk.api.device import Device

_NOT_READY = vk.const("VK_NOT_READY")
_RESULT_64 = 1  # VK_QUERY_RESULT_64_BIT


class TimestampPool(DeviceObject):
    """`count` timestamps: reset and written by a command buffer, read once it has finished.

    Raises:
        DeviceError: the device has no timestamps (feature timestamp).
    """

    def __init__(self, device: Device, count: int) -> None:
        if not device.features.timestamp:
            raise DeviceError(
                f"{device.name} has no timestamps",
                why="the feature timestamp is missing or disabled",
                next="measure on the host",
            )
        functions, vk_device = device.functions, device.handle
        self.count = count
        info = vk.struct(
            "VkQueryPoolCreateInfo", queryType=vk.const("VK_QUERY_TYPE_TIMESTAMP"), queryCount=count
        )
        handle = vk.ffi.new("VkQueryPool *")
        vk.check(functions.vkCreateQueryPool(vk_device, info, vk.NULL, handle), "vkCreateQueryPool")
        self.handle = pool = handle[0]
        self._results = vk.ffi.new("uint64_t[]", count)
        super().__init__(device, lambda: functions.vkDestroyQueryPool(vk_device, pool, vk.NULL))

    def reset(self, first: int = 0, count: int | None = None) -> None:
        """Resets timestamps from the host (feature host_query_reset). No pending work may use
        them."""
        if not self.device.features.host_query_reset:
            raise DeviceError(
                f"{self.device.name} cannot reset timestamps from the host",
                why="the feature host_query_reset is missing or disabled",
                next="use CommandBuffer.reset_queries",
            )
        count = self.count - first if count is None else count
        name = "vkResetQueryPool" + "EXT" * (self.device.physical.api_version < (1, 2, 0))
        getattr(self.device.functions, name)(self.device.handle, self.handle, first, count)

    def read(self, first: int = 0, count: int | None = None) -> list[float]:
        """Nanoseconds since the first of the timestamps read, which is 0.0.

        Raises:
            DeviceError: one of them was not written yet.
        """
        count = self.count - first if count is None else count
        physical = self.device.physical
        result = self.device.functions.vkGetQueryPoolResults(
            self.device.handle, self.handle, first, count, 8 * count, self._results, 8, _RESULT_64
        )
        if result == _NOT_READY:
            raise DeviceError(
                f"Timestamps {first} to {first + count - 1} are not all written",
                next="submit the command buffer that writes them, and wait for it",
            )
        vk.check(result, "vkGetQueryPoolResults")
        mask = (1 << physical.timestamp_bits) - 1
        ticks = [int(self._results[i]) & mask for i in range(count)]
        return [((tick - ticks[0]) & mask) * physical.timestamp_period for tick in ticks]

"""Timeline semaphores, which other APIs on the same device can wait for and signal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from purevk.api import vk
from purevk.api.device import DeviceObject
from purevk.api.features import OPAQUE_FD, TIMELINE
from purevk.errors import DeviceError

if TYPE_CHECKING:
    from purevk.api.device import Device


class TimelineSemaphore(DeviceObject):
    """A semaphore that counts from 0 (feature timeline_semaphore).

    `Queue.submit` waits for a value of it, and signals one. Values only grow.

    Args:
        device: its device.
        external: whether another API may import it (feature external_semaphore_fd).

    Raises:
        DeviceError: the device lacks the feature.
    """

    def __init__(self, device: Device, *, external: bool = False) -> None:
        functions, vk_device = device.functions, device.handle
        needed = "external_semaphore_fd" if external else "timeline_semaphore"
        if needed not in device.features:
            raise DeviceError(
                "the device has no such semaphores",
                where=device.name,
                why=f"its driver lacks {needed}"
                if needed not in device.physical.available
                else f"the feature {needed} is off",
                next="share no memory with other APIs on this device: pass arrays",
            )
        kind = vk.struct("VkSemaphoreTypeCreateInfo", semaphoreType=TIMELINE)
        exported = vk.struct("VkExportSemaphoreCreateInfo", kind, handleTypes=OPAQUE_FD)
        info = vk.struct("VkSemaphoreCreateInfo", exported if external else kind)
        made = vk.ffi.new("VkSemaphore *")
        result = functions.vkCreateSemaphore(vk_device, info, vk.NULL, made)
        vk.check(result, "vkCreateSemaphore")
        self.handle = semaphore = made[0]
        super().__init__(
            device, lambda: functions.vkDestroySemaphore(vk_device, semaphore, vk.NULL)
        )

    def export_fd(self) -> int:
        """A file descriptor of the semaphore for another API to import. The caller closes it,
        unless what imports it does so."""
        info = vk.struct("VkSemaphoreGetFdInfoKHR", semaphore=self.handle, handleType=OPAQUE_FD)
        made = vk.ffi.new("int *")
        functions = self.device.functions
        result = functions.vkGetSemaphoreFdKHR(self.device.handle, info, made)
        vk.check(result, "vkGetSemaphoreFdKHR")
        return int(made[0])

    def signal(self, value: int) -> None:
        """Signals a value from the host."""
        info = vk.struct("VkSemaphoreSignalInfo", semaphore=self.handle, value=value)
        device = self.device
        name = "vkSignalSemaphore" + "KHR" * (device.physical.api_version < (1, 2, 0))
        vk.check(getattr(device.functions, name)(device.handle, info), "vkSignalSemaphore")

    @property
    def value(self) -> int:
        """The value that it has now."""
        made = vk.ffi.new("uint64_t *")
        device = self.device
        name = "vkGetSemaphoreCounterValue" + "KHR" * (device.physical.api_version < (1, 2, 0))
        result = getattr(device.functions, name)(device.handle, self.handle, made)
        vk.check(result, "vkGetSemaphoreCounterValue")
        return int(made[0])

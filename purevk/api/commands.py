"""Command buffers with cheap recording.

Each method makes one or a few raw calls with structs that were made once. Nothing is checked while
recording: what does not fit (a grid above `Limits.max_workgroup_count`, a set of another layout) is
for the caller to prevent, and for the validation layer to find.
"""

from __future__ import annotations

import enum
import functools
from typing import TYPE_CHECKING, Any

from purevk.api import vk
from purevk.api.device import DeviceObject
from purevk.errors import DeviceError

if TYPE_CHECKING:
    from purevk.api.buffer import Buffer
    from purevk.api.device import Device
    from purevk.api.pipeline import ComputePipeline
    from purevk.api.queries import TimestampPool

_COMPUTE = 1  # VK_PIPELINE_BIND_POINT_COMPUTE
_COMPUTE_STAGE = 0x20  # VK_SHADER_STAGE_COMPUTE_BIT
_STAGE_TOP, _STAGE_BOTTOM, _STAGE_COMPUTE = 0x1, 0x2000, 0x800
_OBJECT_COMMAND_BUFFER = vk.const("VK_OBJECT_TYPE_COMMAND_BUFFER")


class Access(enum.IntFlag):
    """Who wrote before a barrier, or reads and writes after it."""

    COMPUTE = 1
    TRANSFER = 2
    HOST = 4


# (pipeline stage, access as source, access as destination)
_ACCESS = {
    Access.COMPUTE: (_STAGE_COMPUTE, 0x40, 0x20 | 0x40),  # shader write; shader read and write
    Access.TRANSFER: (0x1000, 0x1000, 0x800 | 0x1000),
    Access.HOST: (0x4000, 0x4000, 0x2000 | 0x4000),
}


@functools.cache
def _barrier(source: int, destination: int) -> tuple[int, int, Any]:
    from_stage = to_stage = from_access = to_access = 0
    for flag, (stage, written, used) in _ACCESS.items():
        if source & flag:
            from_stage |= stage
            from_access |= written
        if destination & flag:
            to_stage |= stage
            to_access |= used
    barrier = vk.struct("VkMemoryBarrier", srcAccessMask=from_access, dstAccessMask=to_access)
    return from_stage or _STAGE_TOP, to_stage or _STAGE_BOTTOM, barrier


class CommandPool(DeviceObject):
    """Where command buffers come from. Buffers of one pool must not be recorded in two threads at
    once."""

    def __init__(self, device: Device) -> None:
        functions, vk_device = device.functions, device.handle
        info = vk.struct(
            "VkCommandPoolCreateInfo", flags=2, queueFamilyIndex=device.physical.queue_family
        )  # buffers are reset one by one
        self._spare: list[Any] = []
        handle = vk.ffi.new("VkCommandPool *")
        vk.check(
            functions.vkCreateCommandPool(vk_device, info, vk.NULL, handle), "vkCreateCommandPool"
        )
        self.handle = pool = handle[0]
        super().__init__(device, lambda: functions.vkDestroyCommandPool(vk_device, pool, vk.NULL))

    def buffer(self, label: str = "") -> CommandBuffer:
        """A new command buffer of this pool."""
        return CommandBuffer(self, label)


class CommandBuffer(DeviceObject):
    """A primary command buffer that can be submitted any number of times, one submission at a time.

    `begin()`, record, `end()`, then `Queue.submit`. `begin()` again starts afresh.
    """

    def __init__(self, pool: CommandPool, label: str = "") -> None:
        device = pool.device
        functions, vk_device = device.functions, device.handle
        self.pool = pool
        # A pool may be used by one thread at a time, but garbage is collected in any: a buffer that
        # nobody needs any more is not freed but waits in its pool for the next who asks.
        spare = pool._spare
        if spare:
            array = spare.pop()
        else:
            info = vk.struct(
                "VkCommandBufferAllocateInfo",
                commandPool=pool.handle,
                level=0,
                commandBufferCount=1,
            )
            array = vk.ffi.new("VkCommandBuffer[]", 1)
            vk.check(
                functions.vkAllocateCommandBuffers(vk_device, info, array),
                "vkAllocateCommandBuffers",
            )
        self.handle = array[0]
        self.submit_info = vk.struct("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=array)
        self._begin_info = vk.struct("VkCommandBufferBeginInfo")
        self._functions = functions
        self._bind_pipeline, self._bind_sets = (
            functions.vkCmdBindPipeline,
            functions.vkCmdBindDescriptorSets,
        )
        self._push, self._dispatch = functions.vkCmdPushConstants, functions.vkCmdDispatch
        self._pipeline_barrier = functions.vkCmdPipelineBarrier
        self._bound: Any = None
        self._layout: Any = None
        super().__init__(device, lambda: spare.append(array))
        device.set_name(_OBJECT_COMMAND_BUFFER, self.handle, label)

    def begin(self) -> None:
        """Starts recording; what was recorded before is dropped. The buffer must not be in use by
        the device."""
        if not self.alive or not self.pool.alive:
            raise DeviceError("The command buffer is destroyed", next="take a new one from a pool")
        self._bound = self._layout = None
        vk.check(
            self._functions.vkBeginCommandBuffer(self.handle, self._begin_info),
            "vkBeginCommandBuffer",
        )

    def end(self) -> None:
        """Ends recording."""
        vk.check(self._functions.vkEndCommandBuffer(self.handle), "vkEndCommandBuffer")
        if self._core.messages:
            self.device.check()

    def record_dispatch(
        self,
        pipeline: ComputePipeline,
        descriptor_set: Any,
        push: Any,
        push_bytes: int,
        x: int,
        y: int = 1,
        z: int = 1,
    ) -> None:
        """A dispatch with its pipeline, buffers and push constants: `push` is bytes or a cffi pointer
        of `push_bytes` bytes (0: none)."""
        handle = self.handle
        if pipeline is not self._bound:
            self._bound = pipeline
            self._layout = pipeline.layout.handle
            self._bind_pipeline(handle, _COMPUTE, pipeline.handle)
        layout = self._layout
        self._bind_sets(handle, _COMPUTE, layout, 0, 1, descriptor_set, 0, vk.NULL)
        if push_bytes:
            self._push(handle, layout, _COMPUTE_STAGE, 0, push_bytes, push)
        self._dispatch(handle, x, y, z)

    def barrier(self, source: int = Access.COMPUTE, destination: int = Access.COMPUTE) -> None:
        """A global memory barrier: what `source` wrote before is seen by `destination` after. Flags
        of `Access`."""
        from_stage, to_stage, memory = _barrier(source, destination)
        self._pipeline_barrier(
            self.handle, from_stage, to_stage, 0, 1, memory, 0, vk.NULL, 0, vk.NULL
        )

    def copy_buffer(
        self,
        source: Buffer,
        destination: Buffer,
        nbytes: int,
        source_offset: int = 0,
        destination_offset: int = 0,
    ) -> None:
        """Copies bytes between buffers."""
        region = vk.ffi.new("VkBufferCopy *", (source_offset, destination_offset, nbytes))
        self._functions.vkCmdCopyBuffer(self.handle, source.handle, destination.handle, 1, region)

    def fill_buffer(self, buffer: Buffer, offset: int, nbytes: int, word: int = 0) -> None:
        """Fills with a 32-bit word. `offset` and `nbytes` are multiples of 4."""
        self._functions.vkCmdFillBuffer(self.handle, buffer.handle, offset, nbytes, word)

    def update_buffer(self, buffer: Buffer, offset: int, data: bytes) -> None:
        """Writes at most 65,536 bytes, which are recorded. Their number and `offset` are multiples of
        4."""
        self._functions.vkCmdUpdateBuffer(self.handle, buffer.handle, offset, len(data), data)

    def reset_queries(self, pool: TimestampPool) -> None:
        """Resets timestamps. Each must be reset before it is written."""
        self._functions.vkCmdResetQueryPool(self.handle, pool.handle, 0, pool.count)

    def write_timestamp(self, pool: TimestampPool, index: int) -> None:
        """Writes the time once all work before is done."""
        self._functions.vkCmdWriteTimestamp(self.handle, _STAGE_BOTTOM, pool.handle, index)

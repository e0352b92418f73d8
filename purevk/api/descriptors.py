"""Descriptor sets, made and written in bulk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable, Sequence

import numpy as np

from purevk.api import vk
from purevk.api.device import DeviceObject

if TYPE_CHECKING:
    from purevk.api.buffer import Buffer
    from purevk.api.device import Device
    from purevk.api.pipeline import PipelineLayout

# (buffer, offset in bytes, length in bytes or None for the rest)
Binding = tuple["Buffer", int, "int | None"]

# VkWriteDescriptorSet as memory: written as columns, because a cffi struct at a time costs 1 us a field.
_WRITE = np.dtype(
    {
        "names": ["sType", "pNext", "set", "binding", "element", "count", "type", "images", "buffers", "texels"],
        "formats": ["u4", "u8", "u8", "u4", "u4", "u4", "u4", "u8", "u8", "u8"],
        "offsets": [0, 8, 16, 24, 28, 32, 36, 40, 48, 56],
        "itemsize": 64,
    }
)
_S_TYPE = vk.structure_type("VkWriteDescriptorSet")
_STORAGE_BUFFER = vk.const("VK_DESCRIPTOR_TYPE_STORAGE_BUFFER")
_INFO_SIZE = 24  # VkDescriptorBufferInfo


class DescriptorArena(DeviceObject):
    """Descriptor sets that live and die together. Each `make` adds one pool of exactly the size needed.

    A set is a `VkDescriptorSet *`, as the command buffer takes it; it is valid as long as the arena.
    """

    def __init__(self, device: "Device") -> None:
        functions, vk_device = device.functions, device.handle
        pools: list[Any] = []

        def destroy() -> None:
            while pools:
                functions.vkDestroyDescriptorPool(vk_device, pools.pop(), vk.NULL)

        self._pools = pools
        self._arrays: list[Any] = []
        self._layouts: set[Any] = set()
        super().__init__(device, destroy)

    def make(self, items: Sequence[tuple["PipelineLayout", Sequence[Binding]]]) -> list[Any]:
        """Allocates and writes one set for each (layout, bindings); bindings are (buffer, offset, length).

        Offsets must be multiples of the device's `min_storage_buffer_alignment`.

        Raises:
            OutOfDeviceMemoryError: the driver has no room for the sets.
        """
        if not items:
            return []
        device, ffi = self.device, vk.ffi
        functions, vk_device = device.functions, device.handle
        count = len(items)
        total = sum(len(bindings) for _, bindings in items)
        size = ffi.new("VkDescriptorPoolSize[]", [{"type": _STORAGE_BUFFER, "descriptorCount": max(total, 1)}])
        info = vk.struct("VkDescriptorPoolCreateInfo", maxSets=count, poolSizeCount=1, pPoolSizes=size)
        pool = ffi.new("VkDescriptorPool *")
        vk.check(functions.vkCreateDescriptorPool(vk_device, info, vk.NULL, pool), "vkCreateDescriptorPool")
        self._pools.append(pool[0])
        numbers = np.fromiter((layout.set_layout_number for layout, _ in items), np.uint64, count)
        self._layouts.update(layout for layout, _ in items)
        info = vk.struct(
            "VkDescriptorSetAllocateInfo",
            descriptorPool=pool[0],
            descriptorSetCount=count,
            pSetLayouts=ffi.cast("VkDescriptorSetLayout *", numbers.ctypes.data),
        )
        array = ffi.new("VkDescriptorSet[]", count)
        result = functions.vkAllocateDescriptorSets(vk_device, info, array)
        vk.check(result, "vkAllocateDescriptorSets", where=f"{count} sets of {total} buffers")
        self._arrays.append(array)
        handles = np.frombuffer(ffi.buffer(array), np.uint64)
        self._write(handles, [bindings for _, bindings in items])
        return [array + index for index in range(count)]

    def update(self, items: Iterable[tuple[Any, Sequence[Binding]]]) -> None:
        """Points sets made before at other buffers: (set, bindings). No pending work may use the sets; command buffers
        that bind them must be recorded again."""
        pairs = list(items)
        if pairs:
            cast = vk.ffi.cast
            handles = np.fromiter((int(cast("uintptr_t", one[0])) for one, _ in pairs), np.uint64, len(pairs))
            self._write(handles, [bindings for _, bindings in pairs])

    def _write(self, handles: np.ndarray, groups: list[Sequence[Binding]]) -> None:
        # One write covers a whole set: it runs over into the next bindings, which have the same type and stage.
        counts = np.fromiter(map(len, groups), np.int64, len(groups))
        flat: list[int] = []
        for bindings in groups:
            for buffer, offset, length in bindings:
                flat += (buffer.number, offset, buffer.nbytes - offset if length is None else length)
        if not flat:
            return
        infos = np.array(flat, np.uint64)
        starts = np.zeros(len(groups), np.int64)
        np.cumsum(counts[:-1], out=starts[1:])
        filled = counts > 0
        writes = np.zeros(int(filled.sum()), _WRITE)
        writes["sType"] = _S_TYPE
        writes["set"] = handles[filled]
        writes["count"] = counts[filled]
        writes["type"] = _STORAGE_BUFFER
        writes["buffers"] = starts[filled] * _INFO_SIZE + infos.ctypes.data
        pointer = vk.ffi.cast("VkWriteDescriptorSet *", writes.ctypes.data)
        functions = self.device.functions
        functions.vkUpdateDescriptorSets(self.device.handle, len(writes), pointer, 0, vk.NULL)
        self.device.check()

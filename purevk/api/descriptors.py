"""Descriptor sets, made and written in bulk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Union, cast

import numpy as np

from purevk.api import vk
from purevk.api.device import DeviceObject
from purevk.api.pipeline import DESCRIPTOR_TYPES
from purevk.api.view import BufferView
from purevk.errors import InputError

if TYPE_CHECKING:
    from purevk.api.buffer import Buffer
    from purevk.api.device import Device
    from purevk.api.pipeline import PipelineLayout

# A storage buffer, as (buffer, offset in bytes, length in bytes or None for the rest), or a texel
# buffer.
BufferBinding = tuple["Buffer", int, "int | None"]
Binding = Union[BufferBinding, BufferView]  # noqa: UP007

# VkWriteDescriptorSet as memory: written as columns, because a cffi struct at a time costs 1 us a
# field.
_WRITE = np.dtype(
    {
        "names": [
            "sType",
            "pNext",
            "set",
            "binding",
            "element",
            "count",
            "type",
            "images",
            "buffers",
            "texels",
        ],
        "formats": ["u4", "u8", "u8", "u4", "u4", "u4", "u4", "u8", "u8", "u8"],
        "offsets": [0, 8, 16, 24, 28, 32, 36, 40, 48, 56],
        "itemsize": 64,
    }
)
_S_TYPE = vk.structure_type("VkWriteDescriptorSet")
_STORAGE, _TEXEL = DESCRIPTOR_TYPES["storage"], DESCRIPTOR_TYPES["texel"]
_INFO_SIZE = 24  # VkDescriptorBufferInfo
_VIEW_SIZE = 8  # VkBufferView


class DescriptorArena(DeviceObject):
    """Descriptor sets that live and die together. Each `make` adds one pool of exactly the size
    needed.

    A set is a `VkDescriptorSet *`, as the command buffer takes it; it is valid as long as the
    arena.
    """

    def __init__(self, device: Device) -> None:
        functions, vk_device = device.functions, device.handle
        pools: list[Any] = []

        def destroy() -> None:
            while pools:
                functions.vkDestroyDescriptorPool(vk_device, pools.pop(), vk.NULL)

        self._pools = pools
        self._arrays: list[Any] = []
        self._layouts: set[Any] = set()
        super().__init__(device, destroy)

    def make(self, items: Sequence[tuple[PipelineLayout, Sequence[Binding]]]) -> list[Any]:
        """Allocates and writes one set for each (layout, bindings); bindings are (buffer, offset,
        length), or a `BufferView` where the layout has a texel buffer.

        Offsets must be multiples of the device's `min_storage_buffer_alignment`. Views must live as
        long as the sets.

        Raises:
            OutOfDeviceMemoryError: the driver has no room for the sets.
            InputError: bindings are not of the layout's kinds.
        """
        if not items:
            return []
        device, ffi = self.device, vk.ffi
        functions, vk_device = device.functions, device.handle
        count = len(items)
        total = sum(len(bindings) for _, bindings in items)
        texels = sum(layout.n_texel for layout, _ in items)
        if texels:
            for layout, bindings in items:
                if [type(binding) is BufferView for binding in bindings] != [
                    kind == "texel" for kind in layout.kinds
                ]:
                    raise InputError(
                        "Bindings do not fit the layout", why=f"it has {', '.join(layout.kinds)}"
                    )
        sizes = [(_STORAGE, total - texels), (_TEXEL, texels)]
        wanted = [size for size in sizes if size[1]] or [(_STORAGE, 1)]
        size = ffi.new("VkDescriptorPoolSize[]", wanted)
        info = vk.struct(
            "VkDescriptorPoolCreateInfo", maxSets=count, poolSizeCount=len(wanted), pPoolSizes=size
        )
        pool = ffi.new("VkDescriptorPool *")
        vk.check(
            functions.vkCreateDescriptorPool(vk_device, info, vk.NULL, pool),
            "vkCreateDescriptorPool",
        )
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
        groups = [bindings for _, bindings in items]
        self._write(*(_mixed(handles, groups) if texels else _plain(handles, groups)))
        return [array + index for index in range(count)]

    def update(self, items: Iterable[tuple[Any, Sequence[Binding]]]) -> None:
        """Points sets made before at other buffers: (set, bindings). No pending work may use the
        sets; command buffers that bind them must be recorded again."""
        pairs = list(items)
        if pairs:
            to_number = vk.ffi.cast
            handles = np.fromiter(
                (int(to_number("uintptr_t", one[0])) for one, _ in pairs), np.uint64, len(pairs)
            )
            self._write(*_mixed(handles, [bindings for _, bindings in pairs]))

    def _write(self, writes: np.ndarray, *kept: np.ndarray) -> None:
        if len(writes):
            pointer = vk.ffi.cast("VkWriteDescriptorSet *", writes.ctypes.data)
            functions = self.device.functions
            functions.vkUpdateDescriptorSets(self.device.handle, len(writes), pointer, 0, vk.NULL)
            self.device.check()


def _plain(handles: np.ndarray, groups: list[Sequence[Binding]]) -> tuple[np.ndarray, ...]:
    """The writes of sets of storage buffers, and what they point to.

    One write covers a whole set: it runs over into the next bindings, which have the same type and
    stage.
    """
    counts = np.fromiter(map(len, groups), np.int64, len(groups))
    flat: list[int] = []
    try:
        for bindings in cast("list[Sequence[BufferBinding]]", groups):
            for buffer, offset, length in bindings:
                flat += (
                    buffer.number,
                    offset,
                    buffer.nbytes - offset if length is None else length,
                )
    except TypeError:
        raise InputError(
            "Bindings do not fit the layout", why="it has storage buffers only"
        ) from None
    infos = np.array(flat, np.uint64)
    starts = np.zeros(len(groups), np.int64)
    np.cumsum(counts[:-1], out=starts[1:])
    filled = counts > 0
    writes = np.zeros(int(filled.sum()), _WRITE)
    writes["sType"] = _S_TYPE
    writes["set"] = handles[filled]
    writes["count"] = counts[filled]
    writes["type"] = _STORAGE
    writes["buffers"] = starts[filled] * _INFO_SIZE + infos.ctypes.data
    return writes, infos


def _mixed(handles: np.ndarray, groups: list[Sequence[Binding]]) -> tuple[np.ndarray, ...]:
    """The same of sets that may have texel buffers: one write for each run of bindings of one
    kind."""
    infos: list[int] = []  # three words a buffer
    views: list[int] = []
    runs: list[
        tuple[int, int, int, int, int]
    ] = []  # set, first binding, bindings, descriptor type, first entry
    for number, bindings in enumerate(groups):
        for at, binding in enumerate(bindings):
            texel = isinstance(binding, BufferView)
            kind = _TEXEL if texel else _STORAGE
            if runs and runs[-1][0] == number and runs[-1][3] == kind:
                _, first, count, _, entry = runs[-1]
                runs[-1] = (number, first, count + 1, kind, entry)
            else:
                runs.append((number, at, 1, kind, len(views) if texel else len(infos) // 3))
            if isinstance(binding, BufferView):
                views.append(binding.number)
            else:
                buffer, offset, length = binding
                infos += (
                    buffer.number,
                    offset,
                    buffer.nbytes - offset if length is None else length,
                )
    table = np.array(runs, np.int64).reshape(-1, 5)
    info_words, view_words = np.array(infos, np.uint64), np.array(views, np.uint64)
    texel = table[:, 3] == _TEXEL
    writes = np.zeros(len(table), _WRITE)
    writes["sType"] = _S_TYPE
    writes["set"] = handles[table[:, 0]]
    writes["binding"], writes["count"], writes["type"] = table[:, 1], table[:, 2], table[:, 3]
    writes["buffers"] = np.where(texel, 0, table[:, 4] * _INFO_SIZE + info_words.ctypes.data)
    writes["texels"] = np.where(texel, table[:, 4] * _VIEW_SIZE + view_words.ctypes.data, 0)
    return writes, info_words, view_words

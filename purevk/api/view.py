"""Views of a buffer as typed elements: uniform texel buffers, that kernels read with
`texelFetch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from purevk.api import vk
from purevk.api.buffer import TEXEL_ROOM, Usage
from purevk.api.device import DeviceObject
from purevk.errors import DeviceError, InputError

if TYPE_CHECKING:
    from purevk.api.buffer import Buffer

# name -> (VkFormat, bytes of an element)
TEXEL_FORMATS: dict[str, tuple[int, int]] = {
    f"{'rgba'[:lanes]}{bits}{suffix}": (
        vk.const(
            "VK_FORMAT_" + "".join(f"{channel}{bits}" for channel in "RGBA"[:lanes]) + f"_{numeric}"
        ),
        lanes * bits // 8,
    )
    for suffix, numeric, widths in (
        ("f", "SFLOAT", (16, 32)),
        ("ui", "UINT", (8, 16, 32)),
        ("i", "SINT", (8, 16, 32)),
    )
    for bits in widths
    for lanes in (1, 2, 4)
}


def texel_format(name: str) -> tuple[int, int]:
    """The VkFormat and the bytes of an element of a format such as "rgba32f", "r16f" or "r8ui".

    Raises:
        InputError: no such format.
    """
    found = TEXEL_FORMATS.get(name)
    if found is None:
        raise InputError(
            f"{name!r} is no texel format", why=f"the formats are {', '.join(TEXEL_FORMATS)}"
        )
    return found


class BufferView(DeviceObject):
    """A part of a buffer as elements of a format, to be bound as a uniform texel buffer.

    Args:
        buffer: made with `Usage.TEXEL`; it stays alive as long as the view.
        format: such as "rgba32f", see `TEXEL_FORMATS`.
        offset: its first byte, a multiple of the device's `min_texel_buffer_alignment`.
        nbytes: its size, whole elements, at least one and at most the device's
            `max_texel_buffer_elements`; None: as many as the buffer has from `offset` on, and the
            device takes.

    Attributes:
        buffer, format, offset, nbytes: as above. elements: how many there are.
        handle: the VkBufferView; number: the same as an integer.

    Raises:
        InputError: the range does not fit. DeviceError: the device has no texel buffers of that
            format.
    """

    def __init__(
        self, buffer: Buffer, format: str, offset: int = 0, nbytes: int | None = None
    ) -> None:
        device = buffer.device
        code, size = texel_format(format)
        limits, functions, vk_device = device.limits, device.functions, device.handle
        if not buffer.alive:
            raise DeviceError("The buffer is destroyed", next="make a new one")
        if not buffer.usage & Usage.TEXEL:
            raise DeviceError("The buffer cannot be viewed", why="it was made without Usage.TEXEL")
        if not device.physical.has_texel_format(format):
            raise DeviceError(f"{device.name} has no uniform texel buffers of format {format}")
        room = buffer.nbytes - offset
        if nbytes is None:
            nbytes = min(room // size, limits.max_texel_buffer_elements) * size
        if offset < 0 or offset % limits.min_texel_buffer_alignment or nbytes > room:
            raise InputError(
                f"Bytes {offset} to {offset + nbytes} of a buffer of {buffer.nbytes} cannot be viewed",
                why=f"a view lies in its buffer and starts at a multiple of {limits.min_texel_buffer_alignment} bytes",
            )
        if nbytes < size or nbytes % size or nbytes // size > limits.max_texel_buffer_elements:
            raise InputError(
                f"{nbytes} bytes cannot be viewed as {format}",
                why=f"a view has 1 to {limits.max_texel_buffer_elements} whole elements of {size} bytes",
            )
        self.buffer, self.format, self.offset, self.nbytes = buffer, format, offset, nbytes
        self.elements = nbytes // size
        info = vk.struct(
            "VkBufferViewCreateInfo",
            buffer=buffer.handle,
            format=code,
            offset=offset,
            range=self._created_range(size),
        )
        handle = vk.ffi.new("VkBufferView *")
        vk.check(
            functions.vkCreateBufferView(vk_device, info, vk.NULL, handle), "vkCreateBufferView"
        )
        self.handle = view = handle[0]
        self.number = int(vk.ffi.cast("uintptr_t", view))
        super().__init__(device, lambda: functions.vkDestroyBufferView(vk_device, view, vk.NULL))
        device.check()

    def _created_range(self, size: int) -> int:
        """The size of the VkBufferView. On a CPU it is larger where that gives it the form of
        nearly all others, see `TEXEL_ROOM`."""
        device, buffer = self.buffer.device, self.buffer
        special = device.kind == "cpu" and not self.nbytes >> 8 & 0xFF
        larger = self.nbytes + TEXEL_ROOM
        fits = (
            self.offset + larger <= buffer.created_bytes
            and larger // size <= device.limits.max_texel_buffer_elements
        )
        return larger if special and fits else self.nbytes

    def __repr__(self) -> str:
        return f"<BufferView {self.elements} x {self.format}{'' if self.alive else ', destroyed'}>"

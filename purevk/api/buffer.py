"""A buffer, and the host's view of its bytes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from purevk.api import vk
from purevk.api.device import DeviceObject
from purevk.api.features import OPAQUE_FD
from purevk.api.memory import MemoryKind, align_up
from purevk.errors import DeviceError, InputError, OutOfDeviceMemoryError

if TYPE_CHECKING:
    from purevk.api.device import Device


class Usage(enum.IntFlag):
    """What a buffer is used for (VkBufferUsageFlagBits)."""

    TRANSFER_SRC = 0x1
    TRANSFER_DST = 0x2
    TEXEL = 0x4  # uniform texel buffer views
    STORAGE = 0x20
    ADDRESS = 0x20000
    DEFAULT = STORAGE | TRANSFER_SRC | TRANSFER_DST


TEXEL_ROOM = 256
"""Bytes that a buffer for texels has at its end on a CPU. lavapipe compiles a kernel again for each
combination of texel buffers whose sizes have a power of two, and of views whose sizes have zeros in
bits 8 to 15. `BufferView` uses the room to give all of them one form."""
_MIB = 1 << 20
_OBJECT_BUFFER = vk.const("VK_OBJECT_TYPE_BUFFER")
_ADDRESS = int(Usage.ADDRESS)


class Buffer(DeviceObject):
    """A buffer with its memory.

    Args:
        device: its device.
        nbytes: size, at least 1; rounded up to a multiple of 4 inside.
        kind: where it lives, see `MemoryKind`.
        usage: see `Usage`. ADDRESS needs the feature buffer_device_address.
        label: name in validation messages.

    Attributes:
        nbytes: as asked for. created_bytes: of the VkBuffer, which may be larger.
        handle: the VkBuffer; number: the same as an integer.
        mapped: whether the host reaches the bytes.

    Raises:
        OutOfDeviceMemoryError: with sizes and heaps, or the largest size of a buffer.
    """

    def __init__(
        self,
        device: Device,
        nbytes: int,
        kind: MemoryKind = MemoryKind.DEVICE,
        usage: int = Usage.DEFAULT,
        label: str = "",
    ) -> None:
        if nbytes < 1:
            raise InputError(f"A buffer cannot have {nbytes} bytes", why="at least 1 is needed")
        limit = device.limits.max_buffer_size
        if limit and align_up(nbytes, 4) > limit:
            raise OutOfDeviceMemoryError(
                f"A buffer of {nbytes / _MIB:.1f} MiB is too large for {device.physical.name}",
                where=label,
                why=f"one buffer may have {limit / _MIB:.1f} MiB",
                next="use a smaller batch or bound, or half precision",
            )
        functions, vk_device = device.functions, device.handle
        self.nbytes, self.kind, self.usage = nbytes, kind, int(usage)
        self.created_bytes = _created_size(device, nbytes, self.usage)
        external, chain = None, vk.NULL
        if kind is MemoryKind.EXTERNAL:
            external = vk.struct("VkExternalMemoryBufferCreateInfo", handleTypes=OPAQUE_FD)
            chain = external
        info = vk.struct(
            "VkBufferCreateInfo",
            chain,
            size=self.created_bytes,
            usage=self.usage,
            sharingMode=0,
        )
        handle = vk.ffi.new("VkBuffer *")
        result = functions.vkCreateBuffer(vk_device, info, vk.NULL, handle)
        vk.check(result, "vkCreateBuffer", where=f"{nbytes} bytes {label}".strip())
        self.handle = buffer = handle[0]
        allocator = device.allocator
        allocation = None
        try:
            needs = vk.ffi.new("VkMemoryRequirements *")
            functions.vkGetBufferMemoryRequirements(vk_device, buffer, needs)
            allocation = allocator.allocate(needs.size, needs.alignment, needs.memoryTypeBits, kind)
            result = functions.vkBindBufferMemory(
                vk_device, buffer, allocation.block.memory, allocation.offset
            )
            vk.check(result, "vkBindBufferMemory", where=f"{nbytes} bytes {label}".strip())
            memory = allocator.state

            def destroy() -> None:
                functions.vkDestroyBuffer(vk_device, buffer, vk.NULL)
                memory.free(allocation)

            super().__init__(device, destroy)
        except BaseException:
            functions.vkDestroyBuffer(vk_device, buffer, vk.NULL)
            if allocation is not None:
                allocator.free(allocation)
            raise
        self.number = int(vk.ffi.cast("uintptr_t", buffer))
        self.allocation = allocation
        block = allocation.block
        self.mapped = block.mapped is not None
        # Where the host finds the bytes; `_check_range` keeps it from being used if it cannot.
        self._pointer: Any = block.mapped + allocation.offset if block.mapped is not None else None
        self._coherent = block.coherent
        self._range: Any = None
        device.set_name(_OBJECT_BUFFER, buffer, label)

    def _mapped_range(self) -> Any:
        """The whole allocation; offset and size are multiples of the atom, or end the block."""
        if self._range is None:
            allocation = self.allocation
            size = min(allocation.size, allocation.block.size - allocation.offset)
            self._range = vk.struct(
                "VkMappedMemoryRange",
                memory=allocation.block.memory,
                offset=allocation.offset,
                size=size,
            )
        return self._range

    def flush(self) -> None:
        """Makes what the host wrote through `view()` visible to work submitted from now on."""
        if self.mapped and not self._coherent:
            functions = self.device.functions
            result = functions.vkFlushMappedMemoryRanges(
                self.device.handle, 1, self._mapped_range()
            )
            vk.check(result, "vkFlushMappedMemoryRanges")

    def invalidate(self) -> None:
        """Makes what the device wrote (and has finished) visible through `view()`."""
        if self.mapped and not self._coherent:
            functions = self.device.functions
            result = functions.vkInvalidateMappedMemoryRanges(
                self.device.handle, 1, self._mapped_range()
            )
            vk.check(result, "vkInvalidateMappedMemoryRanges")

    def _check_range(self, offset: int, size: int) -> None:
        if not self.alive:
            raise DeviceError("The buffer is destroyed", next="make a new one")
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            raise InputError(
                f"Bytes {offset} to {offset + size} are not all in the buffer",
                why=f"it has {self.nbytes} bytes",
            )
        if not self.mapped:
            raise DeviceError(
                "The host cannot reach this buffer",
                why=f"its memory is of kind {self.kind.name}, which is not host-visible on {self.device.name}",
                next="copy through an UPLOAD or READBACK buffer",
            )

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """The buffer's own bytes, writable, without a copy: `np.frombuffer(buffer.view(),
        np.float32)`.

        The view must not be used after the buffer is destroyed. Call `flush()` after writing and
        `invalidate()` before reading; both do nothing on coherent memory.
        """
        size = self.nbytes - offset if nbytes is None else nbytes
        self._check_range(offset, size)
        return (
            memoryview(vk.ffi.buffer(self._pointer + offset, size))
            if size
            else memoryview(bytearray())
        )

    def write(self, offset: int, data: Any) -> None:
        """Copies a contiguous bytes-like object into the buffer at `offset`, and flushes."""
        source = memoryview(data)
        self._check_range(offset, source.nbytes)
        if source.nbytes:
            vk.ffi.memmove(self._pointer + offset, vk.ffi.from_buffer(source), source.nbytes)
            self.flush()

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """A copy of `nbytes` bytes from `offset` (all that follow if None), after an invalidate."""
        size = self.nbytes - offset if nbytes is None else nbytes
        self._check_range(offset, size)
        self.invalidate()
        return vk.ffi.buffer(self._pointer + offset, size)[:] if size else b""

    def export_fd(self) -> int:
        """A file descriptor of the buffer's memory (kind EXTERNAL), for another API or process to
        import. The buffer starts at the first byte of `allocation.block.size` bytes. The caller
        closes the descriptor, unless what imports it does so.

        Raises:
            DeviceError: the buffer has another kind of memory, or the driver gives none away.
        """
        if self.kind is not MemoryKind.EXTERNAL:
            raise DeviceError(
                "The buffer's memory cannot be exported",
                why=f"it is of kind {self.kind.name}",
                next="make the buffer with MemoryKind.EXTERNAL",
            )
        info = vk.struct(
            "VkMemoryGetFdInfoKHR", memory=self.allocation.block.memory, handleType=OPAQUE_FD
        )
        made = vk.ffi.new("int *")
        device = self.device
        result = device.functions.vkGetMemoryFdKHR(device.handle, info, made)
        vk.check(result, "vkGetMemoryFdKHR", where=f"{self.nbytes} bytes")
        return int(made[0])

    @property
    def address(self) -> int:
        """The buffer's address on the device (usage ADDRESS)."""
        if not self.usage & _ADDRESS:
            raise DeviceError("The buffer has no address", why="it was made without Usage.ADDRESS")
        info = vk.struct("VkBufferDeviceAddressInfo", buffer=self.handle)
        name = "vkGetBufferDeviceAddress" + "KHR" * (self.device.physical.api_version < (1, 2, 0))
        return int(getattr(self.device.functions, name)(self.device.handle, info))

    def __repr__(self) -> str:
        return (
            f"<Buffer {self.nbytes} bytes, {self.kind.name}{'' if self.alive else ', destroyed'}>"
        )


def _created_size(device: Device, nbytes: int, usage: int) -> int:
    """The size of the VkBuffer. On a CPU it has room for what a `BufferView` adds, and is no power
    of two."""
    size, limit = align_up(nbytes, 4), device.limits.max_buffer_size
    if device.kind != "cpu" or not usage & Usage.TEXEL:
        return size
    padded = size + TEXEL_ROOM
    padded += 4 * (padded & (padded - 1) == 0)
    return size if limit and padded > limit else padded

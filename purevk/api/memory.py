"""Device memory: a few large blocks, divided among buffers."""

from __future__ import annotations

import bisect
import enum
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from purevk.api import vk
from purevk.api.features import OPAQUE_FD
from purevk.api.physical import DEVICE_LOCAL, HOST_CACHED, HOST_COHERENT, HOST_VISIBLE
from purevk.errors import DeviceError, OutOfDeviceMemoryError

if TYPE_CHECKING:
    from purevk.api.device import Device

BLOCK_SIZE = 64 << 20
HOST_BLOCK_SIZE = 4 << 20  # of the first block in memory that only the host has
_MIB = 1 << 20


class MemoryKind(enum.Enum):
    """Where a buffer lives.

    DEVICE: the device's own memory; kernels read and write it fastest.
    UPLOAD: the host writes it, the device reads it once; device-local where the host can reach
    that. READBACK: the device writes it once, the host reads it; cached by the host where possible.
    UNIFIED: device-local and host-visible at once; only where the device has such memory
    (`Device.is_unified` says
        whether it is also fast to read).
    HOST: memory of the host that kernels read over the bus, for what does not fit on the device.
    EXTERNAL: the device's own memory, each buffer an allocation of its own, which other APIs on the
    same device can use too (feature external_memory_fd).
    """

    DEVICE = "device"
    UPLOAD = "upload"
    READBACK = "readback"
    UNIFIED = "unified"
    HOST = "host"
    EXTERNAL = "external"


# For each kind: flags that a memory type must have, and (flag, points) that order those that have
# them.
_PREFERENCE: dict[MemoryKind, tuple[int, tuple[tuple[int, int], ...]]] = {
    MemoryKind.DEVICE: (0, ((DEVICE_LOCAL, 8), (HOST_VISIBLE, -1))),
    MemoryKind.UPLOAD: (HOST_VISIBLE, ((DEVICE_LOCAL, 2), (HOST_COHERENT, 4), (HOST_CACHED, -1))),
    MemoryKind.READBACK: (HOST_VISIBLE, ((HOST_CACHED, 4), (HOST_COHERENT, 2), (DEVICE_LOCAL, -1))),
    MemoryKind.UNIFIED: (HOST_VISIBLE | DEVICE_LOCAL, ((HOST_CACHED, 4), (HOST_COHERENT, 2))),
    MemoryKind.HOST: (HOST_VISIBLE, ((DEVICE_LOCAL, -8), (HOST_COHERENT, 4), (HOST_CACHED, -1))),
    MemoryKind.EXTERNAL: (0, ((DEVICE_LOCAL, 8), (HOST_VISIBLE, -1))),
}
_PREFERENCE_UNIFIED_DEVICE = (
    0,
    ((DEVICE_LOCAL, 8), (HOST_VISIBLE, 4), (HOST_CACHED, 2), (HOST_COHERENT, 1)),
)
_FOREIGN_FLAGS = ~0x1F  # protected, device-coherent and other types that need their own feature


def align_up(value: int, alignment: int) -> int:
    """The next multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def _host_memory() -> int:
    """Bytes of three quarters of the memory of the host; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4
    except (AttributeError, OSError, ValueError):
        return 0


class FreeList:
    """Divides `size` bytes: best fit, with alignment; freed neighbours grow together.

    Free ranges are kept sorted by offset; no two of them touch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts: list[int] = [0] if size else []
        self._sizes: dict[int, int] = {0: size} if size else {}
        self.used: dict[int, int] = {}  # offset -> size

    def allocate(self, size: int, alignment: int = 1) -> int | None:
        """Takes `size` bytes at a multiple of `alignment`; None if no free range fits."""
        if size <= 0 or alignment <= 0:
            raise ValueError(f"size {size} and alignment {alignment} must be positive")
        best: tuple[int, int, int] | None = None
        for start in self._starts:
            room = self._sizes[start]
            if room < size:
                continue
            offset = align_up(start, alignment)
            if offset + size <= start + room and (best is None or room < best[0]):
                best = (room, start, offset)
                if room == size:
                    break
        if best is None:
            return None
        room, start, offset = best
        self._remove(start)
        if offset > start:
            self._insert(start, offset - start)
        if start + room > offset + size:
            self._insert(offset + size, start + room - offset - size)
        self.used[offset] = size
        return offset

    def free(self, offset: int) -> None:
        """Gives back what `allocate` returned."""
        size = self.used.pop(offset)
        index = bisect.bisect(self._starts, offset)
        if index < len(self._starts) and self._starts[index] == offset + size:
            after = offset + size
            size += self._sizes[after]
            self._remove(after)
        if index and self._starts[index - 1] + self._sizes[self._starts[index - 1]] == offset:
            self._sizes[self._starts[index - 1]] += size
        else:
            self._insert(offset, size)

    def _insert(self, start: int, size: int) -> None:
        bisect.insort(self._starts, start)
        self._sizes[start] = size

    def _remove(self, start: int) -> None:
        del self._starts[bisect.bisect_left(self._starts, start)]
        del self._sizes[start]

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """(offset, size) of each free range, by offset."""
        return [(start, self._sizes[start]) for start in self._starts]


@dataclass(eq=False)
class Block:
    """One `VkDeviceMemory`. `mapped` is its first byte's address, or None where the host cannot
    reach it."""

    memory: Any
    size: int
    type_index: int
    dedicated: bool
    mapped: Any
    coherent: bool
    ranges: FreeList = field(repr=False)


@dataclass(frozen=True)
class Allocation:
    """A part of a block: `size` bytes from `offset`."""

    block: Block
    offset: int
    size: int


@dataclass(frozen=True)
class MemoryStats:
    """What an allocator holds, in bytes. `reserved` is taken from the driver, `used` of it is given
    out, `peak` is the largest `reserved` so far; `heaps` gives (reserved, heap size) for each
    heap."""

    reserved: int
    used: int
    peak: int
    blocks: int
    allocations: int
    heaps: tuple[tuple[int, int], ...]


class _Memory:
    """The blocks of one device, without a reference to the `Device`, so that destroying needs
    none."""

    def __init__(self, device: Device) -> None:
        self.core, self.functions, self.handle = device.core, device.functions, device.handle
        self.lock = threading.RLock()
        self.blocks: dict[int, list[Block]] = {}
        self.reserved = [0] * len(device.physical.heaps)
        self.peak = 0
        self.types = device.physical.memory_types

    def free(self, allocation: Allocation) -> None:
        block = allocation.block
        with self.lock:
            block.ranges.free(allocation.offset)
            if block.ranges.used:
                return
            siblings = self.blocks[block.type_index]
            spare = any(
                sibling is not block and not sibling.dedicated and not sibling.ranges.used
                for sibling in siblings
            )
            if block.dedicated or spare:
                self.free_block(block)

    def free_block(self, block: Block) -> None:
        self.blocks[block.type_index].remove(block)
        self.reserved[self.types[block.type_index].heap] -= block.size
        self.functions.vkFreeMemory(self.handle, block.memory, vk.NULL)

    def trim(self) -> int:
        """Frees blocks that nothing uses; returns their bytes."""
        with self.lock:
            empty = [
                block
                for blocks in self.blocks.values()
                for block in blocks
                if not block.ranges.used
            ]
            for block in empty:
                self.free_block(block)
            return sum(block.size for block in empty)

    def close(self) -> None:
        with self.lock:
            for blocks in self.blocks.values():
                for block in list(blocks):
                    self.free_block(block)


class Allocator:
    """Gives out device memory. Thread-safe. One a device: `Device.allocator`."""

    def __init__(self, device: Device) -> None:
        self._physical, self._features, self._functions = (
            device.physical,
            device.features,
            device.functions,
        )
        self._handle, self._core = device.handle, device.core
        self._limits = device.limits
        self._types: dict[tuple[MemoryKind, int], tuple[int, ...]] = {}
        self.state = _Memory(device)
        self._number = device.core.register("", self.state.close)

    def allocate(self, size: int, alignment: int, type_bits: int, kind: MemoryKind) -> Allocation:
        """Memory of a type that `type_bits` allows.

        Raises:
            OutOfDeviceMemoryError: no heap that fits has room.
            DeviceError: no memory type is of that kind.
        """
        candidates = self._types_for(kind, type_bits)
        if not candidates:
            raise DeviceError(
                f"{self._physical.name} has no memory of kind {kind.name}",
                why=f"none of its {len(self._physical.memory_types)} memory types fits",
                next="use DEVICE with UPLOAD and READBACK buffers",
            )
        self._core.collect()
        tried: list[str] = []
        external = kind is MemoryKind.EXTERNAL
        for index in candidates:
            allocation = self._from_type(index, size, alignment, tried, external)
            if allocation is not None:
                return allocation
        if self.state.trim():
            for index in candidates:
                allocation = self._from_type(index, size, alignment, tried, external)
                if allocation is not None:
                    return allocation
        raise OutOfDeviceMemoryError(
            f"{size / _MIB:.1f} MiB of {kind.name} memory did not fit on {self._physical.name}",
            where="; ".join(dict.fromkeys(tried)),
            why=f"{sum(self.state.reserved) / _MIB:.1f} MiB are taken by purevk already",
            next="use a smaller batch or bound, half precision, or free other programs on the device; or"
            " split the model by layers over several: purevk.load(file, device=[0, 1])",
        )

    def free(self, allocation: Allocation) -> None:
        """Gives an allocation back."""
        self.state.free(allocation)

    def trim(self) -> int:
        """Gives blocks that nothing uses back to the driver; returns their bytes."""
        self._core.collect()
        return self.state.trim()

    def stats(self) -> MemoryStats:
        """What is reserved and used now."""
        self._core.collect()
        state = self.state
        with state.lock:
            blocks = [block for blocks in state.blocks.values() for block in blocks]
            heaps = tuple(
                (taken, heap.size) for taken, heap in zip(state.reserved, self._physical.heaps)
            )
            used = [size for block in blocks for size in block.ranges.used.values()]
            return MemoryStats(
                sum(state.reserved), sum(used), state.peak, len(blocks), len(used), heaps
            )

    def budget(self) -> tuple[tuple[int, int], ...]:
        """(bytes used by this process, bytes it may use) of each heap, as the driver says (feature
        memory_budget), else what purevk took and the heap's size."""
        physical = self._physical
        if "memory_budget" not in self._features:
            return self.stats().heaps
        budget = vk.struct("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
        properties = vk.struct("VkPhysicalDeviceMemoryProperties2", budget)
        physical.functions.vkGetPhysicalDeviceMemoryProperties2(physical.handle, properties)
        return tuple(
            (budget.heapUsage[i], budget.heapBudget[i]) for i in range(len(physical.heaps))
        )

    def _types_for(self, kind: MemoryKind, type_bits: int) -> tuple[int, ...]:
        key = (kind, type_bits)
        if key not in self._types:
            self._types[key] = self._sort_types(kind, type_bits)
        return self._types[key]

    def _sort_types(self, kind: MemoryKind, type_bits: int) -> tuple[int, ...]:
        physical = self._physical
        needed, points = _PREFERENCE[kind]
        if kind is MemoryKind.DEVICE and physical.is_unified:
            needed, points = _PREFERENCE_UNIFIED_DEVICE
        found = []
        for index, kind_of_memory in enumerate(physical.memory_types):
            flags = kind_of_memory.flags
            if not type_bits >> index & 1 or flags & needed != needed or flags & _FOREIGN_FLAGS:
                continue
            score = sum(value for flag, value in points if flags & flag)
            found.append((-score, -physical.heaps[kind_of_memory.heap].size, index))
        return tuple(index for *_, index in sorted(found))

    def _from_type(
        self, index: int, size: int, alignment: int, tried: list[str], external: bool
    ) -> Allocation | None:
        state = self.state
        kind = self._physical.memory_types[index]
        heap = self._physical.heaps[kind.heap]
        if kind.flags & HOST_VISIBLE and not kind.flags & HOST_COHERENT:
            # Flushing rounds to this unit; a neighbour must not share one.
            atom = self._limits.non_coherent_atom
            alignment, size = max(alignment, atom), align_up(size, atom)
        block_size = min(BLOCK_SIZE, max(heap.size // 16, 1 << 20))
        with state.lock:
            if self._core.handle is None:
                raise DeviceError("The device is closed", next="make a new device")
            dedicated = external or size > block_size // 2
            if not dedicated:
                for block in state.blocks.get(index, ()):
                    if (
                        not block.dedicated
                        and (offset := block.ranges.allocate(size, alignment)) is not None
                    ):
                        return Allocation(block, offset, size)
            limit = self._limits.max_allocation
            if limit and size > limit:
                tried.append(f"heap {kind.heap}: one allocation may have {limit / _MIB:.0f} MiB")
                return None
            if sum(map(len, state.blocks.values())) >= self._limits.max_allocations:
                tried.append(f"the device allows {self._limits.max_allocations} allocations")
                return None
            if not kind.flags & DEVICE_LOCAL:
                block_size = min(block_size, self._host_block(index, size))
            sizes = (size,) if dedicated else (block_size, max(block_size // 8, size))
            for wanted in sizes:
                made = self._new_block(index, wanted, dedicated, external)
                if made is not None:
                    first = made.ranges.allocate(size, alignment)
                    assert first is not None  # a new block has room
                    return Allocation(made, first, size)
        tried.append(
            f"heap {kind.heap} ({heap.size / _MIB:.0f} MiB, {state.reserved[kind.heap] / _MIB:.1f} MiB taken by purevk)"
        )
        return None

    def _host_block(self, index: int, size: int) -> int:
        """Bytes of the next block of memory of the host, for an allocation. A driver pins its pages,
        which takes long: so blocks begin small, and double what there is."""
        taken = sum(block.size for block in self.state.blocks.get(index, ()) if not block.dedicated)
        return max(HOST_BLOCK_SIZE, taken, 1 << (2 * size - 1).bit_length())

    def _new_block(self, index: int, size: int, dedicated: bool, external: bool) -> Block | None:
        state, functions = self.state, self._functions
        kind = self._physical.memory_types[index]
        heap = self._physical.heaps[kind.heap].size
        # A software device may say less of its heap than it takes: 2 GiB, in Mesa 22.3.
        room = max(heap, _host_memory()) if self._physical.kind == "cpu" else heap
        if size > heap or state.reserved[kind.heap] + size > room:
            return None
        flags, chain = None, vk.NULL
        if "buffer_device_address" in self._features:
            flags = vk.struct(
                "VkMemoryAllocateFlagsInfo", flags=2
            )  # VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT
            chain = flags
        exported = None
        if external:
            exported = vk.struct("VkExportMemoryAllocateInfo", chain, handleTypes=OPAQUE_FD)
            chain = exported
        info = vk.struct("VkMemoryAllocateInfo", chain, allocationSize=size, memoryTypeIndex=index)
        memory = vk.ffi.new("VkDeviceMemory *")
        result = functions.vkAllocateMemory(self._handle, info, vk.NULL, memory)
        if result in (
            vk.const("VK_ERROR_OUT_OF_DEVICE_MEMORY"),
            vk.const("VK_ERROR_OUT_OF_HOST_MEMORY"),
        ):
            return None
        vk.check(result, "vkAllocateMemory", where=f"{size} bytes of memory type {index}")
        mapped = None
        if kind.flags & HOST_VISIBLE:
            pointer = vk.ffi.new("void **")
            result = functions.vkMapMemory(self._handle, memory[0], 0, vk.WHOLE_SIZE, 0, pointer)
            if result < 0:
                functions.vkFreeMemory(self._handle, memory[0], vk.NULL)
                vk.fail(result, "vkMapMemory", where=f"{size} bytes of memory type {index}")
            mapped = vk.ffi.cast("char *", pointer[0])
        coherent = bool(kind.flags & HOST_COHERENT)
        block = Block(memory[0], size, index, dedicated, mapped, coherent, FreeList(size))
        state.blocks.setdefault(index, []).append(block)
        state.reserved[kind.heap] += size
        state.peak = max(state.peak, sum(state.reserved))
        return block

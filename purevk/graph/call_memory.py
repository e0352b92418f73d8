"""The buffers of a graph's calls: inputs, outputs, and temporaries at the offsets of the memory
planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from purevk import api
from purevk.errors import UnsupportedOperatorError
from purevk.graph.memory import BufferRange, DeviceStore
from purevk.ir import Value
from purevk.lower.lowering import NOTE_WORDS, Binding, BufferWindow, Dispatch
from purevk.memory_planner import Block, MemoryPlan, aligned, plan

# Bytes of a result from which on it is copied into the host's memory rather than written there.
_COPIED = 64 << 10
_FLAGS = "flags"


@dataclass(frozen=True)
class Cut:
    """A segment: the dispatches [first, last), the values that the host writes before it, and those
    that it reads after it."""

    first: int
    last: int
    uploads: tuple[Value, ...]
    downloads: tuple[Value, ...]


class Note(NamedTuple):
    """An index that is out of range, as a kernel has noted it: `storage` is that of the note."""

    storage: Value
    found: int
    lowest: int
    below: int


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a program on the device.

    Attributes:
        planned, naive, lower_bound: of intermediate tensors, see `MemoryPlan`.
        inputs, outputs: buffers that the host writes and reads.
        weights, state: of the whole program.
    """

    planned: int
    naive: int
    lower_bound: int
    inputs: int
    outputs: int
    weights: int
    state: int


class CallMemory:
    """Where each storage of dispatches is.

    Args:
        device: the device.
        dispatches: all of them, in order.
        cuts: the segments.
        fixed: stores that hold weights and state.
        sizes: bytes of every storage that the dispatches name.
        windows: storages that are parts of others.
        external: whether another API writes uploads and reads downloads, in place of the host.
        notes: storages in which kernels tell the host of an index that is out of range.

    Attributes:
        ranges: the buffer range of each storage.
        copies: for downloads that a copy command fetches, the ranges that the host reads.
        external_buffers: those that the other API has to import.
        plan: of the temporaries.
        input_bytes, output_bytes: of the buffers that the host writes and reads.
    """

    def __init__(
        self,
        device: api.Device,
        dispatches: Sequence[Dispatch],
        cuts: Sequence[Cut],
        fixed: Sequence[DeviceStore],
        sizes: Mapping[Value, int],
        windows: Mapping[Value, BufferWindow],
        external: bool = False,
        notes: Sequence[Value] = (),
    ) -> None:
        self._external = external
        self._notes = tuple(notes)
        self._flags: DeviceStore | None = None
        self._counters: DeviceStore | None = None
        self.external_buffers: list[api.Buffer] = []
        self._device, self._dispatches, self._cuts, self._sizes = device, dispatches, cuts, sizes
        self._windows = windows
        self._buffers: list[api.Buffer] = []
        self._views: dict[Value, memoryview] = {}
        self.ranges: dict[Value, BufferRange] = {}
        for store in fixed:
            for key, span in store.ranges.items():
                assert isinstance(key, Value)  # stores of a program keep values
                self.ranges[key] = span
        self.copies: dict[Value, BufferRange] = {}
        self.plan: MemoryPlan = plan([])
        self.input_bytes = self.output_bytes = 0
        try:
            self._place_notes()
            self._place_counters()
            self._place_uploads()
            self._place_outputs_and_temporaries()
            self._place_windows()
            self._check_ranges()
        except BaseException:
            self.close()
            raise

    def upload_view(self, value: Value) -> memoryview:
        """The bytes of an upload, which the host writes before its segment."""
        return self._view(value, self.ranges[value])

    def download_view(self, value: Value) -> memoryview:
        """The bytes of a download after its segment, without a copy."""
        span = self.copies.get(value) or self.ranges[value]
        span.buffer.invalidate()
        return self._view(value, span)

    def _view(self, value: Value, span: BufferRange) -> memoryview:
        """The bytes of an upload or a download, from the call before if there was one."""
        view = self._views.get(value)
        if view is None or not span.buffer.alive:
            view = self._views[value] = span.buffer.view(span.offset, self._sizes[value])
        return view

    def range_of(self, binding: Binding) -> BufferRange:
        """The buffer range of a binding."""
        if binding.kind not in ("flag", "flags"):
            return self.ranges[binding.storage]
        assert self._flags is not None  # a dispatch names them
        span, step = self._flags.ranges[_FLAGS], 4 * NOTE_WORDS
        if binding.kind == "flags":
            return span
        first = span.offset + self._notes.index(binding.storage) * step
        return BufferRange(span.buffer, first, step)

    def take_note(self) -> Note | None:
        """An index that is out of range, if a kernel has noted one since the last time. The device
        has finished."""
        if not self._notes:
            return None
        buffer = self._note_buffer
        buffer.invalidate()
        found = self._noted.tobytes()
        if found == self._nothing_noted:  # as in nearly all calls: numpy would take microseconds
            return None
        noted = np.frombuffer(found, np.int32).reshape(len(self._notes), -1)
        number = int(noted[:, 0].argmax())  # the first word says whether there is something
        words = noted[number, :4].tolist()
        self._noted[:] = self._nothing_noted
        buffer.flush()
        if self._flags is not None:
            self._flags.upload([(_FLAGS, None)])
        return Note(self._notes[number], *words[1:])

    def buffer(self, nbytes: int, kind: api.MemoryKind, label: str) -> api.Buffer:
        """A new buffer, which `close` destroys."""
        usage = api.Usage.DEFAULT | api.Usage.TEXEL
        made = api.Buffer(self._device, max(nbytes, 4), kind, usage, label=label)
        self._buffers.append(made)
        return made

    def _together(
        self, values: Sequence[Value], kind: api.MemoryKind, label: str
    ) -> dict[Value, BufferRange]:
        """Buffer ranges of values, in as few buffers of a kind as the device allows."""
        limit = self._device.limits.max_buffer_memory
        groups: list[list[Value]] = []
        total = 0
        for value in values:
            size = aligned(self._sizes[value])
            if not groups or (limit is not None and total + size > limit):
                groups.append([])
                total = 0
            groups[-1].append(value)
            total += size
        if self._external:
            kind = api.MemoryKind.EXTERNAL
        spans: dict[Value, BufferRange] = {}
        for group in groups:
            sizes = [aligned(self._sizes[value]) for value in group]
            buffer = self.buffer(sum(sizes), kind, label)
            if self._external:
                self.external_buffers.append(buffer)
            for value, start, size in zip(group, accumulate(sizes, initial=0), sizes):
                spans[value] = BufferRange(buffer, start, size)
        return spans

    def _place_notes(self) -> None:
        """Each note has a part of its own, so that the dispatches that may write them need no
        barriers between them. So has each flag. Notes are in memory of the host, which kernels that
        write states would read slowly."""
        if not self._notes:
            return
        step = 4 * NOTE_WORDS
        nbytes = len(self._notes) * step
        self._note_buffer = self.buffer(nbytes, api.MemoryKind.READBACK, "notes")
        self._nothing_noted = bytes(nbytes)
        self._noted = self._note_buffer.view(0, nbytes)
        self._noted[:] = self._nothing_noted
        self._note_buffer.flush()
        if any(
            binding.kind == "flag" for dispatch in self._dispatches for binding in dispatch.bindings
        ):
            self._flags = DeviceStore(self._device, "flags")
            self._flags.add([(_FLAGS, nbytes, None)])
        for number, value in enumerate(self._notes):
            self.ranges[value] = BufferRange(self._note_buffer, number * step, step)

    def _place_counters(self) -> None:
        counters = dict.fromkeys(
            binding.storage
            for dispatch in self._dispatches
            for binding in dispatch.bindings
            if binding.kind == "counters"
        )
        if counters:
            self._counters = DeviceStore(self._device, "counters")
            self._counters.add([(value, self._sizes[value], None) for value in counters])
            self.ranges.update((value, self._counters.ranges[value]) for value in counters)

    def _place_uploads(self) -> None:
        uploads = list(
            dict.fromkeys(
                value for cut in self._cuts for value in cut.uploads if value not in self.ranges
            )
        )
        spans = self._together(uploads, api.MemoryKind.UPLOAD, "inputs")
        self.input_bytes = sum(span.nbytes for span in spans.values())
        self.ranges.update(spans)

    def _place_outputs_and_temporaries(self) -> None:
        first: dict[Value, int] = {}
        last: dict[Value, int] = {}
        read: set[Value] = set()
        for step, dispatch in enumerate(self._dispatches):
            for binding in dispatch.bindings:
                window = self._windows.get(binding.storage)
                storage = binding.storage if window is None else window.storage
                if storage in self.ranges:
                    continue
                first.setdefault(storage, step)
                last[storage] = step
                if not binding.write:
                    read.add(storage)
        downloads: dict[Value, int] = {}
        for cut in self._cuts:
            for value in cut.downloads:
                downloads.setdefault(value, cut.last)
        # Kernels write small results into the host's memory themselves. Across a bus, scattered
        # writes are a hundred times slower than one copy, which large results are worth.
        direct = [
            value
            for value in downloads
            if value not in self.ranges
            and (
                self._device.is_unified
                or self._external
                or (value not in read and self._sizes[value] < _COPIED)
            )
        ]
        spans = self._together(direct, api.MemoryKind.READBACK, "outputs")
        copied = [
            value for value in downloads if value not in spans and not self._is_reached(value)
        ]
        self.copies = self._together(copied, api.MemoryKind.READBACK, "outputs")
        self.output_bytes = sum(span.nbytes for span in (*spans.values(), *self.copies.values()))
        self.ranges.update(spans)
        for value in copied:
            if value in first:
                last[value] = max(last[value], downloads[value])
        blocks = [
            Block(value, self._sizes[value], first[value], last[value])
            for value in first
            if value not in self.ranges
        ]
        self.plan = plan(blocks, max_arena=self._device.limits.max_buffer_memory)
        arenas = [
            self.buffer(nbytes, api.MemoryKind.DEVICE, "temporaries") for nbytes in self.plan.arenas
        ]
        for block in blocks:
            arena, offset = self.plan.offsets[block.key]
            assert isinstance(block.key, Value)  # as given above
            self.ranges[block.key] = BufferRange(arenas[arena], offset, block.nbytes)

    def _place_windows(self) -> None:
        for value, window in self._windows.items():
            whole = self.ranges.get(window.storage)
            if whole is not None:
                start = whole.offset + window.first
                self.ranges[value] = BufferRange(whole.buffer, start, window.nbytes)

    def _is_reached(self, value: Value) -> bool:
        """Whether who reads downloads reaches a storage where it is."""
        if value not in self.ranges:
            return False
        buffer = self.ranges[value].buffer
        return buffer.kind is api.MemoryKind.EXTERNAL if self._external else buffer.mapped

    def _check_ranges(self) -> None:
        limits = self._device.limits
        for dispatch in self._dispatches:
            for binding in dispatch.bindings:
                size = self._sizes.get(binding.storage, 0)
                kind, _, form = binding.kind.partition(":")
                texel = kind == "texel"
                limit = limits.max_storage_buffer_range
                if texel:
                    limit = limits.max_texel_buffer_elements * api.texel_format(form)[1]
                if size > limit:
                    raise UnsupportedOperatorError(
                        f"a tensor of {size} bytes is larger than one binding of the device",
                        where=dispatch.label,
                        why=f"{self._device.name} binds {limit} bytes at most",
                        next="set PUREVK_DISABLE=texels"
                        if texel
                        else "use a device with a larger maxStorageBufferRange, or split the tensor",
                    )

    def close(self) -> None:
        """Destroys the buffers."""
        self._notes = ()
        self._views = {}
        while self._buffers:
            self._buffers.pop().destroy()
        for store in (self._flags, self._counters):
            if store is not None:
                store.close()
        self.ranges = {}

"""Device memory of a program that is kept between calls: weights and states."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from purevk import api
from purevk.closing import Closing
from purevk.ir import Value
from purevk.lower.lowering import BufferWindow, Dispatch
from purevk.mapped import read_into
from purevk.memory_planner import aligned
from purevk.pool import Pool

_CHUNK = 64 << 20  # bytes of an arena, and of the staging buffer
_FEW_BYTES = 4096  # that commands hold themselves
_PART = 4 << 20  # bytes that are worth a thread of their own
_THREADS = 4  # that copy: more are not faster
Content = memoryview | Callable[[], memoryview] | None
"""Bytes of a tensor, or what gives them; None: zeros."""


class Writer(Protocol):
    """What writes tensors of a store on the device."""

    def settle(self) -> None:
        """Waits for what still runs."""


class BufferRange:
    """Bytes of a buffer."""

    __slots__ = ("buffer", "nbytes", "offset")

    def __init__(self, buffer: api.Buffer, offset: int, nbytes: int) -> None:
        self.buffer, self.offset, self.nbytes = buffer, offset, nbytes


class Staging(Closing):
    """Memory that the host writes, for copies to memory of the device that it cannot reach. It grows
    as it has to. A context manager.

    Several threads write what is large: one alone is slower than the bus.
    """

    def __init__(self, device: api.Device) -> None:
        self._device = device
        self._buffer: api.Buffer | None = None
        self._pool: Pool | None = None

    def buffer(self, nbytes: int) -> api.Buffer:
        """A buffer of at least so many bytes. An earlier one is destroyed if it is smaller; nothing
        reads it then."""
        if self._buffer is not None and self._buffer.nbytes < nbytes:
            self._buffer.destroy()
            self._buffer = None
        if self._buffer is None:
            self._buffer = api.Buffer(
                self._device, nbytes, api.MemoryKind.UPLOAD, api.Usage.TRANSFER_SRC, label="staging"
            )
        return self._buffer

    def write(self, at: int, data: memoryview) -> None:
        """Copies bytes to byte `at` of the buffer."""
        buffer, count = self._buffer, min(_THREADS, os.cpu_count() or 1, len(data) // _PART)
        assert buffer is not None
        if count < 2:
            read_into(buffer.view(at, len(data)), data)
            buffer.flush()
            return
        if self._pool is None:
            self._pool = Pool(_THREADS, "purevk-staging")
        target = buffer.view(at, len(data))
        ends = [len(data) * number // count for number in range(count + 1)]
        spans = [slice(first, last) for first, last in itertools.pairwise(ends)]

        def copy(span: slice) -> None:
            read_into(target[span], data[span])

        list(self._pool.map(copy, spans))
        buffer.flush()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer = None


class Contents:
    """Numbers for the contents of storages, so that the lowerings of a program share results from
    constants. Equal numbers mean the same kernels on the same constants.

    Attributes:
        made: a storage that is on the device, by the number of its content.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.made: dict[int, Value] = {}

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def after(
        self,
        dispatches: Iterable[Dispatch],
        constants: Iterable[Value],
        windows: Mapping[Value, BufferWindow],
        sizes: Mapping[Value, int],
    ) -> dict[Value, int]:
        """The content of each storage after the dispatches.

        Args:
            constants: values whose bytes are known. They are equal if they are the same value.
            windows: storages that are parts of others.
            sizes: bytes of storages.
        """
        found = {value: self._number(("constant", value)) for value in constants}

        def content(storage: Value) -> int:
            if storage in windows:
                part = windows[storage]
                return self._number(("part", content(part.storage), part.first, part.nbytes))
            if storage not in found:
                found[storage] = self._number(("empty", sizes[storage]))
            return found[storage]

        for dispatch in dispatches:
            bindings = tuple(
                (content(b.storage), b.write, b.kind, b.offset) for b in dispatch.bindings
            )
            run = dispatch.push, dispatch.grid, dispatch.params_buffer, dispatch.repeat
            step = self._number((dispatch.kernel, *run, bindings))
            for number, binding in enumerate(dispatch.bindings):
                if binding.write:
                    window = windows.get(binding.storage)
                    whole = binding.storage if window is None else window.storage
                    found[whole] = self._number(("result", step, number))
        return found


class DeviceStore:
    """Tensors in device memory, several per buffer, until the store is closed.

    Args:
        device: its device.
        label: names the buffers in validation messages.
        staging: what to copy through; None: memory of its own for each upload.
        local_bytes: of the device's own memory; what does not fit gets memory of the host. None: all
            gets memory of the device.

    Attributes:
        ranges: where each tensor is.
        writers: a call that was interrupted may still run. Before the host reads or writes a
            tensor, it waits for all of these.
    """

    def __init__(
        self,
        device: api.Device,
        label: str,
        staging: Staging | None = None,
        local_bytes: int | None = None,
    ) -> None:
        self.device, self.label, self.local_bytes = device, label, local_bytes
        self._staging = staging
        self.ranges: dict[object, BufferRange] = {}
        self.contents = Contents()
        self.writers: weakref.WeakSet[Writer] = weakref.WeakSet()
        self._buffers: list[api.Buffer] = []

    def _settle(self) -> None:
        for writer in list(self.writers):
            writer.settle()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def add(
        self,
        items: Sequence[tuple[object, int, Content]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Reserves memory for (key, bytes, content) and fills it as `upload` does. After an error it
        has none of these tensors."""
        with self.adding(key for key, _, _ in items):
            self.reserve([(key, nbytes) for key, nbytes, _ in items])
            self.upload([(key, data) for key, _, data in items], progress)

    @contextlib.contextmanager
    def adding(self, keys: Iterable[object]) -> Iterator[None]:
        """Within, tensors of new keys get memory and content. After an error the store has none of
        them: what has memory counts as filled."""
        new = set(keys).difference(self.ranges)
        try:
            yield
        except BaseException:
            self.keep(self.ranges.keys() - new)
            raise

    def reserve(self, items: Iterable[tuple[object, int]]) -> None:
        """Reserves memory for (key, bytes) pairs that have none yet."""
        items = [(key, nbytes) for key, nbytes in items if key not in self.ranges]
        local, spilled = self._split(items)
        for pairs, kind in ((local, api.MemoryKind.DEVICE), (spilled, api.MemoryKind.HOST)):
            for group in self._groups(pairs):
                self.reserve_in_turn([group], kind)

    def _split(
        self, items: list[tuple[object, int]]
    ) -> tuple[list[tuple[object, int]], list[tuple[object, int]]]:
        """What gets memory of the device, and what gets memory of the host."""
        if self.local_bytes is None:
            return items, []
        own = (buffer for buffer in self._buffers if buffer.kind is api.MemoryKind.DEVICE)
        room = self.local_bytes - sum(buffer.nbytes for buffer in own)
        local: list[tuple[object, int]] = []
        spilled: list[tuple[object, int]] = []
        for key, nbytes in items:
            fits = aligned(nbytes) <= room
            (local if fits else spilled).append((key, nbytes))
            room -= aligned(nbytes) if fits else 0
        return local, spilled

    def _groups(self, items: Iterable[tuple[object, int]]) -> Iterator[list[tuple[object, int]]]:
        """Pairs that share a buffer."""
        group: list[tuple[object, int]] = []
        total = 0
        most = min(_CHUNK, self.device.limits.max_buffer_memory or _CHUNK)
        for key, nbytes in items:
            if group and total + aligned(nbytes) > most:
                yield group
                group, total = [], 0
            group.append((key, nbytes))
            total += aligned(nbytes)
        yield group

    def reserve_in_turn(
        self,
        groups: Iterable[Sequence[tuple[object, int]]],
        kind: api.MemoryKind = api.MemoryKind.DEVICE,
    ) -> None:
        """Reserves one range of memory for several groups of (key, bytes) pairs, which use it one
        group after the other. No key has memory yet."""
        groups = [group for group in groups if group]
        if not groups:
            return
        total = max(sum(aligned(nbytes) for _, nbytes in group) for group in groups)
        usage = api.Usage.DEFAULT | api.Usage.TEXEL
        buffer = api.Buffer(self.device, total, kind, usage, label=self.label)
        self._buffers.append(buffer)
        for group in groups:
            offset = 0
            for key, nbytes in group:
                self.ranges[key] = BufferRange(buffer, offset, aligned(nbytes))
                offset += aligned(nbytes)

    def upload(
        self,
        items: Iterable[tuple[object, Content]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Fills buffer ranges: directly if the host can write there, else through a staging buffer.
        What gives bytes is called when they are copied, so that the host holds few at a time.

        Args:
            progress: called with (bytes done, bytes in all).
        """
        self._settle()
        work = [(self.ranges[key], data) for key, data in items]
        total, done = sum(span.nbytes for span, _ in work), 0
        staged: list[tuple[BufferRange, Content]] = []
        for span, data in work:
            if span.buffer.mapped:
                _write(span, data)
                done += span.nbytes
                if progress is not None:
                    progress(done, total)
            else:
                staged.append((span, data))
        if staged and total <= _FEW_BYTES:
            self._update(staged)
            if progress is not None:
                progress(total, total)
        elif staged:
            self._stage(staged, done, total, progress)

    def _update(self, work: list[tuple[BufferRange, Content]]) -> None:
        """Fills buffer ranges with few bytes, which the commands hold: no staging buffer is made."""
        with contextlib.ExitStack() as stack:
            commands = _commands(self.device, stack, "upload")
            commands.begin()
            for span, content in work:
                data = content() if callable(content) else content
                if data is None:
                    commands.fill_buffer(span.buffer, span.offset, span.nbytes)
                elif len(data):
                    padded = bytes(data).ljust(-(-len(data) // 4) * 4, b"\0")
                    commands.update_buffer(span.buffer, span.offset, padded)
            self._copy(commands)

    def _stage(
        self,
        work: list[tuple[BufferRange, Content]],
        done: int,
        total: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        size = min(
            _CHUNK, max(span.nbytes for span, _ in work) + sum(span.nbytes for span, _ in work)
        )
        with contextlib.ExitStack() as stack:
            staging = self._staging or stack.enter_context(Staging(self.device))
            buffer = staging.buffer(size)
            commands = _commands(self.device, stack, "upload")
            used = 0
            commands.begin()
            for span, data, start, nbytes in _pieces(work, size):
                if used + nbytes > size:
                    self._copy(commands)
                    if progress is not None:  # ranges are longer than what is copied into them
                        progress(min(done, total - 1), total)
                    used = 0
                    commands.begin()
                if data is None:
                    commands.fill_buffer(span.buffer, span.offset + start, -(-nbytes // 4) * 4)
                else:
                    staging.write(used, data[start : start + nbytes])
                    commands.copy_buffer(buffer, span.buffer, nbytes, used, span.offset + start)
                used += -(-nbytes // 16) * 16
                done += nbytes
            self._copy(commands)
            if progress is not None:
                progress(total, total)

    def _copy(self, commands: api.CommandBuffer) -> None:
        commands.barrier(api.Access.TRANSFER, api.Access.COMPUTE | api.Access.TRANSFER)
        commands.end()
        self.device.queue.run(commands)

    def read(self, key: object, nbytes: int) -> bytes:
        """The bytes of a tensor."""
        return self.read_all([(key, nbytes)])[0]

    def read_all(self, items: Sequence[tuple[object, int]]) -> list[bytes]:
        """The bytes of tensors, as (key, bytes) pairs, by few submissions."""
        self._settle()
        spans = [(self.ranges[key], nbytes) for key, nbytes in items]
        if all(span.buffer.mapped for span, _ in spans):
            return [span.buffer.read(span.offset, nbytes) for span, nbytes in spans]
        return [data for group in self._groups(items) for data in self._read_back(group)]

    def _read_back(self, items: Sequence[tuple[object, int]]) -> list[bytes]:
        """The bytes of tensors, through memory that the host reads."""
        ends = list(itertools.accumulate(aligned(nbytes) for _, nbytes in items))
        with contextlib.ExitStack() as stack:
            back = api.Buffer(
                self.device,
                ends[-1],
                api.MemoryKind.READBACK,
                api.Usage.TRANSFER_DST,
                label="readback",
            )
            stack.callback(back.destroy)
            commands = _commands(self.device, stack, "readback")
            commands.begin()
            commands.barrier(api.Access.COMPUTE | api.Access.TRANSFER, api.Access.TRANSFER)
            for (key, nbytes), end in zip(items, ends):
                span = self.ranges[key]
                start = end - aligned(nbytes)
                commands.copy_buffer(span.buffer, back, nbytes, span.offset, start)
            commands.barrier(api.Access.TRANSFER, api.Access.HOST)
            commands.end()
            self.device.queue.run(commands)
            return [
                back.read(end - aligned(nbytes), nbytes) for (_, nbytes), end in zip(items, ends)
            ]

    def copy(self, items: Iterable[tuple[object, int, object, int, int]]) -> None:
        """Copies bytes between tensors: (key, first byte, other key, its first byte, bytes). No two
        ranges overlap."""
        self._settle()
        with contextlib.ExitStack() as stack:
            commands = _commands(self.device, stack, "copy")
            commands.begin()
            commands.barrier(api.Access.COMPUTE | api.Access.TRANSFER, api.Access.TRANSFER)
            for key, start, other, to, nbytes in items:
                source, target = self.ranges[key], self.ranges[other]
                places = source.offset + start, target.offset + to
                commands.copy_buffer(source.buffer, target.buffer, nbytes, *places)
            commands.barrier(api.Access.TRANSFER, api.Access.COMPUTE | api.Access.TRANSFER)
            commands.end()
            self.device.queue.run(commands)

    def keep(self, keys: Container[object]) -> None:
        """Forgets all tensors but those in `keys`, and destroys the buffers that only these used.
        No kernel that reads them may still run."""
        self.ranges = {key: span for key, span in self.ranges.items() if key in keys}
        used = {id(span.buffer) for span in self.ranges.values()}
        for buffer in self._buffers:
            if id(buffer) not in used:
                buffer.destroy()
        self._buffers = [buffer for buffer in self._buffers if id(buffer) in used]

    def close(self) -> None:
        """Destroys the buffers."""
        for buffer in self._buffers:
            buffer.destroy()
        self._buffers.clear()
        self.ranges.clear()


def _commands(device: api.Device, stack: contextlib.ExitStack, label: str) -> api.CommandBuffer:
    """A command buffer with a pool of its own, which the stack destroys."""
    pool = api.CommandPool(device)
    stack.callback(pool.destroy)
    commands = pool.buffer(label)
    stack.callback(commands.destroy)
    return commands


def _write(span: BufferRange, content: Content) -> None:
    data = content() if callable(content) else content
    if data is None:
        span.buffer.write(span.offset, bytes(span.nbytes))
    elif len(data):
        read_into(span.buffer.view(span.offset, len(data)), data)
        span.buffer.flush()


# A buffer range, its content (None: zeros), and the first byte and number of bytes of a piece.
_Piece = tuple[BufferRange, "memoryview | None", int, int]


def _pieces(work: list[tuple[BufferRange, Content]], limit: int) -> Iterable[_Piece]:
    for span, content in work:
        data = content() if callable(content) else content
        length = span.nbytes if data is None else len(data)
        for start in range(0, length, limit):
            yield span, data, start, min(limit, length - start)

"""Device memory of a program that outlives a call: weights and state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from purevk import api
from purevk.graph.shared import Contents
from purevk.memory_planner import ALIGNMENT

_CHUNK = 64 << 20  # bytes of an arena, and of the staging buffer


class Place:
    """Bytes of a buffer."""

    __slots__ = ("buffer", "nbytes", "offset")

    def __init__(self, buffer: api.Buffer, offset: int, nbytes: int) -> None:
        self.buffer, self.offset, self.nbytes = buffer, offset, nbytes


class DeviceStore:
    """Tensors in device memory, several to a buffer, until the store is closed.

    Args:
        device: its device.
        label: names the buffers in validation messages.
    """

    def __init__(self, device: api.Device, label: str) -> None:
        self.device, self.label = device, label
        self.places: dict[object, Place] = {}
        self.contents = Contents()
        self._buffers: list[api.Buffer] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def reserve(self, items: Iterable[tuple[object, int]]) -> None:
        """Makes room for (key, bytes) that have none yet."""
        wanted = [
            (key, -(-max(nbytes, 4) // ALIGNMENT) * ALIGNMENT)
            for key, nbytes in items
            if key not in self.places
        ]
        group: list[tuple[object, int]] = []
        total = 0
        for key, nbytes in wanted:
            if group and total + nbytes > _CHUNK:
                self._place(group, total)
                group, total = [], 0
            group.append((key, nbytes))
            total += nbytes
        if group:
            self._place(group, total)

    def _place(self, group: list[tuple[object, int]], total: int) -> None:
        usage = api.Usage.DEFAULT | api.Usage.TEXEL
        buffer = api.Buffer(self.device, total, api.MemoryKind.DEVICE, usage, label=self.label)
        self._buffers.append(buffer)
        offset = 0
        for key, nbytes in group:
            self.places[key] = Place(buffer, offset, nbytes)
            offset += nbytes

    def upload(
        self,
        items: Iterable[tuple[object, memoryview | None]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Fills places with bytes (None: zeros), directly where the host reaches them, otherwise
        through a staging buffer.

        Args:
            progress: called with (bytes done, bytes in all).
        """
        work = [(self.places[key], data) for key, data in items]
        total, done = sum(place.nbytes for place, _ in work), 0
        staged: list[tuple[Place, memoryview | None]] = []
        for place, data in work:
            if place.buffer.mapped:
                _write(place, data)
                done += place.nbytes
                if progress is not None:
                    progress(done, total)
            else:
                staged.append((place, data))
        if staged:
            self._stage(staged, done, total, progress)

    def _stage(
        self,
        work: list[tuple[Place, memoryview | None]],
        done: int,
        total: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        size = min(
            _CHUNK, max(place.nbytes for place, _ in work) + sum(place.nbytes for place, _ in work)
        )
        staging = api.Buffer(
            self.device, size, api.MemoryKind.UPLOAD, api.Usage.TRANSFER_SRC, label="staging"
        )
        pool = api.CommandPool(self.device)
        commands = pool.buffer("upload")
        try:
            pieces = list(_pieces(work, size))
            while pieces:
                used, batch = 0, []
                while pieces and used + pieces[0][3] <= size:
                    piece = pieces.pop(0)
                    batch.append((used, piece))
                    used += -(-piece[3] // 16) * 16
                commands.begin()
                for at, (place, data, start, nbytes) in batch:
                    if data is None:
                        commands.fill_buffer(
                            place.buffer, place.offset + start, -(-nbytes // 4) * 4
                        )
                    else:
                        staging.write(at, data[start : start + nbytes])
                        commands.copy_buffer(
                            staging, place.buffer, nbytes, at, place.offset + start
                        )
                commands.barrier(api.Access.TRANSFER, api.Access.COMPUTE | api.Access.TRANSFER)
                commands.end()
                self.device.queue.run(commands)
                done += sum(piece[3] for _, piece in batch)
                if progress is not None:
                    progress(min(done, total), total)
        finally:
            commands.destroy()
            pool.destroy()
            staging.destroy()

    def read(self, key: object, nbytes: int) -> bytes:
        """The bytes of a tensor."""
        place = self.places[key]
        if place.buffer.mapped:
            return place.buffer.read(place.offset, nbytes)
        back = api.Buffer(
            self.device, nbytes, api.MemoryKind.READBACK, api.Usage.TRANSFER_DST, label="readback"
        )
        pool = api.CommandPool(self.device)
        commands = pool.buffer("readback")
        try:
            commands.begin()
            commands.barrier(api.Access.COMPUTE | api.Access.TRANSFER, api.Access.TRANSFER)
            commands.copy_buffer(place.buffer, back, nbytes, place.offset, 0)
            commands.barrier(api.Access.TRANSFER, api.Access.HOST)
            commands.end()
            self.device.queue.run(commands)
            return back.read(0, nbytes)
        finally:
            commands.destroy()
            pool.destroy()
            back.destroy()

    def close(self) -> None:
        """Destroys the buffers."""
        for buffer in self._buffers:
            buffer.destroy()
        self._buffers.clear()
        self.places.clear()


def _write(place: Place, data: memoryview | None) -> None:
    if data is None:
        place.buffer.write(place.offset, bytes(place.nbytes))
    elif len(data):
        place.buffer.write(place.offset, data)


# A place, its content (None: zeros), and the first byte and number of bytes of a piece.
_Piece = tuple[Place, "memoryview | None", int, int]


def _pieces(work: list[tuple[Place, memoryview | None]], limit: int) -> Iterable[_Piece]:
    for place, data in work:
        length = place.nbytes if data is None else len(data)
        for start in range(0, length, limit):
            yield place, data, start, min(limit, length - start)

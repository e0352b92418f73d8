"""Bytes of mapped files, read so that a file that was cut short is an error.

To touch a page of a map that its file has no more ends the process with the signal SIGBUS. So who
reads bytes that may be those of a file reads them through here: they are copied by `preadv`, and the
map only gives them their addresses.
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from purevk.errors import FileFormatError

CUT_SHORT = "the file was cut short while its program was open"
"""What the error says."""
_STEP = 1 << 20  # bytes that `pieces` copies at once, which caches hold
_MOST = 1 << 30  # bytes of one read


@dataclass(eq=False)
class _File:
    """A mapped file: its addresses, its descriptor and its name. `live` ends before its addresses
    become free for other memory."""

    first: int
    last: int
    descriptor: int
    name: str
    live: bool = True


_files: tuple[_File, ...] = ()  # by their addresses; replaced as a whole
_lock = threading.RLock()  # an object may be collected, and forgotten, at any time


class MappedFile(mmap.mmap):
    """A file that is mapped for reading. Its bytes are read by the functions of this module for as long
    as the map lives."""

    _entry: _File | None = None

    def close(self) -> None:
        """Unmaps the file. Raises BufferError while somebody has bytes of it."""
        entry = self._entry
        _forget(entry)  # first: other memory may get these addresses
        try:
            super().close()
        except BufferError:
            _remember(entry)
            raise
        self._entry = None
        if entry is not None:
            os.close(entry.descriptor)

    def __del__(self) -> None:  # runs before the memory is unmapped
        entry, self._entry = self._entry, None
        _forget(entry)
        if entry is not None:
            os.close(entry.descriptor)


def map_file(descriptor: int, name: str) -> MappedFile:
    """Maps a file that is not empty."""
    mapping = MappedFile(descriptor, 0, access=mmap.ACCESS_READ)
    if hasattr(os, "preadv"):  # Windows has none, and cuts no file that is mapped
        first = address_of(memoryview(mapping))
        mapping._entry = _File(first, first + len(mapping), os.dup(descriptor), name)
        _remember(mapping._entry)
    return mapping


def _remember(entry: _File | None) -> None:
    global _files
    if entry is not None:
        entry.live = True
        with _lock:
            live = [file for file in (*_files, entry) if file.live]
            _files = tuple(sorted(live, key=lambda file: file.first))


def _forget(entry: _File | None) -> None:
    global _files
    if entry is not None:
        entry.live = False
        with _lock:
            _files = tuple(file for file in _files if file.live)


def address_of(data: memoryview) -> int:
    """Where bytes are in the memory of this process; 0 for none."""
    if not len(data):
        return 0
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def _file_of(data: memoryview) -> tuple[_File, int] | None:
    """The mapped file that bytes are in, and the first byte there; None if they are in none."""
    files = _files
    if not files or not len(data):
        return None
    address = address_of(data)
    number = bisect_right(files, address, key=lambda file: file.first) - 1
    if number < 0 or address >= files[number].last or not files[number].live:
        return None
    return files[number], address - files[number].first


def is_mapped(data: memoryview) -> bool:
    """Whether bytes are those of a mapped file."""
    return _file_of(data) is not None


def read_into(target: memoryview, data: memoryview) -> None:
    """Copies bytes into memory of the same size. Lets other threads run.

    Raises:
        FileFormatError: their file was cut short.
    """
    found = _file_of(data)
    if found is None:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))
        return
    file, first = found
    done = 0
    while done < len(data):
        count = os.preadv(file.descriptor, [target[done : done + _MOST]], first + done)
        if not count:
            raise FileFormatError(
                CUT_SHORT,
                where=file.name,
                why=f"byte {first + done} is gone",
                next="load the file again; write a new file beside the old one, and rename it",
            )
        done += count


def own(data: memoryview) -> memoryview:
    """Bytes that no change of a file reaches: themselves, or a copy of those of a mapped file,
    read-only.

    Raises:
        FileFormatError: their file was cut short.
    """
    if _file_of(data) is None:
        return data
    copy = np.empty(len(data), np.uint8).data
    read_into(copy, data)
    return copy.toreadonly()


def pieces(data: memoryview) -> Iterator[memoryview]:
    """Bytes in pieces, each of which is valid until the next one is asked for.

    Raises:
        FileFormatError: their file was cut short.
    """
    if _file_of(data) is None:
        step = 1 << 26
        for start in range(0, len(data), step):
            yield data[start : start + step]
        return
    buffer = np.empty(min(len(data), _STEP), np.uint8).data
    for start in range(0, len(data), _STEP):
        piece = buffer[: min(_STEP, len(data) - start)]
        read_into(piece, data[start : start + len(piece)])
        yield piece

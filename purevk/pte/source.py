"""The bytes of one file: a read-only map of it, or bytes that the caller holds. `purevk.mapped` reads
those of a map."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from typing import Any, BinaryIO, Union

from purevk.errors import FileFormatError, InputError, PurevkError
from purevk.mapped import MappedFile, map_file, own, read_into
from purevk.paths import open_regular, path_text

FileLike = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview]
_HEAD = 64  # bytes that tell kinds of files
_MOST_HOLES = 1 << 30  # bytes of a file that may be holes, whatever it holds
_BYTES = "<bytes>"


def open_program(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file with a program for reading.

    Raises:
        FileFormatError: it is a pipe or a device: opening one may wait forever, and it cannot be mapped;
            or nearly all of a large file is holes.
        InputError: no file can have this path.
        OSError: it cannot be opened, or is a folder.
    """
    try:
        stream = open_regular(path)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise FileFormatError(
            "this is not a regular file",
            where=os.fspath(path),
            why=f"{error.strerror}; files are mapped into memory",
            next="write it to a file, or pass its bytes: purevk.load(sys.stdin.buffer.read())",
        ) from None
    size = os.fstat(stream.fileno()).st_size
    data = _data_bytes(stream.fileno(), size)
    if 16 * data < size:
        stream.close()
        raise FileFormatError(
            f"the file states {size} bytes, and nearly all of them are holes",
            where=os.fspath(path),
            why=f"{data} bytes are on the disk: to read the rest costs its author nothing",
            next="if it is sound, pass its bytes",
        )
    return stream


def _data_bytes(descriptor: int, size: int) -> int:
    """The bytes of a file that are no holes, or `size` if it is small, or has enough of them, or the
    system does not tell."""
    if size < _MOST_HOLES or not hasattr(os, "SEEK_DATA"):
        return size
    data = end = 0
    try:
        while 16 * data < size:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            data += end - start
    except OSError as error:
        return data if error.errno == errno.ENXIO else size  # after `end` there is none
    return size


class Source:
    """A file's bytes, never copied. Slices stay valid for as long as they are referenced, also
    after `close()`.

    Args:
        file: a path, which is opened once and mapped read-only, or the bytes themselves.
        kind: what the file should be, for error messages, such as ".pte".

    Attributes:
        head: a copy of the first bytes, which tell the kind of a file.

    Raises:
        FileFormatError: the file is empty, no regular file, or nearly all holes.
        InputError: no file can have this path, or the bytes cannot be read.
        OSError: the path cannot be opened.
    """

    def __init__(self, file: FileLike, kind: str = "") -> None:
        self._map: MappedFile | None = None
        if isinstance(file, (bytes, bytearray, memoryview)):
            self.name = f"<{kind} bytes>" if kind else _BYTES
            self._view: memoryview | None = _flat(file)
        else:
            self.name = path_text(file)
            with open_program(file) as stream:
                if os.fstat(stream.fileno()).st_size:
                    self._map = map_file(stream.fileno(), self.name)
            self._view = memoryview(self._map) if self._map is not None else memoryview(b"")
        self.size = len(self._view)
        if not self.size:
            raise FileFormatError(
                "the file is empty", where=self.name, why="0 bytes", next="export or save it again"
            )
        self.head = bytes(own(self._view[:_HEAD]))

    @classmethod
    def of(cls, file: FileLike | Source, kind: str) -> Source:
        """A file that may be open already."""
        if not isinstance(file, Source):
            return cls(file, kind)
        if file.name == _BYTES:
            file.name = f"<{kind} bytes>"
        return file

    def stream(self) -> BinaryIO:
        """The bytes as a file that is open for reading."""
        return io.BufferedReader(_Stream(self.view))

    @property
    def view(self) -> memoryview:
        """All bytes, read-only."""
        if self._view is None:
            raise PurevkError(
                "the file was closed", where=self.name, next="read its data before close()"
            )
        return self._view

    def slice(self, offset: int, size: int, what: str) -> memoryview:
        """`size` bytes at `offset`; FileFormatError if the file does not hold them."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise FileFormatError(
                f"{what} lies outside the file",
                where=self.name,
                why=f"bytes {offset} to {offset + size} of {self.size}",
                next="the file is damaged or was cut short: copy or export it again",
            )
        return self.view[offset : offset + size]

    def close(self) -> None:
        """Let go of the file. The map goes with the last slice of it that someone still holds."""
        view, self._view = self._view, None
        if view is not None:
            view.release()
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # slices are in use: their references end the map
                pass
            self._map = None

    def __repr__(self) -> str:
        return f"Source({self.name!r}, {self.size} bytes)"


def _flat(data: bytes | bytearray | memoryview) -> memoryview:
    """Bytes of the caller, read-only. Those that do not follow each other in memory are copied."""
    try:
        view = memoryview(data).toreadonly()
        with contextlib.suppress(TypeError, ValueError):  # an item of several fields
            if view.c_contiguous:
                return view.cast("B")
        return memoryview(view.tobytes())
    except (ValueError, NotImplementedError) as error:
        raise InputError(
            "these bytes cannot be read",
            where=f"a {type(data).__name__}",
            why=str(error),
            next="pass bytes, or a memoryview that was not released",
        ) from None


class _Stream(io.RawIOBase):
    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self._at, len(self._view))[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._view[self._at : self._at + len(buffer)]
        read_into(memoryview(buffer)[: len(piece)], piece)
        self._at += len(piece)
        return len(piece)

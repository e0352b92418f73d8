"""The bytes of one file: a read-only map of it, or bytes that the caller holds. `purevk.mapped` reads
those of a map."""

from __future__ import annotations

import os
import stat
from typing import Union

from purevk.errors import FileFormatError, PurevkError
from purevk.mapped import MappedFile, map_file

FileLike = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview]


def check_regular(file: FileLike) -> None:
    """Raises `FileFormatError` for a path of a pipe or a device: opening one may wait forever, and
    it cannot be mapped. Folders and missing files are left to `open`."""
    if isinstance(file, (bytes, bytearray, memoryview)):
        return
    try:
        mode = os.stat(file).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFSOCK: "a socket"}
        raise FileFormatError(
            "this is not a regular file",
            where=os.fspath(file),
            why=f"it is {kinds.get(stat.S_IFMT(mode), 'something else')}; files are mapped into memory",
            next="write it to a file, or pass its bytes: purevk.load(sys.stdin.buffer.read())",
        )


class Source:
    """A file's bytes, never copied. Slices stay valid for as long as they are referenced, also
    after `close()`.

    Args:
        file: a path, which is mapped read-only, or the bytes themselves.
        kind: what the file should be, for error messages, such as ".pte".

    Raises:
        FileFormatError: the file is empty, or no regular file.
        OSError: the path cannot be opened.
    """

    def __init__(self, file: FileLike, kind: str) -> None:
        self._map: MappedFile | None = None
        if isinstance(file, (bytes, bytearray, memoryview)):
            self.name = f"<{kind} bytes>"
            view = memoryview(file).toreadonly()
            self._view: memoryview | None = (
                view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
            )
        else:
            check_regular(file)
            self.name = os.fspath(file)
            with open(self.name, "rb") as stream:
                if os.fstat(stream.fileno()).st_size:
                    self._map = map_file(stream.fileno(), self.name)
            self._view = memoryview(self._map) if self._map is not None else memoryview(b"")
        self.size = len(self._view)
        if not self.size:
            raise FileFormatError(
                "the file is empty", where=self.name, why="0 bytes", next="export or save it again"
            )

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

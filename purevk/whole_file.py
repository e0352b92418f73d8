"""Files that are written whole or not at all, and read without waiting; folders of this user's own."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".purevk-"
"""How the names of temporary files begin."""
STALE_S = 600.0
"""Seconds after which nobody writes a temporary file any more: a killed process has left it."""


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path`, which gets its name at the end. After an error, `path` is
    as it was.

    Args:
        path: the file. An existing one is replaced.
        mode: of the new file, less the umask.
        durable: whether the bytes are on the disk before the file gets its name. If they are not,
            the file may be damaged after the machine has lost its power.

    Raises:
        OSError: the file cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(temporary, flags, mode)
    except OSError as error:
        error.filename = os.fspath(path)  # the user knows no temporary file
        raise
    file = open(descriptor, "wb")
    try:
        with file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def replace_file(path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """Opens a file of a user to be written anew; see `replacing`. Also removes what killed processes
    have left in the folder."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY) and is_stale(entry.stat().st_mtime):
                remove(Path(entry.path))
    return replacing(path, durable=True)


def is_stale(modified: float) -> bool:
    """Whether nobody writes a temporary file any more that was modified then."""
    return time.time() - modified > STALE_S


def remove(path: Path) -> bool:
    """Removes a file; False if that is not possible."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def kind_of(mode: int) -> str:
    """What a file is that is no regular one, by `st_mode`: "a pipe"."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> BinaryIO:
    """Opens a regular file for reading. Never waits, as a pipe would have it.

    Args:
        flags: of `os.open`, besides those for reading.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    flags |= os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    file = open(os.open(path, flags), "rb")
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        why = f"this is {kind_of(mode)}, and no regular file"
        raise OSError(errno.EINVAL, why, os.fspath(path))
    return file


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or has more bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            why = f"it has {size} bytes, and at most {most} are read"
            raise OSError(errno.EFBIG, why, os.fspath(path))
        return file.read(size)


def others_may_write(path: str | os.PathLike[str]) -> str:
    """Why another user may write a file, or into a folder: "" if only this user and root may, or if
    the system does not tell.

    Raises:
        OSError: it is not there.
    """
    status = os.stat(path)
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "everybody" if status.st_mode & stat.S_IWOTH else f"group {status.st_gid}"
        return f"{who} may write it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def make_private(folder: str | os.PathLike[str]) -> None:
    """Makes a folder, and those above it, for this user alone, whatever the umask. One that is there
    stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    parent = os.path.dirname(os.fspath(folder))
    if parent and not os.path.isdir(parent):
        make_private(parent)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise

"""Paths that users name, and files that are opened for reading without waiting."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from purevk.errors import InputError

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


def path_text(path: str | os.PathLike[str]) -> str:
    """The text of a path that the user names.

    Raises:
        InputError: no file can have this path.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    why = ""
    if not isinstance(text, str):
        why = f"it is {type(text).__name__}; str or pathlib.Path is expected"
    elif "\0" in text:
        why = "it has a NUL character"
    else:
        try:
            os.fsencode(text)
        except UnicodeEncodeError as error:
            why = f"it has characters that names of files cannot have: {error.reason}"
    if why:
        raise InputError(
            "this is no path of a file",
            where=repr(path)[:200],
            why=why,
            next="os.fsdecode makes a text of a path in bytes" if isinstance(text, bytes) else "",
        )
    return text


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> BinaryIO:
    """Opens a regular file for reading. Never waits, as a pipe would have it.

    Args:
        flags: of `os.open`, besides those for reading.

    Raises:
        InputError: as for `path_text`.
        OSError: it cannot be opened, or is no regular file.
    """
    text = path_text(path)
    flags |= os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(text, flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), text)
    raise OSError(errno.EINVAL, f"this is {kind_of(mode)}, and no regular file", text)


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or has more bytes.
    """
    with open_regular(path) as file:
        return read_open(file, most, path)


def read_open(file: BinaryIO, most: int, path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file of `open_regular`, with at most `most` bytes. Raises OSError if it has more."""
    size = os.fstat(file.fileno()).st_size
    if size > most:
        why = f"it has {size} bytes, and at most {most} are read"
        raise OSError(errno.EFBIG, why, os.fspath(path))
    return file.read(size)


def others_may_write(path: str | os.PathLike[str] | int) -> str:
    """Why another user may write a file, or into a folder, of a path or a descriptor: "" if only this
    user and root may, or if the system does not tell.

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

"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
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

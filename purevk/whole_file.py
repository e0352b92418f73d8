"""Files that are written whole or not at all, and folders of this user's own.

All that purevk writes goes through here."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from purevk.errors import OutputError
from purevk.paths import others_may_write, path_text

TEMPORARY = ".purevk-"
"""How the names of temporary files begin."""
STALE_S = 600.0
"""Seconds after which nobody writes a temporary file any more: a killed process has left it."""


WAIT_S = 10.0
"""Seconds after which nobody reads from a pipe."""
_IN_MEMORY = 1 << 26  # bytes that are collected in memory for what is no regular file
_MOST_LINKS = 40
_HAS_DIR_FD = {os.open, os.rename, os.unlink, os.readlink} <= os.supports_dir_fd
_Result = TypeVar("_Result")


class _Folder(NamedTuple):
    """A folder by its descriptor, so that all is done in it, wherever its path leads meanwhile. Without
    one, as on Windows, where only administrators make links, by its path: "" is the current folder."""

    path: str
    descriptor: int | None = None

    def call(self, function: Callable[..., _Result], name: str, *args: Any) -> _Result:
        """Calls a function of `os` for a name in this folder."""
        path = os.path.join(self.path, name)
        try:
            if self.descriptor is None:
                return function(path, *args)
            return function(name, *args, dir_fd=self.descriptor)
        except OSError as error:
            error.filename = path
            raise

    def remove(self, name: str) -> None:
        """Removes a file, if that is possible."""
        with contextlib.suppress(OSError):
            self.call(os.unlink, name)

    def shared(self) -> str:
        """Why others may write here, as `others_may_write`."""
        return others_may_write((self.path or ".") if self.descriptor is None else self.descriptor)


class _Target(NamedTuple):
    """A file that is written. Its status is None if it is not there."""

    folder: _Folder
    name: str
    status: os.stat_result | None

    @property
    def path(self) -> Path:
        return Path(self.folder.path, self.name)

    def rename(self, temporary: str) -> None:
        """Gives a file of the folder this name."""
        here = self.folder.descriptor
        if here is None:
            os.replace(self.path.with_name(temporary), self.path)
        else:
            os.replace(temporary, self.name, src_dir_fd=here, dst_dir_fd=here)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path`, which gets its name at the end, whatever has it now. After
    an error, `path` is as it was. For files in folders of purevk's own; see `replace_file`.

    Args:
        path: the file. An existing one is replaced.
        mode: of the new file, less the umask.

    Raises:
        OSError: the file cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    target = _Target(_Folder(os.fspath(path.parent)), path.name, None)
    with _renamed(_temporary(target, mode), target, durable=False) as file:
        yield file


def _temporary(target: _Target, mode: int) -> tuple[int, str]:
    """A new file beside the target: its descriptor and its name."""
    name = f"{TEMPORARY}{uuid.uuid4().hex}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        return target.folder.call(os.open, name, flags, mode), name
    except OSError as error:
        error.filename = os.fspath(target.path)  # the user knows no temporary file
        raise


@contextlib.contextmanager
def _renamed(made: tuple[int, str], target: _Target, durable: bool) -> Iterator[BinaryIO]:
    """Opens the temporary file of `_temporary`, which replaces the target at the end.

    Args:
        durable: whether the bytes are on the disk before the file gets its name. If they are not,
            the file may be damaged after the machine has lost its power.
    """
    descriptor, temporary = made
    file = open(descriptor, "wb")
    try:
        with file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        target.rename(temporary)
    except BaseException:
        target.folder.remove(temporary)
        raise


@contextlib.contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file that the user names to be written anew.

    - A regular file is written whole or not at all. It keeps its mode and owner. If this user may not
      give a new file this owner, or may not write the folder, the old file is written in place.
    - Of a link, the target is written, and the link stays.
    - To a device or a pipe, the bytes are written at the end, as `cat >` would.

    Also removes what killed processes have left in the folder.

    Raises:
        OutputError: a socket, a link to nothing, a link in a folder that others may write, or a pipe
            from which nobody reads for `WAIT_S` seconds.
        OSError: it is a folder, or cannot be written.
    """
    with _opened(path) as target:
        if target.status is not None and not stat.S_ISREG(target.status.st_mode):
            with _poured(_open_stream(target), target) as stream:
                yield stream
            return
        _remove_stale(target.folder)
        made = _like(target)
        with (
            _renamed(made, target, durable=True)
            if made is not None
            else _poured(_open_in_place(target), target, in_place=True)
        ) as stream:
            yield stream


def output_target(path: str | os.PathLike[str]) -> tuple[Path, os.stat_result | None]:
    """What is written for a path of the user: the file at the end of all links in it, and its status;
    None if it is not there yet. What a process has open, such as /dev/stdout, is a device or a pipe.

    Raises:
        OutputError: as for `replace_file`.
        OSError: it is a folder, or a folder of it is not there.
    """
    with _opened(path) as target:
        return target.path, target.status


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[_Target]:
    """The target of `output_target`, with its folder, which is open meanwhile."""
    with contextlib.ExitStack() as stack:
        text = path_text(path)
        try:
            target = _followed(text, stack)
        except OutputError:
            raise
        except OSError as error:
            error.filename = text  # what the user knows
            raise
        if target.status is not None and stat.S_ISSOCK(target.status.st_mode):
            raise OutputError(
                "this is a socket, and no file",
                where=os.fspath(path),
                why="a file, a device or a pipe can be written",
                next="name a file",
            )
        yield target


def _followed(path: str, stack: contextlib.ExitStack) -> _Target:
    """Follows all links in a path: each folder is opened in the one above it. `stack` closes them."""
    is_folder = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not _HAS_DIR_FD:
        folder, name = os.path.split(path)
        if name in ("", ".", "..") or os.path.isdir(path):
            raise is_folder
        return _Target(_Folder(folder), name, os.stat(path) if os.path.exists(path) else None)
    folders = [_enter(_Folder(""), "/" if path.startswith("/") else ".", stack)]
    names, links, dangling = _names(path), 0, False
    while names:
        name, here = names.pop(), folders[-1]
        if name == ".":
            continue
        if name == ".." and len(folders) > 1:
            folders.pop()
            continue
        try:
            status = here.call(os.lstat, name)
        except FileNotFoundError:
            if names == ["."]:
                raise is_folder from None
            if names:
                raise
            if dangling:
                raise OutputError(
                    "this is a link to a file that is not there",
                    where=path,
                    why=f"there is no {os.path.join(here.path, name)}",
                    next="remove the link, or make its target",
                ) from None
            return _Target(here, name, None)
        if not stat.S_ISLNK(status.st_mode):
            if not names and not stat.S_ISDIR(status.st_mode):
                return _Target(here, name, status)
            folders.append(_enter(here, name, stack))
            continue
        if not names and here.path.startswith("/proc/"):  # its name may lead to nothing
            return _Target(here, name, _as_stream(here.call(os.stat, name)))
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if why := here.shared():
            raise OutputError(
                "this is a link in a folder that other users may write",
                where=path,
                why=f"the link is {os.path.join(here.path, name)}, and of its folder: {why}; any file of"
                " yours could be written through it",
                next=f"name the file itself: {os.path.realpath(path)}",
            )
        dangling = dangling or not names
        target = here.call(os.readlink, name)
        names += _names(target)
        if target.startswith("/"):
            folders = [_enter(_Folder(""), "/", stack)]
    raise is_folder


def _enter(here: _Folder, name: str, stack: contextlib.ExitStack) -> _Folder:
    """Opens a folder in a folder. It is no link."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)
    descriptor = here.call(os.open, name, flags)
    stack.callback(os.close, descriptor)
    return _Folder(os.path.join(here.path, "" if name == "." else name), descriptor)


def _names(path: str) -> list[str]:
    """The names in a path, the last one first. "." stands for a slash at the end."""
    *above, last = path.split("/")
    return [last or ".", *(name for name in above[::-1] if name not in ("", "."))]


def _as_stream(status: os.stat_result) -> os.stat_result:
    """The status of what a process has open. A file is not replaced there: others write it too."""
    if not stat.S_ISREG(status.st_mode):
        return status
    return os.stat_result((stat.S_IFCHR | stat.S_IMODE(status.st_mode), *status[1:]))


def _like(target: _Target) -> tuple[int, str] | None:
    """A temporary file with the mode and owner of the file that it shall replace; None if there can be
    none."""
    status = target.status
    try:
        made = _temporary(target, 0o666 if status is None else stat.S_IMODE(status.st_mode) & 0o777)
    except PermissionError:
        if status is None:
            raise
        return None
    if status is None or not hasattr(os, "fchown"):
        return made
    descriptor, temporary = made
    try:
        own = os.fstat(descriptor)
        if (own.st_uid, own.st_gid) != (status.st_uid, status.st_gid):
            os.fchown(descriptor, status.st_uid, status.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & 0o777)
    except BaseException as error:
        os.close(descriptor)
        target.folder.remove(temporary)
        if isinstance(error, PermissionError):
            return None
        raise
    return made


def _open_in_place(target: _Target) -> int:
    """Opens an existing file for writing, if it is still the one of the status."""
    flags = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = target.folder.call(os.open, target.name, flags | getattr(os, "O_BINARY", 0))
    now = _check_same(descriptor, target)
    if now.st_nlink > 1 and (why := target.folder.shared()):
        os.close(descriptor)
        raise OutputError(
            "this file has other names too, and its folder can be written by other users",
            where=os.fspath(target.path),
            why=f"{why}; any file of yours could be written through it",
            next="name another file",
        )
    return descriptor


def _check_same(descriptor: int, target: _Target) -> os.stat_result:
    """The status of an open file. Closes it and raises OSError if it is not the target: who may
    write the folder has put another in its place."""
    now, status = os.fstat(descriptor), target.status
    if status is None or (now.st_dev, now.st_ino) != (status.st_dev, status.st_ino):
        os.close(descriptor)
        raise OSError(errno.ESTALE, "the file was replaced meanwhile", os.fspath(target.path))
    return now


def _open_stream(target: _Target) -> int:
    """Opens a device or a pipe, if it is still the one of the status. Waits for the reader of a pipe.
    What this process has open is written from where it is."""
    own = re.fullmatch(rf"/proc/{os.getpid()}/fd/([0-9]+)", os.fspath(target.path))
    if own:
        return os.dup(int(own[1]))
    flags = os.O_WRONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    pipe = target.status is not None and stat.S_ISFIFO(target.status.st_mode)
    end = time.monotonic() + WAIT_S
    while True:
        try:
            descriptor = target.folder.call(
                os.open, target.name, flags | getattr(os, "O_BINARY", 0)
            )
            break
        except OSError as error:
            if error.errno != errno.ENXIO or not pipe:
                raise
            if time.monotonic() > end:
                raise _not_read(target) from None
        time.sleep(0.02)
    _check_same(descriptor, target)
    return descriptor


def _not_read(target: _Target) -> OutputError:
    return OutputError(
        "nobody reads from this pipe",
        where=os.fspath(target.path),
        why=f"it was waited for {WAIT_S:g} s",
        next="start the reader first, or name a file",
    )


@contextlib.contextmanager
def _poured(descriptor: int, target: _Target, in_place: bool = False) -> Iterator[BinaryIO]:
    """Collects bytes, and writes them to an open file at the end."""
    import tempfile  # only for what is no regular file

    try:
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as stream:
            yield cast(BinaryIO, stream)
            if in_place:
                os.ftruncate(descriptor, 0)
            stream.seek(0)
            while piece := stream.read(1 << 16):
                _write_all(descriptor, piece, target)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes, target: _Target) -> None:
    """Writes bytes to a file that does not block."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            waiter = select.poll()
            waiter.register(descriptor, select.POLLOUT)
            if not waiter.poll(WAIT_S * 1000):
                raise _not_read(target) from None


def _remove_stale(folder: _Folder) -> None:
    """Removes what killed processes have left in a folder."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        place: int | str = folder.path or "."
        if folder.descriptor is not None:  # for names only: it cannot be read
            place = folder.call(os.open, ".", os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, place)
        for entry in stack.enter_context(os.scandir(place)):
            if entry.name.startswith(TEMPORARY) and is_stale(entry.stat().st_mtime):
                folder.remove(entry.name)


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


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder for temporary files, which goes at the end.

    Raises:
        OutputError: there is no place for one.
    """
    import tempfile

    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as error:
        raise OutputError(
            "there is no folder for temporary files",
            why=str(error),
            next="name one that this user may write: TMPDIR",
        ) from None
    with folder as path:
        yield Path(path)


def make_private(folder: str | os.PathLike[str]) -> None:
    """Makes a folder, and those above it, for this user alone, whatever the umask. One that is there
    stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    path = Path(folder)
    missing = [parent for parent in reversed(path.parents) if not os.path.exists(parent)]
    for each in (*missing, path):
        each.mkdir(0o700, exist_ok=True)

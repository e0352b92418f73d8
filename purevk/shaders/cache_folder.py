"""Entries of the cache as files of a folder, which several processes may share."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import stat
import threading
import time
from pathlib import Path
from typing import Any

from purevk import knobs
from purevk.errors import PurevkError
from purevk.knobs import DRIVER_FOLDER, warn
from purevk.paths import open_regular, others_may_write
from purevk.shaders.cache_entry import MOST_BYTES, SUFFIX, unpack
from purevk.whole_file import TEMPORARY, is_stale, make_private, remove, replacing

_log = logging.getLogger("purevk.cache")
_KINDS = ("spirv", "pipeline", "tuning", "plan")
# Saved programs have the same suffix, and may be in a folder of such a name.
_ENTRY = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))
_OF_MESA = "mesa_shader_cache"  # how the names of its folders begin


class EntryFolder:
    """Files of entries: `KIND/DI/DIGEST`. They are written to a temporary file and renamed, never
    changed.

    Args:
        folder: where; made when first needed. None: there are no files.
        max_bytes: size bound.

    Attributes:
        writable: False once writing has failed.
        problem: why it has failed.
        damaged, evicted: counts of entries that were unusable, or went to keep the size bound.

    Raises:
        PurevkError: others may write the folder.
    """

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        if folder is not None:
            _refuse_shared(folder)
        self.folder, self.max_bytes = folder, max_bytes
        self.writable, self.problem = folder is not None, ""
        self.damaged = self.evicted = 0
        self._lock = threading.RLock()
        self._disk_bytes: int | None = None

    def _path(self, kind: str, digest: str) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / kind / digest[:2] / f"{digest}{SUFFIX}"

    def read(
        self, kind: str, digest: str, count: bool = True
    ) -> tuple[dict[str, Any], bytes] | None:
        """An entry and what is known of it; None if it is not there. A damaged one is removed, unless
        `count` is False."""
        path = self._path(kind, digest)
        if path is None:
            return None
        try:
            data = _read_file(path)
        except OSError:
            return None
        if data is None:
            _log.info("%s is no entry of this user: it is not read", path)
            return None
        entry = unpack(digest, data)
        if entry is None:
            if count:
                self.drop_damaged(kind, digest)
            return None
        try:
            # The time of last use, for the eviction; once an hour is exact enough.
            if time.time() - path.stat().st_mtime > 3600:
                os.utime(path)
        except OSError:
            _log.debug("cannot note the use of %s", path)
        return entry

    def read_raw(self, path: Path) -> bytes | None:
        """The bytes of a file of `files`, unchecked. None: it is gone, or is not read because others
        could have written it."""
        try:
            return _read_file(path)
        except OSError:
            return None

    def remove_entry(self, kind: str, digest: str) -> bool:
        """Removes an entry; whether it was there."""
        path = self._path(kind, digest)
        with self._lock:
            self._disk_bytes = None
        return path is not None and remove(path)

    def drop_damaged(self, kind: str, digest: str) -> None:
        """Counts an entry that cannot be used, and removes it."""
        path = self._path(kind, digest)
        with self._lock:
            self.damaged += 1
        if path is not None and remove(path):
            _log.info("removed the damaged entry %s", path)

    def write(self, kind: str, digest: str, data: bytes) -> None:
        """Writes an entry, and removes others if the folder is too large then. A folder that cannot
        be written is not tried again."""
        path = self._path(kind, digest)
        if path is None or not self.writable or len(data) > self.max_bytes:
            return
        try:
            # Another process may clear the folder between the two steps: one more try makes it
            # again.
            try:
                _write_file(path, data)
            except FileNotFoundError:
                _write_file(path, data)
        except OSError as error:
            # os.path: where the user may not look into a folder, pathlib raises.
            if os.name == "nt" and isinstance(error, PermissionError) and os.path.isfile(path):
                return  # another process has the same entry open
            with self._lock:
                if not self.writable:
                    return
                self.writable, self.problem = False, str(error)
            warn(
                f"purevk cannot write its cache and keeps it in memory only: {error} (PUREVK_CACHE names another"
                " folder; PUREVK_CACHE=0 uses none)"
            )
            return
        with self._lock:
            if self._disk_bytes is not None:
                self._disk_bytes += len(data)
            if self._disk_bytes is not None and self._disk_bytes <= self.max_bytes:
                return
            self._evict()

    def _evict(self) -> None:
        """Removes temporary files that a killed process left, and the least recently used entries
        over the bound."""
        files = sorted(self.files(temporary=True), key=lambda file: file[1])
        total = sum(file[2] for file in files)
        goal = self.max_bytes * 9 // 10 if total > self.max_bytes else total
        for path, used, size in files:
            if path.suffix != SUFFIX:
                if is_stale(used) and remove(path):
                    total -= size
            elif total > goal and remove(path):
                total -= size
                self.evicted += 1
        self._disk_bytes = total

    def files(self, temporary: bool = False) -> list[tuple[Path, float, int]]:
        """(path, time of last use in seconds, bytes) of every entry, and of temporary files if
        asked for."""
        found: list[tuple[Path, float, int]] = []
        for root in [self.folder / kind for kind in _KINDS] if self.folder is not None else ():
            for folder, _, names in os.walk(root):
                for name in names:
                    unfinished = temporary and name.startswith(TEMPORARY)
                    if not (unfinished or _ENTRY.fullmatch(name)):
                        continue
                    path = Path(folder) / name
                    try:
                        status = path.stat()
                    except OSError:
                        continue  # another process removed it
                    found.append((path, status.st_mtime, status.st_size))
        return found

    def driver_files(self) -> list[tuple[Path, int]]:
        """(path, bytes) of what Mesa's drivers keep in the folder."""
        found: list[tuple[Path, int]] = []
        if self.folder is None:
            return found
        root = str(self.folder / DRIVER_FOLDER)
        for folder, folders, names in os.walk(root):
            if folder == root:
                folders[:] = [name for name in folders if name.startswith(_OF_MESA)]
                continue
            for path in (Path(folder) / name for name in names):
                with contextlib.suppress(OSError):  # the driver removed it
                    found.append((path, path.lstat().st_size))
        return found

    def driver_bytes(self) -> int:
        """Bytes of these files."""
        return sum(size for _, size in self.driver_files())

    def clear(self) -> int:
        """Removes every entry, also of other format versions, temporary files, and what Mesa's
        drivers keep. Gives back how many files went."""
        with self._lock:
            self._disk_bytes = None
        removed = sum(remove(file[0]) for file in self.files(temporary=True))
        return removed + sum(remove(path) for path, _ in self.driver_files())


def _refuse_shared(folder: Path) -> None:
    """Raises `PurevkError` for a folder that others may write: drivers run what is in it."""
    try:
        why = others_may_write(folder)
    except OSError:  # not there yet, or nothing can be read
        return
    if why and folder.is_dir():
        raise PurevkError(
            "other users may write the cache folder",
            where=str(folder),
            why=f"{why}; the device and its driver run what is in it",
            next=f"name a folder of this user's own ({knobs.CACHE.name}), or use none"
            f" ({knobs.CACHE.name}=0). If you trust what is in it, make it your own: chown, and chmod"
            f" go-w {shlex.quote(str(folder))}",
        )


def _read_file(path: Path) -> bytes | None:
    """The bytes of an entry. None if it is no regular file, is too large for an entry, or if others
    could have written it: the driver runs what is in it."""
    with open_regular(path, getattr(os, "O_NOFOLLOW", 0)) as file:
        status = os.fstat(file.fileno())
        if hasattr(os, "geteuid"):
            own = status.st_uid in (os.geteuid(), 0)
            if not own or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
        return file.read(status.st_size) if status.st_size <= MOST_BYTES else None


def _write_file(path: Path, data: bytes) -> None:
    make_private(path.parent)
    with replacing(path, mode=0o600) as file:  # a checksum tells a damaged entry
        file.write(data)

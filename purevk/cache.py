"""What purevk keeps on disk: SPIR-V, the drivers' pipeline caches, tuning results, plans of lowered
methods; and bundles of SPIR-V in one file.

A key is computed in Python from the sources and settings, so a warm start never loads the compiler.
Nothing here fails because of the disk: a damaged entry is a miss, and a folder that cannot be
written leaves the cache in memory.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from purevk import knobs
from purevk.errors import PurevkError
from purevk.paths import path_text
from purevk.plain_text import printable
from purevk.shaders.bundle import Bundle, WrittenBundle, write_bundle
from purevk.shaders.cache_check import (
    EntryInfo,
    FolderDifference,
    compare_folders,
    entry_problem,
    list_entries,
)
from purevk.shaders.cache_entry import (
    CacheKey,
    is_spirv,
    key_from,
    pack,
    pipeline_header_fits,
)
from purevk.shaders.cache_folder import EntryFolder
from purevk.shaders.source import text_hash

__all__ = [
    "Cache",
    "CacheKey",
    "CacheStats",
    "default_cache",
]

_log = logging.getLogger("purevk")

_MEMORY_BYTES = 64 << 20


def _packed_tuning(device_key: str, name: str, payload: bytes) -> tuple[str, bytes]:
    """The digest of a tuning result, and its entry."""
    digest = text_hash(json.dumps([device_key, name]))
    return digest, pack(digest, payload, {"device": device_key, "name": name})


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds (`entries`, `bytes`, on disk) and what this process asked of it.

    `hits` counts entries found (`memory_hits` of them in memory), `misses` those not found,
    `damaged` those that were there and unusable, `evicted` those removed to keep within the size
    bound.
    """

    folder: str
    entries: int
    bytes: int
    hits: int
    memory_hits: int
    misses: int
    damaged: int
    evicted: int


class Cache:
    """A cache folder with a layer in memory over it. All methods may be called from several
    threads.

    Several processes may share a folder: entries are written to a temporary file and renamed, never
    changed.

    Args:
        folder: where; made when first needed. None keeps everything in memory.
        max_bytes: size bound on disk; None: `max_bytes` of PUREVK_CACHE.

    Raises:
        PurevkError: other users may write the folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, max_bytes: int | None = None) -> None:
        self.folder = None if folder is None else Path(path_text(folder)).expanduser()
        self.max_bytes = knobs.CACHE().max_bytes if max_bytes is None else max_bytes
        self._lock = threading.RLock()
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._memory_bytes = 0
        self._other: dict[str, bytes] = {}
        self._bundles: list[Bundle] = []
        self._dropped: set[str] = set()  # not to be read from bundles
        self._entries = EntryFolder(self.folder, self.max_bytes)
        self._counts = dict.fromkeys(("hits", "memory_hits", "misses"), 0)

    def __repr__(self) -> str:
        return printable(f"<Cache {self.folder or 'in memory'}>")

    @property
    def persistent(self) -> bool:
        """Whether the cache keeps entries on disk: it has a folder, and no writing has failed."""
        return self._entries.writable

    @property
    def problem(self) -> str:
        """Why writing to the folder has failed, or ""."""
        return self._entries.problem

    # -- SPIR-V

    def get_spirv(self, key: CacheKey) -> bytes | None:
        """The SPIR-V of a key, from memory, a bundle or the disk; None if it is in none of them."""
        digest = key.digest()
        with self._lock:
            content = self._memory.get(digest)
            if content is not None:
                self._memory.move_to_end(digest)
                self._counts["hits"] += 1
                self._counts["memory_hits"] += 1
                return content
            bundles = [] if digest in self._dropped else list(self._bundles)
        for bundle in bundles:
            entry = bundle.read(digest)
            if entry is not None:
                break
        else:
            entry = self._entries.read("spirv", digest)
        if entry is not None and not is_spirv(entry[1]):
            self._entries.drop_damaged("spirv", digest)
            entry = None
        with self._lock:
            self._counts["misses" if entry is None else "hits"] += 1
            if entry is not None:
                self._remember(digest, entry[1])
        return None if entry is None else entry[1]

    def put_spirv(self, key: CacheKey, spirv: bytes, meta: Mapping[str, Any] | None = None) -> None:
        """Keeps the SPIR-V of a key. `meta` (plain JSON values) says where it came from, such as
        the compiler."""
        if not is_spirv(spirv):
            raise PurevkError(
                f"{len(spirv)} bytes that are no SPIR-V were to be cached", where=key.template
            )
        digest = key.digest()
        with self._lock:
            self._remember(digest, spirv)
        self._entries.write(
            "spirv", digest, pack(digest, spirv, {"key": asdict(key), **(meta or {})})
        )

    def drop_spirv(self, key: CacheKey) -> None:
        """Forgets the SPIR-V of a key, which a driver has refused."""
        digest = key.digest()
        with self._lock:
            self._dropped.add(digest)
            self._memory_bytes -= len(self._memory.pop(digest, b""))
        self._entries.drop_damaged("spirv", digest)

    def on_disk(self, key: CacheKey) -> bool:
        """Whether another process finds the SPIR-V of a key in the folder."""
        return self._entries.read("spirv", key.digest(), count=False) is not None

    def explain_miss(self, key: CacheKey) -> str:
        """Why a key is not on disk: how it differs from the entry nearest to it of the same
        template."""
        differences = [
            key.explain(stored) for stored in self._stored_keys() if stored.template == key.template
        ]
        if not differences:
            return f"no entry of {key.template} is in the cache"
        return (
            min(differences, key=lambda text: text.count("\n") if text else -1)
            or "it is in the cache"
        )

    # -- pipeline caches of drivers, and tuning results

    def get_pipeline_cache(
        self,
        device_key: str,
        *,
        vendor: int | None = None,
        device: int | None = None,
        pipeline_uuid: bytes | None = None,
    ) -> bytes | None:
        """The driver's pipeline cache kept for a device, if its header is sound.

        Args:
            device_key: names device and driver version; anything that changes when they do.
            vendor, device, pipeline_uuid: `vendorID`, `deviceID` and `pipelineCacheUUID` of the
                device's properties; where given, data made by another device or driver is left out.
        """
        entry = self._entries.read("pipeline", text_hash(device_key))
        if entry is None or not pipeline_header_fits(entry[1], vendor, device, pipeline_uuid):
            return None
        return entry[1]

    def put_pipeline_cache(self, device_key: str, data: bytes) -> None:
        """Keeps what `vkGetPipelineCacheData` gave. Data with no valid header is left out."""
        if not pipeline_header_fits(data, None, None, None):
            return
        digest = text_hash(device_key)
        self._entries.write("pipeline", digest, pack(digest, data, {"device": device_key}))

    def get_tuning(self, device_key: str, name: str) -> Any:
        """The tuning result kept under a name for a device (JSON values), or None. That of a bundle
        goes first: its SPIR-V was made with it."""
        digest = text_hash(json.dumps([device_key, name]))
        with self._lock:
            content, bundles = self._other.get(digest), list(self._bundles)
        for bundle in bundles:
            entry = bundle.read(digest, "tuning")
            if entry is not None and not entry_problem("tuning", digest, *entry):
                return json.loads(entry[1])
        if content is None:
            entry = self._entries.read("tuning", digest)
            if entry is None:
                return None
            content = entry[1]
            with self._lock:
                self._other[digest] = content
        try:
            return json.loads(content)
        except ValueError:
            with self._lock:
                self._other.pop(digest, None)
            self._entries.drop_damaged("tuning", digest)
            return None

    def put_tuning(self, device_key: str, name: str, value: Any) -> None:
        """Keeps a tuning result. Raises PurevkError for a value that JSON cannot hold."""
        try:
            payload = json.dumps(value, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise PurevkError(
                f"the tuning result {name!r} cannot be kept", why=str(error)
            ) from None
        digest, packed = _packed_tuning(device_key, name, payload)
        with self._lock:
            self._other[digest] = payload
        self._entries.write("tuning", digest, packed)

    # -- plans of lowered methods

    def get_plan(self, key: str) -> bytes | None:
        """The plan of a key, as `put_plan` was given it; None if there is none."""
        entry = self._entries.read("plan", text_hash(key))
        return None if entry is None else entry[1]

    def put_plan(self, key: str, payload: bytes, device_key: str, name: str) -> None:
        """Writes a plan. `key` has all that it depends on; the rest is for lists."""
        digest = text_hash(key)
        meta = {"key": key, "device": device_key, "name": name}
        self._entries.write("plan", digest, pack(digest, payload, meta))

    def drop_plan(self, key: str) -> None:
        """Forgets a plan that cannot be read."""
        self._entries.drop_damaged("plan", text_hash(key))

    # -- bundles

    def export_bundle(
        self,
        path: str | os.PathLike[str],
        keys: Iterable[CacheKey],
        tuning: Iterable[tuple[str, str]] = (),
    ) -> WrittenBundle:
        """Writes the SPIR-V of the keys into one file, for a machine without a compiler, and its
        SHA-256 into `PATH.sha256`.

        Args:
            tuning: device keys and names of tuning results that belong to the SPIR-V. Those that
                are not there are left out.

        Raises:
            PurevkError: a key is in the cache no more, or the file cannot be written.
        """
        entries: dict[tuple[str, str], bytes] = {}
        missing = []
        for key in keys:
            digest = key.digest()
            spirv = self.get_spirv(key)
            if spirv is None:
                missing.append(key.template)
            else:
                stored = self._entries.read("spirv", digest, count=False)
                meta = stored[0] if stored is not None else {"key": asdict(key)}
                entries["spirv", digest] = pack(
                    digest, spirv, {k: v for k, v in meta.items() if k != "digest"}
                )
        if missing:
            raise PurevkError(
                f"{len(missing)} shaders are not in the cache",
                where=", ".join(sorted(set(missing))),
                next="load the model on this machine first, which compiles them",
            )
        for device_key, name in tuning:
            value = self.get_tuning(device_key, name)
            if value is not None:
                digest, packed = _packed_tuning(device_key, name, json.dumps(value).encode())
                entries["tuning", digest] = packed
        return write_bundle(path, entries)

    def attach_bundle(
        self, path: str | os.PathLike[str], *, sha256: str | None = None, trust: bool = False
    ) -> int:
        """Looks into a bundle, from now on, before the disk; copies nothing. Gives back how many
        entries it has. A damaged one is a miss.

        Args and errors are those of `import_bundle`.
        """
        bundle = Bundle(path, sha256, trust)
        with self._lock:
            self._bundles.append(bundle)
        return len(bundle.digests)

    def import_bundle(
        self, path: str | os.PathLike[str], *, sha256: str | None = None, trust: bool = False
    ) -> int:
        """Copies the entries of a bundle into the cache: all of them, or none if one is damaged.
        Gives back how many.

        A bundle is code: its shaders can read and write any memory of the process. So the caller
        says which file it is, or that it is to be trusted.

        Args:
            path: the file.
            sha256: the SHA-256 of the file, as `export_bundle` gives it: 64 hexadecimal digits.
            trust: take the file without a SHA-256.

        Raises:
            InputError: there is neither `sha256` nor `trust`, or the file cannot be opened.
            FileFormatError: the file has another SHA-256, is no bundle, of another format version,
                or has a damaged entry.
        """
        bundle = Bundle(path, sha256, trust)
        bundle.check()
        for kind, digest, meta, content in bundle.all_entries():
            if kind == "tuning":
                self._add_tuning(meta, content)
                continue
            with self._lock:
                self._remember(digest, content)
            self._entries.write(kind, digest, pack(digest, content, meta))
        return len(bundle.entries)

    def _add_tuning(self, meta: Mapping[str, Any], payload: bytes) -> None:
        """Keeps a tuning result of a bundle, with what is known under its name."""
        device_key, name, value = meta["device"], meta["name"], json.loads(payload)
        known = self.get_tuning(device_key, name)
        if isinstance(known, dict) and isinstance(value, dict):
            value = {**known, **value}
        self.put_tuning(device_key, name, value)

    # -- the whole

    def entries(self) -> list[EntryInfo]:
        """The entries on disk, each verified, the last used one first."""
        return list_entries(self._entries)

    def difference(self, other: Cache) -> FolderDifference:
        """How the entries on disk differ from those of another cache."""
        return compare_folders(self._entries, other._entries)

    def remove(self, entries: Iterable[EntryInfo]) -> int:
        """Removes entries from disk. Gives back how many went."""
        return sum(self._entries.remove_entry(entry.kind, entry.digest) for entry in entries)

    def export_entries(
        self, path: str | os.PathLike[str], entries: Iterable[EntryInfo] | None = None
    ) -> WrittenBundle:
        """Writes all sound SPIR-V and tuning results into a bundle, and its SHA-256 into
        `PATH.sha256`. Pipeline caches and plans stay: nobody can verify them.

        Args:
            entries: those of `entries()`, if the caller has them.

        Raises:
            PurevkError: the file cannot be written.
        """
        packed = {
            (entry.kind, entry.digest): data
            for entry in (self.entries() if entries is None else entries)
            if not entry.problem and entry.kind in ("spirv", "tuning")
            if (data := self._entries.read_raw(entry.path)) is not None
        }
        return write_bundle(path, packed)

    def stats(self) -> CacheStats:
        """Entries and bytes on disk, and the counts of this process."""
        files = self._entries.files()
        with self._lock:
            return CacheStats(
                str(self.folder) if self.folder is not None else "",
                len(files),
                sum(f[2] for f in files),
                **self._counts,
                damaged=self._entries.damaged,
                evicted=self._entries.evicted,
            )

    def driver_bytes(self) -> int:
        """Bytes of what Mesa's drivers keep in the folder."""
        return self._entries.driver_bytes()

    def clear(self) -> int:
        """Removes every entry, also of other format versions, and forgets memory. Gives back how
        many files went."""
        with self._lock:
            self._memory.clear()
            self._memory_bytes = 0
            self._other.clear()
        return self._entries.clear()

    def _stored_keys(self) -> list[CacheKey]:
        keys = []
        for path, _, _ in self._entries.files():
            entry = (
                self._entries.read("spirv", path.stem, count=False)
                if path.parent.parent.name == "spirv"
                else None
            )
            key = key_from(entry[0].get("key")) if entry is not None else None
            if key is not None:
                keys.append(key)
        return keys

    def _remember(self, digest: str, spirv: bytes) -> None:
        self._memory_bytes += len(spirv) - len(self._memory.pop(digest, b""))
        self._memory[digest] = spirv
        while (
            self._memory_bytes > _MEMORY_BYTES and self._entries.writable and len(self._memory) > 1
        ):
            self._memory_bytes -= len(self._memory.popitem(last=False)[1])


_caches: dict[tuple[str, int], Cache] = {}
_caches_lock = threading.Lock()


def default_cache() -> Cache:
    """The cache in the folder of `PUREVK_CACHE`, or else in the user's cache folder; one object a folder and
    process.

    With `PUREVK_CACHE=0`, or for a user without a home folder, it is one in memory only.
    """
    folder = knobs.cache_folder()
    with _caches_lock:
        key = (folder, knobs.CACHE().max_bytes)
        if key not in _caches:
            _caches[key] = Cache(folder or None)
        return _caches[key]

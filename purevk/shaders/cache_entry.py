"""What stands in the cache: keys made of named fields, entries with a checksum, and bundles of
entries in one file."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import struct
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from purevk.errors import FileFormatError, InputError, PurevkError
from purevk.shaders.source import CompileJob, source_files, text_hash
from purevk.whole_file import replace_file

FORMAT = 1
"""Version of the cache's format and of how keys are made. Entries of another version are not found."""

_log = logging.getLogger("purevk.cache")
_MAGIC = b"PVKC"
_HEADER = struct.Struct(
    "<4sI32sIQ"
)  # magic, format, SHA-256 of what follows the header, bytes of meta, of payload
_MAX_ENTRY = 1 << 28
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
SUFFIX = ".pvk"
_MEMBER = re.compile(r"(spirv|tuning)/([0-9a-f]{64})\.pvk\Z")
MANIFEST = "purevk-bundle.json"


@dataclass(frozen=True)
class CacheKey:
    """Everything that decides what SPIR-V a template becomes, field by field, so that two keys can
    be compared.

    Which compiler made an entry is not part of it: that is noted in the entry.

    Attributes:
        template: the template's name.
        target_env: as in `purevk.shaders.shaderc.CompileJob`, like the next two.
        macros: sorted (name, text) pairs.
        files: (name, SHA-256) of the template and of every file it includes, the template first.
        format: `FORMAT`.
    """

    template: str
    target_env: str
    spirv_version: str | None
    optimize: bool
    macros: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]
    format: int = FORMAT

    @classmethod
    def of(cls, job: CompileJob) -> CacheKey:
        """The key of a job. Reads the included files, and loads no compiler."""
        files = source_files(job.source, name=job.name, include=job.include)
        return cls(
            job.name,
            job.target_env,
            job.spirv_version,
            job.optimize,
            tuple(sorted(job.macros.items())),
            tuple((name, text_hash(text)) for name, text in files.items()),
        )

    def digest(self) -> str:
        """The name of the entry: 64 hexadecimal digits."""
        return text_hash(json.dumps(vars(self), sort_keys=True, ensure_ascii=True))

    def explain(self, other: CacheKey) -> str:
        """Which fields differ, one line each: `macros.TILE: '8' here, '16' there`. Empty: the keys
        are the same."""
        lines = []
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if mine == theirs:
                continue
            if item.name in ("macros", "files"):
                mine, theirs = dict(mine), dict(theirs)
                for name in sorted(mine.keys() | theirs.keys()):
                    if mine.get(name) != theirs.get(name):
                        lines.append(
                            f"{item.name}.{name}: {_shown(mine.get(name))} here, {_shown(theirs.get(name))} there"
                        )
                if mine == theirs:
                    lines.append(f"{item.name}: in another order")
            else:
                lines.append(f"{item.name}: {mine!r} here, {theirs!r} there")
        return "\n".join(lines)


_MOST = 60  # characters of a macro in a message


def _shown(value: str | None) -> str:
    if value is None:
        return "absent"
    if _DIGEST.match(value):
        return value[:12]
    return repr(value if len(value) <= _MOST else value[:_MOST] + "...")


class Bundle:
    """A bundle read into memory (compressed as it is). Raises FileFormatError for any other
    file, and InputError for one that cannot be opened."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import zipfile  # few programs read a bundle

        where = os.fspath(path)
        errors = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
        self._errors = (*errors, KeyError)
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise InputError(
                "the bundle cannot be opened",
                where=where,
                why=error.strerror or str(error),
                next="check the path",
            ) from None
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(content))
            if self._zip.getinfo(MANIFEST).file_size > _MAX_ENTRY:
                raise ValueError("its list of contents is too long")
            manifest = json.loads(self._zip.read(MANIFEST))
            version = manifest["format"]
        except (OSError, *self._errors, ValueError, TypeError) as error:
            raise FileFormatError(
                "the file is no purevk bundle",
                where=where,
                why=str(error),
                next="purevk warmup --bundle FILE, or purevk cache export, writes one",
            ) from None
        if version != FORMAT:
            raise FileFormatError(
                "the bundle is of another version",
                where=where,
                why=f"it has format {version!r}, and this purevk reads {FORMAT}",
                next="export it again with this version of purevk",
            )
        self._lock = threading.Lock()
        # No other name is read, and none is ever a path on this machine.
        names = (_MEMBER.match(name) for name in self._zip.namelist())
        self.entries = {(name[1], name[2]) for name in names if name}
        self.digests = {digest for kind, digest in self.entries if kind == "spirv"}

    def read(self, digest: str, kind: str = "spirv") -> tuple[dict[str, Any], bytes] | None:
        """The entry of a digest: (meta, content); None if the bundle has none, or it is damaged."""
        if (kind, digest) not in self.entries:
            return None
        try:
            with self._lock:
                info = self._zip.getinfo(f"{kind}/{digest}{SUFFIX}")
                if info.file_size > _MAX_ENTRY:
                    return None
                return unpack(digest, self._zip.read(info))
        except self._errors as error:
            _log.warning("damaged entry %s in a bundle: %s", digest[:12], error)
            return None


def write_bundle(path: str | os.PathLike[str], entries: Mapping[tuple[str, str], bytes]) -> None:
    """Writes packed entries, by kind and digest, into one file.

    Raises:
        PurevkError: the file cannot be written.
    """
    import zipfile  # few programs write a bundle

    manifest = {"format": FORMAT, "entries": sorted(digest for _, digest in entries)}
    try:
        with (
            replace_file(Path(path)) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bundle,
        ):
            bundle.writestr(MANIFEST, json.dumps(manifest))
            for kind, digest in sorted(entries):
                bundle.writestr(f"{kind}/{digest}{SUFFIX}", entries[kind, digest])
    except OSError as error:
        raise PurevkError(
            "the bundle cannot be written", where=os.fspath(path), why=str(error)
        ) from None


def pack(digest: str, payload: bytes, meta: Mapping[str, Any]) -> bytes:
    text = json.dumps({**meta, "digest": digest}, sort_keys=True).encode()
    checksum = hashlib.sha256(text + payload).digest()
    return _HEADER.pack(_MAGIC, FORMAT, checksum, len(text), len(payload)) + text + payload


def unpack(digest: str, data: bytes) -> tuple[dict[str, Any], bytes] | None:
    """(meta, payload), or None if anything is wrong with the entry."""
    if len(data) < _HEADER.size:
        return None
    magic, version, checksum, meta_size, size = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if (
        magic != _MAGIC
        or version != FORMAT
        or len(body) != meta_size + size
        or hashlib.sha256(body).digest() != checksum
    ):
        return None
    try:
        meta = json.loads(body[:meta_size])
    except ValueError:
        return None
    if not isinstance(meta, dict) or meta.get("digest") != digest:
        return None
    return meta, body[meta_size:]


def key_from(stored: Any) -> CacheKey | None:
    """The key written in an entry's meta; None if it is not one."""
    try:
        pairs = {
            name: tuple((str(a), str(b)) for a, b in stored[name]) for name in ("macros", "files")
        }
        return CacheKey(**{**stored, **pairs})
    except (TypeError, KeyError, ValueError):
        return None


def is_spirv(data: bytes) -> bool:
    return len(data) >= 20 and len(data) % 4 == 0 and data[:4] == b"\x03\x02\x23\x07"


def pipeline_header_fits(
    data: bytes, vendor: int | None, device: int | None, pipeline_uuid: bytes | None
) -> bool:
    """Whether the data starts with a VkPipelineCacheHeaderVersionOne, of the device if one is
    given."""
    if len(data) < 32:
        return False
    size, version, its_vendor, its_device = struct.unpack_from("<4I", data)
    return (
        32 <= size <= len(data)
        and version == 1
        and vendor in (None, its_vendor)
        and device in (None, its_device)
        and pipeline_uuid in (None, data[16:32])
    )

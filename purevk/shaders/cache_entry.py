"""What stands in the cache: keys made of named fields, and entries with a checksum."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from purevk.shaders.source import CompileJob, source_files, text_hash

FORMAT = 1
"""Version of the cache's format and of how keys are made. Entries of another version are not found."""

_MAGIC = b"PVKC"
_HEADER = struct.Struct(
    "<4sI32sIQ"
)  # magic, format, SHA-256 of what follows the header, bytes of meta, of payload
MOST_BYTES = 1 << 28
"""Of an entry."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
SUFFIX = ".pvk"


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

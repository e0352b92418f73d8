"""Bundles: SPIR-V and tuning results in one file, for machines without a compiler.

A bundle is code: SPIR-V can read and write any memory of the process, and no check of it can show
that it does not. So a bundle is read if its SHA-256 is the one that the caller names, or if the
caller trusts it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import stat
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from purevk.errors import FileFormatError, InputError, OutputError, PurevkError
from purevk.paths import path_text, read_file
from purevk.shaders.cache_check import entry_problem
from purevk.shaders.cache_entry import FORMAT, MOST_BYTES, SUFFIX, unpack
from purevk.whole_file import output_target, replace_file

_log = logging.getLogger("purevk.cache")
_MOST_BUNDLE = 1 << 30  # bytes of a file
_DIGEST = re.compile(r"[0-9a-fA-F]{64}\Z")
_MEMBER = re.compile(r"(spirv|tuning)/([0-9a-f]{64})\.pvk\Z")
MANIFEST = "purevk-bundle.json"


@dataclass(frozen=True)
class WrittenBundle:
    """What was written: the number of entries, the bytes of the file, and its SHA-256."""

    entries: int
    nbytes: int
    sha256: str


class Bundle:
    """A bundle read into memory (compressed as it is).

    Args:
        path: the file.
        sha256: the SHA-256 that it must have, 64 hexadecimal digits.
        trust: read it without one.

    Raises:
        InputError: it cannot be opened, `sha256` is no SHA-256, or there is neither `sha256` nor
            `trust`.
        FileFormatError: it has another SHA-256, is no bundle, or of another format version.
    """

    def __init__(
        self, path: str | os.PathLike[str], sha256: str | None = None, trust: bool = False
    ) -> None:
        import zipfile  # few programs read a bundle

        where = self._where = path_text(path)
        errors = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
        self._errors = (*errors, KeyError, ValueError, OSError)
        self._forms = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what `write_bundle` writes
        content = _read(where, sha256, trust)
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(content))
            if self._zip.getinfo(MANIFEST).file_size > MOST_BYTES:
                raise ValueError("its list of contents is too long")
            manifest = json.loads(self._zip.read(MANIFEST))
            version = manifest["format"]
        except (*self._errors, TypeError) as error:
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
                if info.file_size > MOST_BYTES or info.compress_type not in self._forms:
                    return None
                return unpack(digest, self._zip.read(info))
        except self._errors as error:
            _log.warning("damaged entry %s in a bundle: %s", digest[:12], error)
            return None

    def check(self) -> None:
        """Reads all entries.

        Raises:
            FileFormatError: one is damaged, or is not what its name says.
        """
        for _ in self.all_entries():
            pass

    def all_entries(self) -> Iterator[tuple[str, str, dict[str, Any], bytes]]:
        """(kind, digest, meta, content) of all entries, in order.

        Raises:
            FileFormatError: one is damaged, or is not what its name says.
        """
        for kind, digest in sorted(self.entries):
            entry = self.read(digest, kind)
            problem = "damaged" if entry is None else entry_problem(kind, digest, *entry)
            if entry is None or problem:
                raise FileFormatError(
                    "the bundle has a damaged entry",
                    where=self._where,
                    why=f"{kind} {digest[:12]}: {problem}; nothing was copied",
                    next="copy the file again, or export it again",
                )
            yield kind, digest, *entry


def _read(path: str, sha256: str | None, trust: bool) -> bytes:
    """The bytes of a bundle that the caller trusts."""
    if sha256 is None and trust is not True:  # "false" of a manifest is no consent
        raise InputError(
            "a bundle is code, and this one must be named by its SHA-256",
            where=path,
            why="its shaders can read and write any memory of this process",
            next="pass the digest that `purevk warmup --bundle` or `purevk cache export` printed:"
            " --sha256 H (sha256=H); or --trust (trust=True) for a file of your own",
        )
    if sha256 is not None and not (isinstance(sha256, str) and _DIGEST.match(sha256)):
        raise InputError(
            "this is no SHA-256",
            where=path,
            why=f"64 hexadecimal digits are expected; {str(sha256)[:80]!r} was given",
            next="`purevk warmup --bundle` and `purevk cache export` print it",
        )
    try:
        content = read_file(path, _MOST_BUNDLE)
    except OSError as error:
        raise InputError(
            "the bundle cannot be opened",
            where=path,
            why=error.strerror or str(error),
            next="check the path",
        ) from None
    found = "" if sha256 is None else hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256.lower():
        raise FileFormatError(
            "the bundle is not the one that the SHA-256 names",
            where=path,
            why=f"it has {found}; {sha256.lower()} was given",
            next="get the file again from where the digest comes from, or export it again",
        )
    return content


def write_bundle(
    path: str | os.PathLike[str], entries: Mapping[tuple[str, str], bytes]
) -> WrittenBundle:
    """Writes packed entries, by kind and digest, into one file, and the SHA-256 of this file beside
    it: into `PATH.sha256`, in the format of sha256sum.

    Raises:
        PurevkError: a file cannot be written.
    """
    import zipfile  # few programs write a bundle

    manifest = {"format": FORMAT, "entries": sorted(digest for _, digest in entries)}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr(MANIFEST, json.dumps(manifest))
        for kind, digest in sorted(entries):
            bundle.writestr(f"{kind}/{digest}{SUFFIX}", entries[kind, digest])
    content = made.getvalue()
    sha256 = hashlib.sha256(content).hexdigest()
    target = Path(path_text(path))
    try:
        with replace_file(path) as file:
            file.write(content)
        written = output_target(target)[1]
        if written is not None and stat.S_ISREG(written.st_mode):  # a pipe has no file beside it
            with replace_file(target.with_name(f"{target.name}.sha256")) as file:
                file.write(_sum_line(sha256, target.name))
    except OutputError:
        raise
    except OSError as error:
        raise PurevkError(
            "the bundle cannot be written", where=os.fspath(path), why=str(error)
        ) from None
    return WrittenBundle(len(entries), len(content), sha256)


def _sum_line(sha256: str, name: str) -> bytes:
    """A line as sha256sum writes it: a name with line breaks is escaped."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{chr(92) if escaped != name else ''}{sha256}  {escaped}\n".encode(
        "utf-8", "surrogateescape"
    )

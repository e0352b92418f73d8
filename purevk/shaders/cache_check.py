"""What stands in a cache folder: lists entries, says what is wrong with one, and compares folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from purevk.shaders.cache_entry import is_spirv, key_from, pipeline_header_fits, unpack
from purevk.shaders.cache_folder import EntryFolder
from purevk.shaders.source import text_hash


@dataclass(frozen=True)
class EntryInfo:
    """An entry of a cache folder.

    Attributes:
        kind: "spirv", "pipeline" (the driver's cache), "tuning" or "plan" (a lowered method).
        name: the template; the name of a tuning result; the file and the method of a plan.
        nbytes, used: of the file; the time of its last use, in seconds since 1970.
        device: what a pipeline cache or tuning result belongs to.
        compiler: what made the SPIR-V.
        macros: of the template.
        problem: why the entry is not used; "" if it is sound.
        payload_hash: SHA-256 of its content, or "".
    """

    kind: str
    digest: str
    path: Path
    nbytes: int
    used: float
    name: str = ""
    device: str = ""
    compiler: str = ""
    macros: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    payload_hash: str = ""


def entry_problem(kind: str, digest: str, meta: Mapping[str, Any], payload: bytes) -> str:
    """What is wrong with the content of an entry; "" if it is what its name says."""
    if kind == "spirv":
        key = key_from(meta.get("key"))
        if key is None or key.digest() != digest:
            return "the key is not that of its name"
        return "" if is_spirv(payload) else "no SPIR-V"
    device, name = meta.get("device"), meta.get("name")
    if kind == "pipeline":
        if not isinstance(device, str) or text_hash(device) != digest:
            return "the device is not that of its name"
        return "" if pipeline_header_fits(payload, None, None, None) else "no pipeline cache"
    if kind == "plan":
        key = meta.get("key", meta.get("question"))  # older versions called it so
        is_its_own = isinstance(key, str) and text_hash(key) == digest
        return "" if is_its_own else "the key is not that of its name"
    if text_hash(json.dumps([device, name])) != digest:
        return "the device is not that of its name"
    try:
        json.loads(payload)
    except (ValueError, RecursionError):
        return "no JSON"
    return ""


def list_entries(folder: EntryFolder) -> list[EntryInfo]:
    """The entries of a folder, each verified, the last used one first. Changes nothing."""
    found = []
    for path, used, nbytes in folder.files():
        kind, digest = path.parent.parent.name, path.stem
        about: dict[str, Any] = {}
        data = folder.read_raw(path)
        entry = None if data is None else unpack(digest, data)
        if data is None:
            about["problem"] = "not readable, or others may write it"
        elif entry is None:
            about["problem"] = "damaged, or of another version"
        else:
            about = _describe(kind, digest, *entry)
        found.append(EntryInfo(kind, digest, path, nbytes, used, **about))
    return sorted(found, key=lambda entry: (-entry.used, entry.kind, entry.name))


def _describe(kind: str, digest: str, meta: dict[str, Any], payload: bytes) -> dict[str, Any]:
    key = key_from(meta.get("key"))
    return {
        "name": str(key.template) if key is not None else str(meta.get("name") or ""),
        "device": str(meta.get("device") or ""),
        "compiler": str(meta.get("compiler") or ""),
        "macros": dict(key.macros) if key is not None else {},
        "problem": entry_problem(kind, digest, meta, payload),
        "payload_hash": hashlib.sha256(payload).hexdigest(),
    }


@dataclass(frozen=True)
class FolderDifference:
    """How two cache folders differ: entries of one alone, and entries that both have with other
    content. Damaged entries are left out."""

    only_first: tuple[EntryInfo, ...]
    only_second: tuple[EntryInfo, ...]
    changed: tuple[EntryInfo, ...]
    same: int


def compare_folders(first: EntryFolder, second: EntryFolder) -> FolderDifference:
    """Compares the entries of two folders."""
    mine, theirs = _sound(first), _sound(second)
    both = mine.keys() & theirs.keys()
    changed = tuple(
        entry
        for key, entry in mine.items()
        if key in both and entry.payload_hash != theirs[key].payload_hash
    )
    return FolderDifference(
        tuple(entry for key, entry in mine.items() if key not in theirs),
        tuple(entry for key, entry in theirs.items() if key not in mine),
        changed,
        len(both) - len(changed),
    )


def _sound(folder: EntryFolder) -> dict[tuple[str, str], EntryInfo]:
    return {(e.kind, e.digest): e for e in list_entries(folder) if not e.problem}

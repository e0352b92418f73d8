"""`purevk cache`: lists, verifies, prunes, compares and copies the entries of the on-disk cache."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from purevk.cache import Cache, default_cache
from purevk.cli.output import Output, bundle_data, check_output, count, size
from purevk.errors import InputError, PurevkError
from purevk.shaders.cache_check import EntryInfo


def collect(args: argparse.Namespace) -> dict[str, Any]:
    cache = Cache(args.folder) if args.folder else default_cache()
    if cache.folder is None:
        raise InputError(
            "there is no cache on disk",
            why="PUREVK_CACHE=0, or this user has no home folder",
            next="name a folder: --folder DIR",
        )
    new = args.action == "import" and not cache.folder.exists()
    if args.folder and not new and not cache.folder.is_dir():
        raise _no_folder(cache.folder)
    work = _ACTIONS[args.action]
    data = {"action": args.action, "folder": os.fspath(cache.folder)}
    return {**data, **work(cache, args)}


def _no_folder(path: Path) -> InputError:
    why = "this is a file" if path.exists() else ""
    return InputError("there is no such folder", where=str(path), why=why, next="check the path")


def _list(cache: Cache, args: argparse.Namespace) -> dict[str, Any]:
    entries = cache.entries()
    return {
        "entries": [_entry_data(entry) for entry in entries],
        "bytes": sum(entry.nbytes for entry in entries),
        "max_bytes": cache.max_bytes,
        "driver_bytes": cache.driver_bytes(),
    }


def _verify(cache: Cache, args: argparse.Namespace) -> dict[str, Any]:
    entries = cache.entries()
    damaged = [entry for entry in entries if entry.problem]
    removed = cache.remove(damaged) if args.remove and not args.dry_run else 0
    return {
        "ok": len(damaged) == removed,
        "sound": len(entries) - len(damaged),
        "damaged": [_entry_data(entry) for entry in damaged],
        "removed": removed,
    }


def _prune(cache: Cache, args: argparse.Namespace) -> dict[str, Any]:
    entries = cache.entries()  # the last used one first
    oldest = None if args.older_than is None else time.time() - args.older_than * 86400
    kept_bytes, gone = 0, []
    for entry in entries:
        old = oldest is not None and entry.used < oldest
        if old or (args.max_size is not None and kept_bytes + entry.nbytes > args.max_size):
            gone.append(entry)
        else:
            kept_bytes += entry.nbytes
    return {
        "removed": len(gone) if args.dry_run else cache.remove(gone),
        "removed_bytes": sum(entry.nbytes for entry in gone),
        "kept": len(entries) - len(gone),
        "kept_bytes": kept_bytes,
        "dry_run": args.dry_run,
    }


def _clear(cache: Cache, args: argparse.Namespace) -> dict[str, Any]:
    return {"removed": cache.clear()}


def _diff(cache: Cache, args: argparse.Namespace) -> dict[str, Any]:
    path = Path(args.paths[0])
    if not path.is_dir():
        raise _no_folder(path)
    difference = cache.difference(Cache(path))
    changes = (difference.only_first, difference.only_second, difference.changed)
    return {
        "other": str(path),
        "ok": not any(changes),
        "only_here": [_entry_data(entry) for entry in difference.only_first],
        "only_there": [_entry_data(entry) for entry in difference.only_second],
        "changed": [_entry_data(entry) for entry in difference.changed],
        "same": difference.same,
    }


def _export(cache: Cache, args: argparse.Namespace) -> dict[str, Any]:
    (path,) = args.paths
    check_output(path, "the archive")
    entries = cache.entries()
    return {
        **bundle_data(path, cache.export_entries(path, entries)),
        "damaged": sum(bool(entry.problem) for entry in entries),
    }


def _import(cache: Cache, args: argparse.Namespace) -> dict[str, Any]:
    (path,) = args.paths
    count = cache.import_bundle(path, sha256=args.sha256, trust=args.trust)
    if not cache.persistent:
        raise PurevkError(
            "the entries could not be kept",
            where=os.fspath(cache.folder or ""),
            why=cache.problem,
            next="name a folder that this user can write: --folder DIR",
        )
    return {"path": path, "entries": count}


_ACTIONS: dict[str, Callable[[Cache, argparse.Namespace], dict[str, Any]]] = {
    "ls": _list,
    "verify": _verify,
    "prune": _prune,
    "clear": _clear,
    "diff": _diff,
    "export": _export,
    "import": _import,
}


def _entry_data(entry: EntryInfo) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "digest": entry.digest,
        "bytes": entry.nbytes,
        "used": entry.used,
        "device": entry.device or None,
        "compiler": entry.compiler or None,
        "macros": dict(entry.macros),
        "problem": entry.problem or None,
    }


# -- for people ----------------------------------------------------------------------------------
def show(data: dict[str, Any], out: Output) -> None:
    _SHOW[data["action"]](data, out)
    out.line(f"cache {data['folder']}", "dim")


def _show_entries(entries: list[dict[str, Any]], out: Output, title: str = "") -> None:
    if not entries:
        return
    now = time.time()
    out.table(
        ["kind", ("name", "p"), ("size", "r"), ("last use", "r"), "from", "problem"],
        [
            [
                entry["kind"],
                entry["name"] or entry["digest"][:12],
                size(entry["bytes"]),
                _age(now - entry["used"]),
                _origin(entry),
                entry["problem"],
            ]
            for entry in entries
        ],
        title=title,
    )


def _origin(entry: dict[str, Any]) -> str:
    """The name of the device, or the compiler without its details."""
    if entry["device"]:
        return str(entry["device"]).partition("|")[0]
    return (entry["compiler"] or "").partition(",")[0]


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "now"


def _show_list(data: dict[str, Any], out: Output) -> None:
    _show_entries(data["entries"], out)
    out.line(
        f"{count(len(data['entries']), 'entry')}, {size(data['bytes'])} of at most"
        f" {size(data['max_bytes'])}; {size(data['driver_bytes'])} of the driver"
    )


def _show_verified(data: dict[str, Any], out: Output) -> None:
    _show_entries(data["damaged"], out)
    out.line(
        f"{count(data['sound'], 'entry')} sound, {len(data['damaged'])} damaged,"
        f" {data['removed']} removed"
    )


def _show_pruned(data: dict[str, Any], out: Output) -> None:
    verb = "would be removed" if data["dry_run"] else "removed"
    out.line(
        f"{count(data['removed'], 'entry')} {verb} ({size(data['removed_bytes'])});"
        f" {data['kept']} kept ({size(data['kept_bytes'])})"
    )


def _show_difference(data: dict[str, Any], out: Output) -> None:
    _show_entries(data["only_here"], out, f"only in {data['folder']}")
    _show_entries(data["only_there"], out, f"only in {data['other']}")
    _show_entries(data["changed"], out, "other content")
    out.line(f"{count(data['same'], 'entry')} in both")


def _show_exported(data: dict[str, Any], out: Output) -> None:
    out.line(f"{data['path']}: {count(data['entries'], 'entry')}, {size(data['bytes'])}")
    out.line(f"sha256 {data['sha256']}")
    if data["damaged"]:
        out.line(
            f"{count(data['damaged'], 'damaged entry')} left out; `purevk cache verify` lists them",
            "yellow",
        )


_SHOW: dict[str, Callable[[dict[str, Any], Output], None]] = {
    "ls": _show_list,
    "verify": _show_verified,
    "prune": _show_pruned,
    "clear": lambda data, out: out.line(f"{count(data['removed'], 'file')} removed"),
    "diff": _show_difference,
    "export": _show_exported,
    "import": lambda data, out: out.line(
        f"{count(data['entries'], 'entry')} copied from {data['path']}"
    ),
}

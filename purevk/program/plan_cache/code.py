"""The name of purevk's own code, on which plans depend."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def code() -> str:
    """Names the code of purevk on disk: its version, and the sizes and dates of its files, by which
    Python too tells whether bytecode is that of a file. What an installer wrote about the files has
    their hashes. Without it, and where all files have one date, as those of builds that are the same
    each time, their contents count. Empty: there are no files, as in an archive."""
    from purevk import __version__

    files: list[tuple[str, int, int]] = []  # path within the package, size, date
    folders = [""]
    while folders:
        inside = folders.pop()
        with os.scandir(f"{_PACKAGE}{inside}") as entries:
            for entry in entries:
                if entry.name.endswith((".py", ".comp", ".glslh")):
                    about = entry.stat()
                    path = f"{inside}/{entry.name}"
                    files.append((path, about.st_size, int(about.st_mtime)))
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(f"{inside}/{entry.name}")
    if not files:
        return ""
    files.sort()
    hasher = hashlib.sha256(repr((__version__, sys.version, files)).encode())
    records = _records()
    for record in records:
        hasher.update(Path(record).read_bytes())
    if not records and len({date for _, _, date in files}) == 1:
        for path, _, _ in files:
            hasher.update(Path(f"{_PACKAGE}{path}").read_bytes())
    return hasher.hexdigest()


def _records() -> list[str]:
    """The lists of files, with their hashes, that an installer wrote beside the package."""
    beside = os.path.dirname(_PACKAGE)
    return sorted(
        path
        for name in os.listdir(beside)
        if name.startswith("purevk-") and name.endswith(".dist-info")
        if os.path.isfile(path := os.path.join(beside, name, "RECORD"))
    )


def code_now() -> str:
    try:
        return code()
    except OSError:  # an archive, or an installer is at work
        return ""


CODE = code_now()
"""The code of this process, which is on disk when it is imported."""

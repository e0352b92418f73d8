"""Kernels as files: what PUREVK_DUMP writes, and what PUREVK_OVERRIDE reads in place of purevk's own."""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from purevk import knobs
from purevk.errors import InputError, ShaderCompilerError
from purevk.paths import open_regular, others_may_write, read_open
from purevk.shaders.cache_entry import MOST_BYTES, CacheKey, is_spirv
from purevk.shaders.source import CompileJob, expand

_log = logging.getLogger("purevk")
# By folder of PUREVK_OVERRIDE, the names of the kernels of this process.
_used: dict[Path, set[str]] = {}
_lock = threading.Lock()


def stem_of(key: CacheKey) -> str:
    """The name of a kernel's files, without the suffix."""
    return f"{key.template.removesuffix('.comp').replace('/', '.')}.{key.digest()[:12]}"


def glsl_of(job: CompileJob) -> str:
    """The GLSL of a kernel, with macros and includes worked in."""
    return expand(job.source, name=job.name, macros=job.macros, include=job.include)


def dump(folder: Path, jobs: Mapping[CacheKey, Callable[[], CompileJob]]) -> None:
    """Writes the GLSL of kernels."""
    for key, job in jobs.items():
        path = folder / f"{stem_of(key)}.comp"
        if not path.exists():
            knobs.write_dump(path, glsl_of(job()).encode())


def dump_spirv(folder: Path, spirv: Mapping[CacheKey, bytes]) -> None:
    """Writes the SPIR-V of kernels."""
    for key, code in spirv.items():
        path = folder / f"{stem_of(key)}.spv"
        if not path.exists():
            knobs.write_dump(path, code)


def overridden(
    spirv: Mapping[CacheKey, bytes], jobs: Mapping[CacheKey, Callable[[], CompileJob]]
) -> dict[CacheKey, bytes]:
    """The SPIR-V of kernels for which the folder PUREVK_OVERRIDE has other GLSL or SPIR-V than purevk.
    Nothing of it goes into the cache. At the end of the process, a warning names files that fit none of
    its kernels.

    Raises:
        InputError: there is no such folder, others may write it or a file, a file is no SPIR-V, or
            has the same name as changed GLSL and is changed too.
        ShaderCompilerError: the GLSL does not compile, or there is no compiler.
    """
    folder = Path(knobs.OVERRIDE())
    if not os.path.isdir(folder):  # pathlib raises for a name that is too long
        raise InputError(
            f"{knobs.OVERRIDE.name} names no folder",
            where=str(folder),
            next=f"make it with {knobs.DUMP.name}, or unset the variable",
        )
    _refuse_shared(folder)
    _note_used(folder, spirv)
    found = {}
    for key, own in spirv.items():
        job = jobs[key]()
        text, code = _changed_glsl(folder, key, job), _changed_spirv(folder, key, own)
        if text is not None and code is not None:
            raise InputError(
                "both the GLSL and the SPIR-V of a kernel are changed",
                where=str(folder / stem_of(key)),
                next="remove the one that is not meant",
            )
        if text is not None:
            from purevk.shaders import shaderc  # not loaded if the cache has all kernels

            changed = replace(
                job, source=text, name=f"{stem_of(key)}.comp", macros={}, include=None
            )
            try:
                (code,) = shaderc.compile_many([changed], threads=1)
            except ShaderCompilerError as error:
                raise ShaderCompilerError(
                    error.what,
                    where=str(folder / changed.name),
                    why=f"{error.why} (lines are counted as in the template and what it includes)",
                    next=f"correct the file, or remove it from the folder of {knobs.OVERRIDE.name}",
                ) from None
        if code is not None:
            _log.warning(
                "%s: %s is taken from %s", knobs.OVERRIDE.name, key.template, folder / stem_of(key)
            )
            found[key] = code
    return found


def _note_used(folder: Path, keys: Iterable[CacheKey]) -> None:
    with _lock:
        if not _used:
            _at_exit(partial(_warn_of_unused, os.getpid()))
        _used.setdefault(folder.resolve(), set()).update(stem_of(key) for key in keys)


_at_exit = atexit.register


def _warn_of_unused(process: int) -> None:
    """Names files that a user may have changed in vain, if this is still the process of that number:
    forks inherit what is to be done in the end."""
    for folder, used in list(_used.items()) if os.getpid() == process else ():
        files = {path.stem: path.name for path in (*folder.glob("*.spv"), *folder.glob("*.comp"))}
        unused = sorted(files[stem] for stem in files.keys() - used)
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            _log.warning(
                "%s: no kernel of this process has the name of %s%s in %s. Names change with models,"
                " devices and versions of purevk: write them anew with %s",
                knobs.OVERRIDE.name,
                ", ".join(unused[:3]),
                more,
                folder,
                knobs.DUMP.name,
            )


def _changed_glsl(folder: Path, key: CacheKey, job: CompileJob) -> str | None:
    """The GLSL of a kernel in the folder, if it differs from purevk's."""
    path = folder / f"{stem_of(key)}.comp"
    content = _read(path, "GLSL")
    try:
        text = None if content is None else content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError("the GLSL cannot be read", where=str(path), why=str(error)) from None
    return None if text == glsl_of(job) else text


def _changed_spirv(folder: Path, key: CacheKey, own: bytes) -> bytes | None:
    """The same for SPIR-V."""
    path = folder / f"{stem_of(key)}.spv"
    code = _read(path, "SPIR-V")
    if code is not None and not is_spirv(code):
        raise InputError(
            "a file is no SPIR-V",
            where=str(path),
            why="it does not begin with the magic number of a module in little-endian words",
        )
    return None if code == own else code


def _refuse_shared(path: Path, descriptor: int | None = None) -> None:
    """Raises InputError for a folder or a file that others may write: the driver runs what is there.

    Args:
        descriptor: of the file, if it is open: another one may get its name meanwhile.
    """
    if why := others_may_write(path if descriptor is None else descriptor):
        raise InputError(
            f"other users may write what {knobs.OVERRIDE.name} names",
            where=str(path),
            why=f"{why}; the device and its driver run what is there",
            next=f"if you trust it, make it your own: chown, and chmod go-w {shlex.quote(str(path))}",
        )


def _read(path: Path, what: str) -> bytes | None:
    """The content of a file; None if there is none, or something else has its name."""
    if not os.path.isfile(path):
        return None
    try:
        with open_regular(path) as file:
            _refuse_shared(path, file.fileno())
            return read_open(file, MOST_BYTES, path)
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(f"the {what} cannot be read", where=str(path), why=why) from None

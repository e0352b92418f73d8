"""All environment variables that purevk reads, in one table. `docs/knobs.md` is generated from it.

A knob is read when it is used, not at import, so a test may set the variable at any time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from purevk.errors import OutputError, PurevkError
from purevk.knob_values import (
    RENAMED,
    CacheOptions,
    Limits,
    parse_cache,
    parse_count,
    parse_flag,
    parse_limits,
    parse_names,
    parse_seconds,
    parse_seed,
)
from purevk.paths import others_may_write
from purevk.plain_text import printable
from purevk.whole_file import make_private, replace_file

DRIVER_FOLDER = "driver"
"""The folder of Mesa's drivers, in that of the on-disk cache."""


@dataclass(frozen=True)
class Knob:
    """One environment variable.

    Attributes:
        name: of the variable.
        parse: reads its text. If `merges`, it also takes the value of the old names, or the default.
        default: the value if the variable is not set.
        doc: one line of documentation.
        merges: whether a text changes a part of the value.
    """

    name: str
    parse: Callable[..., Any]
    default: Any
    doc: str
    merges: bool = False

    def __call__(self) -> Any:
        value = self.default
        names = (*_old_names(self.name), self.name) if self.merges else (self.name,)
        for name in names:
            text = os.environ.get(name)
            if text is None or (not text and self.parse in (parse_count, parse_seconds)):
                continue
            try:
                spelled = RENAMED[name][1](text) if name in RENAMED else text
                value = self.parse(spelled, value) if self.merges else self.parse(spelled)
            except ValueError as error:
                raise PurevkError(
                    f"{name}={text!r} cannot be read",
                    why=f"expected {error}",
                    next=f"unset it, or see docs/knobs.md ({self.doc})",
                ) from None
        return value


def _old_names(name: str) -> Iterator[str]:
    return (old for old, (new, _) in RENAMED.items() if new == name and old in os.environ)


DEVICE = Knob(
    "PUREVK_DEVICE",
    str,
    "",
    "Vulkan device to use: its index, a part of its name, or its kind, such as cpu. Empty: the best"
    " device.",
)
VISIBLE_DEVICES = Knob(
    "PUREVK_VISIBLE_DEVICES",
    parse_names,
    (),
    "Vulkan devices to see, separated by commas: indices, or parts of names. They are numbered anew,"
    " in this order. Empty: all.",
)
PROFILE = Knob(
    "PUREVK_PROFILE",
    str,
    "",
    "Device profile to choose kernels by. Empty: that of the device's family. `purevk info` prints"
    " its name.",
)
CACHE = Knob(
    "PUREVK_CACHE",
    parse_cache,
    CacheOptions(),
    "The on-disk cache: its folder (empty or 1: the user's cache folder; 0: none), then options,"
    " separated by commas. max_bytes limits its size; the least recently used entries are removed"
    " first. plans=0 stores no plans, so each load lowers the methods of its file. only=1"
    " compiles no kernel: one that is not in the cache raises KernelNotCachedError (`purevk warmup`"
    " fills the cache, and ignores this option). Example: /var/cache/purevk,only=1.",
    merges=True,
)
SHADERC = Knob("PUREVK_SHADERC", str, "", "Path of the libshaderc to load. No other is tried.")
VULKAN_SDK = Knob(
    "VULKAN_SDK",
    str,
    "",
    "Folder of the Vulkan SDK. Its Vulkan loader and libshaderc are tried last.",
)
VALIDATION = Knob(
    "PUREVK_VALIDATION",
    parse_flag,
    False,
    "1 turns the Khronos validation layer on. Each message raises ValidationError.",
)
DISABLE = Knob(
    "PUREVK_DISABLE",
    lambda text, base: (*base, *parse_names(text)),
    (),
    "Optional device features not to use, separated by commas. `purevk info --all` lists them."
    " texels reads all tensors as storage buffers; fragments turns off the kernels that use elements"
    " of matrix-core fragments one by one.",
    merges=True,
)
COMPILE_THREADS = Knob(
    "PUREVK_COMPILE_THREADS",
    parse_count,
    0,
    "Number of threads that compile shaders. 0: one per core.",
)
EAGER_FALLBACK = Knob(
    "PUREVK_EAGER_FALLBACK",
    parse_flag,
    True,
    "0 raises what purevk cannot run under torch.compile. 1 runs it in eager torch, with a warning.",
)
CHECK_INDICES = Knob(
    "PUREVK_CHECK_INDICES",
    parse_flag,
    True,
    "1 raises InputError where an index that the model computes, or one on a GPU, is out of range, as"
    " torch does. 0 takes the nearest element. Inputs on the host, and what a model asserts of its"
    " data, are always checked.",
)
CHECK = Knob(
    "PUREVK_CHECK",
    parse_flag,
    False,
    "1 compares each node of a call with eager torch, and the results of the call with those of the"
    " single nodes. The first difference raises DifferenceError. See docs/debugging.md.",
)
SKIP_PASSES = Knob(
    "PUREVK_SKIP_PASSES",
    parse_names,
    (),
    "Optional passes not to run, separated by commas. `purevk bisect` finds which one matters."
    " docs/debugging.md lists them.",
)
VERIFY = Knob("PUREVK_VERIFY", parse_flag, False, "1 verifies the graph after every pass.")
DUMP = Knob(
    "PUREVK_DUMP",
    str,
    "",
    "Folder to write files to: the graph after each pass, the GLSL and SPIR-V of each kernel, and the"
    " tensors of a node that PUREVK_CHECK finds.",
)
OVERRIDE = Knob(
    "PUREVK_OVERRIDE",
    str,
    "",
    "Folder with kernels to run in place of purevk's: files of PUREVK_DUMP that were changed. The driver"
    " takes them unchecked. A folder or a file that other users may write is refused.",
)
PROGRESS = Knob(
    "PUREVK_PROGRESS", parse_flag, True, "0 hides progress bars. They only appear on a terminal."
)
TIMEOUT = Knob(
    "PUREVK_TIMEOUT",
    parse_seconds,
    120.0,
    "Seconds to wait for the device before DeviceLostError is raised. inf: as long as it takes.",
)
SEED = Knob(
    "PUREVK_SEED",
    parse_seed,
    None,
    "Seed of random operators (rand, randn, dropout, ...) until torch.manual_seed or"
    " purevk.manual_seed sets another. Unset: as in torch, others in each process.",
)
TUNED = Knob(
    "PUREVK_TUNED",
    parse_flag,
    True,
    "Run the kernels that `purevk tune` found to be the fastest on the device.",
)
LIMITS = Knob(
    "PUREVK_LIMITS",
    parse_limits,
    Limits(),
    "What a method in a file may have: nodes, dynamic sizes (symbols), nesting of lists, sizes and"
    " graphs (depth), and bytes of a tensor at the bounds of its sizes (tensor_bytes). Names that"
    " are left out have their defaults.",
    merges=True,
)
VK_DRIVER_FILES = Knob(
    "VK_DRIVER_FILES", str, "", "Driver manifests for the Vulkan loader. It uses no others."
)
VK_ICD_FILENAMES = Knob("VK_ICD_FILENAMES", str, "", "Old name of VK_DRIVER_FILES.")
MESA_SHADER_CACHE_DIR = Knob(
    "MESA_SHADER_CACHE_DIR",
    str,
    "",
    "Folder of the shader cache of Mesa's drivers. Empty: purevk sets it to the folder `driver` of"
    " the on-disk cache.",
)
# Old and other names of Mesa with which a user decides where, or whether, drivers keep shaders.
MESA_GLSL_CACHE_DIR = Knob("MESA_GLSL_CACHE_DIR", str, "", "Old name of MESA_SHADER_CACHE_DIR.")
MESA_SHADER_CACHE_DISABLE = Knob(
    "MESA_SHADER_CACHE_DISABLE",
    str,
    "",
    "Read by Mesa's drivers: they keep no shaders. Empty: purevk sets it to 1 if less than 16 MiB"
    " are free where the on-disk cache is.",
)

ALL: tuple[Knob, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Knob)
)


def set_here() -> dict[str, str]:
    """The variables of purevk that are set, with their texts. Old names are written as new ones."""
    texts: dict[str, str] = {}
    for knob in ALL:
        if knob.name.startswith("PUREVK_"):
            parts = [RENAMED[old][1](os.environ[old]) for old in _old_names(knob.name)]
            parts += [os.environ[knob.name]] if knob.name in os.environ else []
            texts |= {knob.name: ",".join(parts)} if parts else {}
    return texts


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Ignores the option `only` of PUREVK_CACHE in this process for a while."""
    text = os.environ.get(CACHE.name)
    os.environ[CACHE.name] = f"{text or ''},only=0"
    try:
        yield
    finally:
        if text is None:
            del os.environ[CACHE.name]
        else:
            os.environ[CACHE.name] = text


def warn(message: str) -> None:
    """A `RuntimeWarning` at the line outside of purevk from which this was called."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "purevk":
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(message), RuntimeWarning, stacklevel=level)


_OTHERS = ("PUREVK_TEST_", "PUREVK_REPOSITORY")  # what tests and builds of purevk read
_warned: set[str] = set()


def warn_of_names() -> None:
    """Warns of variables with old names, and of those that begin as purevk's do but are not in the
    table: a misspelt name has no effect. Once for each name."""
    names = [knob.name for knob in ALL]
    for name in sorted(os.environ):
        if not name.startswith("PUREVK_") or name.startswith(_OTHERS):
            continue
        if name in names or name in _warned:
            continue
        _warned.add(name)
        if name in RENAMED:
            warn(_renamed(name))
            continue
        import difflib

        ends = {name.removeprefix("PUREVK_"): name for name in names}
        near = difflib.get_close_matches(name.removeprefix("PUREVK_"), ends, 1)
        warn(
            f"{name} is no variable of purevk, and has no effect"
            + (f"; is {ends[near[0]]} meant?" if near else "; docs/knobs.md has all of them"),
        )


def _renamed(old: str) -> str:
    """What to write instead of an old name."""
    new, spell = RENAMED[old]
    if not new:
        return f"{old} has no effect any more: unset it"
    try:
        spelled = spell(os.environ[old])
    except ValueError:  # `check` raises
        spelled = "..."
    now = f"write {new}={spelled}" if spelled else "unset it"
    return f"{old} is an old name that the next release does not read: {now}"


def check() -> None:
    """Reads all variables. One that cannot be read raises `PurevkError` here, at load, and not later in
    a call that happens to be slow enough to need it."""
    for knob in ALL:
        knob()
    dump_folder()


def dump_folder() -> Path | None:
    """The folder of PUREVK_DUMP, which is made if it is missing; None: the variable is not set.

    Raises:
        PurevkError: it cannot be made.
    """
    if not (text := DUMP()):
        return None
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PurevkError(
            f"the folder of {DUMP.name} cannot be made",
            where=text,
            why=str(error),
            next="name a folder that you may write to, or unset the variable",
        ) from None
    return folder


def write_dump(path: Path, content: bytes) -> None:
    """Writes a file into the folder of PUREVK_DUMP.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        with replace_file(path) as file:
            file.write(content)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"a file of {DUMP.name} cannot be written",
            where=os.fspath(path),
            why=error.strerror or str(error),
            next="remove what is there, name another folder, or unset the variable",
        ) from None


_OURS = "_PUREVK_MESA_SHADER_CACHE_DIR"  # the value that purevk gave to MESA_SHADER_CACHE_DIR
_OURS_DISABLE = "_PUREVK_MESA_SHADER_CACHE_DISABLE"  # set if purevk set MESA_SHADER_CACHE_DISABLE
_DRIVER_ROOM = 16 << 20  # bytes on the disk without which Mesa's drivers keep no shaders


def cache_folder() -> str:
    """The folder of the on-disk cache: that of PUREVK_CACHE, or the user's cache folder. Empty:
    nothing is stored on disk, because of PUREVK_CACHE=0 or because this user has no folder."""
    options = CACHE()
    if not options.on:
        return ""
    folder: str = os.path.expanduser(options.folder)
    if not folder:
        import platformdirs  # it imports much, which a folder in PUREVK_CACHE makes needless

        try:
            folder = platformdirs.user_cache_dir("purevk", appauthor=False)
        except RuntimeError:  # the user is not known to the system, and HOME is not set
            folder = "~"
    if not folder.startswith("~"):
        return folder
    warn(
        "purevk keeps its cache in memory only: this user has no home folder (PUREVK_CACHE names"
        " another folder; PUREVK_CACHE=0 uses none)"
    )
    return ""


def set_driver_cache() -> None:
    """Has Mesa's drivers keep their shaders in the folder of the on-disk cache, or none if its disk
    is full. Drivers read the variables when they are loaded. A variable that the user set stays as
    it is; one that came from a purevk process that started this one does not."""
    given = os.environ.get(MESA_SHADER_CACHE_DIR.name)
    if given and given != os.environ.get(_OURS):
        return
    if os.environ.pop(_OURS_DISABLE, None):
        os.environ.pop(MESA_SHADER_CACHE_DISABLE.name, None)
    if MESA_GLSL_CACHE_DIR() or MESA_SHADER_CACHE_DISABLE():
        return
    folder = cache_folder()
    path = os.path.join(os.path.abspath(folder), DRIVER_FOLDER) if folder else ""
    try:
        if path:
            make_private(path)
            if others_may_write(folder) or others_may_write(path):  # the driver runs what is there
                path = ""
    except OSError:  # the cache itself warns if it cannot be written
        path = ""
    if path and not _has_room(path):
        os.environ[MESA_SHADER_CACHE_DISABLE.name] = os.environ[_OURS_DISABLE] = "1"
        path = ""
    if path:
        os.environ[MESA_SHADER_CACHE_DIR.name] = os.environ[_OURS] = path
    elif given:
        del os.environ[MESA_SHADER_CACHE_DIR.name], os.environ[_OURS]


def _has_room(path: str) -> bool:
    """Whether Mesa's drivers may keep shaders in a folder. They map an index of 1.3 MB without
    asking for its disk space, so on a full disk the process would end with the signal SIGBUS."""
    try:
        return shutil.disk_usage(path).free >= _DRIVER_ROOM
    except OSError:  # the file system does not tell
        return True


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process with changes, for a process that it starts."""
    return {**os.environ, **changes}

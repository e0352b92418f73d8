"""All environment variables that purevk reads, in one table. `docs/knobs.md` is generated from it.

A knob is read when it is used, not at import, so a test may set the variable at any time.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from purevk.errors import OutputError, PurevkError
from purevk.paths import others_may_write
from purevk.plain_text import printable
from purevk.whole_file import make_private, replace_file

DRIVER_FOLDER = "driver"
"""The folder of Mesa's drivers, in that of the on-disk cache."""


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("1 or 0")


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError("a whole number, 0 or more")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:  # nan is none
        raise ValueError("a number of seconds, 0 or more")
    return number


def _seed(text: str) -> int | None:
    return _count(text) if text else None


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True)
class Knob:
    """One environment variable: its name, how its text is read, its default, and one line of
    documentation."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    doc: str

    def __call__(self) -> Any:
        text = os.environ.get(self.name)
        if text is None or (not text and self.parse in (_count, _seconds)):
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise PurevkError(
                f"{self.name}={text!r} cannot be read",
                why=f"expected {error}",
                next=f"unset it, or see docs/knobs.md ({self.doc})",
            ) from None

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Takes the variable out of the environment of this process for a while."""
        text = os.environ.pop(self.name, None)
        try:
            yield
        finally:
            if text is not None:
                os.environ[self.name] = text


DEVICE = Knob(
    "PUREVK_DEVICE",
    str,
    "",
    "Vulkan device to use: its index, a part of its name, or its kind, such as cpu. Empty: the best"
    " device.",
)
VISIBLE_DEVICES = Knob(
    "PUREVK_VISIBLE_DEVICES",
    _names,
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
CACHE_DIR = Knob(
    "PUREVK_CACHE_DIR", str, "", "Folder of the on-disk cache. Empty: the user's cache folder."
)
CACHE = Knob("PUREVK_CACHE", _flag, True, "0 turns the on-disk cache off.")
CACHE_MAX_BYTES = Knob(
    "PUREVK_CACHE_MAX_BYTES",
    _count,
    1 << 30,
    "Size limit of the on-disk cache, in bytes. The least recently used entries are removed first.",
)
ASSERT_CACHED = Knob(
    "PUREVK_ASSERT_CACHED",
    _flag,
    False,
    "1 compiles no kernel: one that is not in the cache raises KernelNotCachedError. `purevk warmup`"
    " fills the cache, and ignores this variable.",
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
    _flag,
    False,
    "1 turns the Khronos validation layer on. Each message raises ValidationError.",
)
DISABLE = Knob(
    "PUREVK_DISABLE",
    _names,
    (),
    "Optional device features not to use, separated by commas. `purevk info --all` lists them.",
)
TEXELS = Knob(
    "PUREVK_TEXELS",
    _flag,
    True,
    "0 reads all tensors as storage buffers. 1 also uses texel buffers where they are faster.",
)
COMPILE_THREADS = Knob(
    "PUREVK_COMPILE_THREADS", _count, 0, "Number of threads that compile shaders. 0: one per core."
)
EAGER_FALLBACK = Knob(
    "PUREVK_EAGER_FALLBACK",
    _flag,
    True,
    "0 raises what purevk cannot run under torch.compile. 1 runs it in eager torch, with a warning.",
)
CHECK_INDICES = Knob(
    "PUREVK_CHECK_INDICES",
    _flag,
    True,
    "1 raises InputError where an index that the model computes, or one on a GPU, is out of range, as"
    " torch does. 0 takes the nearest element. Inputs on the host, and what a model asserts of its"
    " data, are always checked.",
)
CHECK = Knob(
    "PUREVK_CHECK",
    _flag,
    False,
    "1 compares each node of a call with eager torch, and the results of the call with those of the"
    " single nodes. The first difference raises DifferenceError. See docs/debugging.md.",
)
SKIP_PASSES = Knob(
    "PUREVK_SKIP_PASSES",
    _names,
    (),
    "Optional passes not to run, separated by commas. `purevk bisect` finds which one matters."
    " docs/debugging.md lists them.",
)
VERIFY = Knob("PUREVK_VERIFY", _flag, False, "1 verifies the graph after every pass.")
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
    " takes them unchecked.",
)
PROGRESS = Knob(
    "PUREVK_PROGRESS", _flag, True, "0 hides progress bars. They only appear on a terminal."
)
TIMEOUT = Knob(
    "PUREVK_TIMEOUT",
    _seconds,
    120.0,
    "Seconds to wait for the device before DeviceLostError is raised. inf: as long as it takes.",
)
FRAGMENTS = Knob(
    "PUREVK_FRAGMENTS",
    _flag,
    True,
    "0 turns off the kernels that use elements of matrix-core fragments one by one (attention,"
    " matmuls and convolutions in the order of fragments, quantized weights, int8).",
)
POLL = Knob(
    "PUREVK_POLL",
    _seconds,
    0.002,
    "Seconds that a call polls a GPU before it sleeps. Waking up costs tens of microseconds. 0:"
    " sleep at once.",
)
SEED = Knob(
    "PUREVK_SEED",
    _seed,
    None,
    "Seed of random operators (rand, randn, dropout, ...) until torch.manual_seed or"
    " purevk.manual_seed sets another. Unset: as in torch, others in each process.",
)
RECORDINGS = Knob(
    "PUREVK_RECORDINGS",
    _count,
    16,
    "Number of recorded command buffers to keep per segment. Each input signature needs one.",
)
KEEP_PLANS = Knob(
    "PUREVK_KEEP_PLANS",
    _flag,
    True,
    "1 keeps the plans of .pte and .pvk files in the on-disk cache, so that later loads need not lower"
    " them. 0 lowers at each load.",
)
TUNED = Knob(
    "PUREVK_TUNED",
    _flag,
    True,
    "Run the kernels that `purevk tune` found to be the fastest on the device.",
)
MAX_NODES = Knob(
    "PUREVK_MAX_NODES", _count, 50_000, "Number of nodes of a method in a file that is accepted."
)
MAX_SYMBOLS = Knob(
    "PUREVK_MAX_SYMBOLS",
    _count,
    10_000,
    "Number of dynamic sizes of a method in a file that is accepted.",
)
MAX_DEPTH = Knob(
    "PUREVK_MAX_DEPTH",
    _count,
    128,
    "How deep lists, sizes and graphs in a file may be nested.",
)
MAX_TENSOR_BYTES = Knob(
    "PUREVK_MAX_TENSOR_BYTES",
    _count,
    1 << 40,
    "Bytes of a tensor in a file that are accepted, at the bounds of its sizes.",
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
    """The variables of purevk's own that are set, with their texts."""
    own = [knob.name for knob in ALL if knob.name.startswith("PUREVK_")]
    return {name: os.environ[name] for name in own if name in os.environ}


def warn(message: str) -> None:
    """A `RuntimeWarning` at the line outside of purevk from which this was called."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "purevk":
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(message), RuntimeWarning, stacklevel=level)


_OTHERS = ("PUREVK_TEST_", "PUREVK_REPOSITORY")  # what tests and builds of purevk read
_warned: set[str] = set()


def warn_of_unknown() -> None:
    """Warns of variables that begin as those of purevk do, but are none of them: a misspelt one has no
    effect. Once for each."""
    known = [knob.name for knob in ALL]
    for name in sorted(os.environ):
        if not name.startswith("PUREVK_") or name.startswith(_OTHERS):
            continue
        if name in known or name in _warned:
            continue
        _warned.add(name)
        import difflib

        ends = {each.removeprefix("PUREVK_"): each for each in known}
        near = difflib.get_close_matches(name.removeprefix("PUREVK_"), ends, 1)
        warn(
            f"{name} is no variable of purevk, and has no effect"
            + (f"; is {ends[near[0]]} meant?" if near else "; docs/knobs.md has all of them"),
        )


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
    """The folder of the on-disk cache: that of PUREVK_CACHE_DIR, or the user's cache folder. Empty:
    nothing is kept on disk, because of PUREVK_CACHE=0 or because this user has no folder."""
    if not CACHE():
        return ""
    folder: str = os.path.expanduser(CACHE_DIR())
    if not folder:
        import platformdirs  # it imports much, and knows nothing that a set PUREVK_CACHE_DIR does not

        try:
            folder = platformdirs.user_cache_dir("purevk", appauthor=False)
        except RuntimeError:  # the user is not known to the system, and HOME is not set
            folder = "~"
    if not folder.startswith("~"):
        return folder
    warn(
        "purevk keeps its cache in memory only: this user has no home folder (PUREVK_CACHE_DIR names"
        " another folder, PUREVK_CACHE=0 uses none)"
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

"""All environment variables that purevk reads, in one table. `docs/knobs.md` is generated from it.

A knob is read when it is used, not at import, so a test may set the variable at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from purevk.errors import PurevkError


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("1 or 0")


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
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise PurevkError(
                f"{self.name}={text!r} cannot be read",
                why=f"expected {error}",
                next=f"unset it, or see docs/knobs.md ({self.doc})",
            ) from None


DEVICE = Knob(
    "PUREVK_DEVICE",
    str,
    "",
    "Index or part of the name of the Vulkan device to use; empty: the best one.",
)
CACHE_DIR = Knob(
    "PUREVK_CACHE_DIR", str, "", "Folder of the on-disk cache; empty: the user's cache folder."
)
CACHE = Knob("PUREVK_CACHE", _flag, True, "0 neither reads nor writes the on-disk cache.")
CACHE_MAX_BYTES = Knob(
    "PUREVK_CACHE_MAX_BYTES",
    int,
    1 << 30,
    "Bytes that the on-disk cache may take; the least recently used entries go.",
)
SHADERC = Knob(
    "PUREVK_SHADERC", str, "", "Path of the libshaderc to load, before any other is tried."
)
VULKAN_SDK = Knob(
    "VULKAN_SDK", str, "", "Folder of the Vulkan SDK; its libshaderc is the last one tried."
)
VALIDATION = Knob(
    "PUREVK_VALIDATION",
    _flag,
    False,
    "1 switches the Khronos validation layer on; each message raises ValidationError.",
)
DISABLE = Knob(
    "PUREVK_DISABLE",
    _names,
    (),
    "Optional device features to leave off, separated by commas (names as `purevk info` prints them).",
)
TEXELS = Knob(
    "PUREVK_TEXELS",
    _flag,
    True,
    "0 reads tensors as storage buffers also where texel buffers are faster.",
)
COMPILE_THREADS = Knob(
    "PUREVK_COMPILE_THREADS", int, 0, "Threads that compile shaders; 0: one a core."
)
VERIFY = Knob("PUREVK_VERIFY", _flag, False, "1 verifies the IR after every pass.")
DUMP = Knob(
    "PUREVK_DUMP",
    str,
    "",
    "Folder into which graphs (after each pass), GLSL and SPIR-V are written.",
)
PROGRESS = Knob("PUREVK_PROGRESS", _flag, True, "0 shows no progress bars, also on a terminal.")
TIMEOUT = Knob(
    "PUREVK_TIMEOUT", float, 120.0, "Seconds to wait for the device before DeviceLostError."
)
FRAGMENTS = Knob(
    "PUREVK_FRAGMENTS",
    _flag,
    True,
    "0 keeps kernels (products with quantized weights, attention) from filling the fragments of"
    " matrix units themselves.",
)
POLL = Knob(
    "PUREVK_POLL",
    float,
    0.002,
    "Seconds that a call polls a GPU before it sleeps until the end, which costs tens of"
    " microseconds; 0 sleeps at once.",
)
SEED = Knob(
    "PUREVK_SEED",
    int,
    0,
    "Seed of random operators (rand, randn, dropout, ...), read when a program is loaded.",
)
RECORDINGS = Knob(
    "PUREVK_RECORDINGS",
    int,
    16,
    "Recorded command buffers kept per segment, one per input signature.",
)
VK_DRIVER_FILES = Knob(
    "VK_DRIVER_FILES", str, "", "Read by the Vulkan loader: the only driver manifests to use."
)
VK_ICD_FILENAMES = Knob("VK_ICD_FILENAMES", str, "", "The older name of VK_DRIVER_FILES.")

ALL: tuple[Knob, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Knob)
)


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process with changes, for a process that it starts."""
    return {**os.environ, **changes}

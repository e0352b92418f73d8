"""The values of environment variables: how their texts are read, and what their old names mean."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def parse_flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("1 or 0")


def parse_count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError("a whole number, 0 or more")
    return number


def parse_seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:  # nan is none
        raise ValueError("a number of seconds, 0 or more")
    return number


def parse_seed(text: str) -> int | None:
    return parse_count(text) if text else None


def parse_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


@dataclass(frozen=True)
class CacheOptions:
    """The parts of PUREVK_CACHE.

    Attributes:
        on: False keeps the cache in memory only.
        folder: of the on-disk cache; empty: the user's cache folder.
        max_bytes: size limit of the folder.
        plans: whether the cache stores plans.
        only: whether a kernel that the cache lacks raises instead of being compiled.
    """

    on: bool = True
    folder: str = ""
    max_bytes: int = 1 << 30
    plans: bool = True
    only: bool = False

    def __str__(self) -> str:
        return f"max_bytes={self.max_bytes},plans={self.plans:d},only={self.only:d}"


@dataclass(frozen=True)
class Limits:
    """The parts of PUREVK_LIMITS: what a method in a file may have."""

    nodes: int = 50_000
    symbols: int = 10_000
    depth: int = 128
    tensor_bytes: int = 1 << 40

    def __str__(self) -> str:
        return ",".join(f"{name}={number}" for name, number in dataclasses.asdict(self).items())


def _options(text: str, parsers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Parses options like `a=1,b=2`. The text before the first option has the key ""."""
    words = text.split(",")
    options: dict[str, Any] = {}
    while words and (option := re.fullmatch(r"\s*([a-z_]+)=([^/\\]*)", words[-1])):
        name, value = option.groups()
        if name not in parsers:
            raise ValueError(f"options of the names {', '.join(parsers)}, not {name[:40]}")
        try:
            options.setdefault(name, parsers[name](value))
        except ValueError as error:
            raise ValueError(f"{error} for {name}") from None
        words.pop()
    return {"": ",".join(words).strip(), **options}


def parse_cache(text: str, base: CacheOptions) -> CacheOptions:
    options = _options(text, {"max_bytes": parse_count, "plans": parse_flag, "only": parse_flag})
    folder = options.pop("")
    try:
        options |= {"on": parse_flag(folder)} if folder else {}
    except ValueError:
        if not (folder.startswith("~") or os.path.dirname(folder)):
            raise ValueError(f"0, 1 or a folder; write {os.path.join('.', folder)[:40]}") from None
        options |= {"on": True, "folder": folder}
    return dataclasses.replace(base, **options)


def parse_limits(text: str, base: Limits) -> Limits:
    options = _options(text, dict.fromkeys(dataclasses.asdict(base), parse_count))
    if unknown := options.pop(""):
        raise ValueError(f"name=number, not {unknown[:40]}")
    return dataclasses.replace(base, **options)


def _option(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}={text}" if text else ""


def _unless(name: str) -> Callable[[str], str]:
    return lambda text: "" if parse_flag(text) else name


RENAMED: dict[str, tuple[str, Callable[[str], str]]] = {
    "PUREVK_CACHE_DIR": (
        "PUREVK_CACHE",
        lambda text: text if not text or text[0] == "~" else os.path.join(".", text),
    ),
    "PUREVK_CACHE_MAX_BYTES": ("PUREVK_CACHE", _option("max_bytes")),
    "PUREVK_ASSERT_CACHED": ("PUREVK_CACHE", _option("only")),
    "PUREVK_KEEP_PLANS": ("PUREVK_CACHE", lambda text: f"plans={text}"),
    "PUREVK_TEXELS": ("PUREVK_DISABLE", _unless("texels")),
    "PUREVK_FRAGMENTS": ("PUREVK_DISABLE", _unless("fragments")),
    "PUREVK_MAX_NODES": ("PUREVK_LIMITS", _option("nodes")),
    "PUREVK_MAX_SYMBOLS": ("PUREVK_LIMITS", _option("symbols")),
    "PUREVK_MAX_DEPTH": ("PUREVK_LIMITS", _option("depth")),
    "PUREVK_MAX_TENSOR_BYTES": ("PUREVK_LIMITS", _option("tensor_bytes")),
    "PUREVK_POLL": ("", lambda text: ""),
    "PUREVK_RECORDINGS": ("", lambda text: ""),
}
"""Old names of variables, which work until the next release: the new name (empty: the variable has no
effect), and what turns the old text into the new one."""

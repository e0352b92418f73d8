"""The SPIR-V of kernels: from the cache, or compiled and kept there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from purevk.cache import Cache, CacheKey, default_cache
from purevk.errors import KernelNotCachedError, ShaderCompilerError
from purevk.shaders.source import CompileJob

_log = logging.getLogger("purevk")

WARM_UP = (
    "run `purevk warmup` with the model, the same device and the same PUREVK_CACHE; or allow"
    ' compiling: take only=1 out of PUREVK_CACHE, and load without compile="never"'
)
_SHOWN = 4  # templates of missing kernels in a message, and lines of a difference


def _describe_missing(keys: Sequence[CacheKey], cache: Cache) -> str:
    """The templates of keys that are not in the cache, and how the first key differs from the nearest
    entry."""
    for key in keys:
        _log.debug("not in the cache: %s, %s", key.template, dict(key.macros))
    counts = Counter(key.template for key in keys)
    lines = [
        template if count == 1 else f"{count} of {template}"
        for template, count in counts.most_common(_SHOWN)
    ]
    if len(counts) > _SHOWN:
        lines.append(f"and those of {len(counts) - _SHOWN} more")
    nearest = " / ".join(cache.explain_miss(keys[0]).splitlines()[:_SHOWN])
    return "; ".join(lines) + f". {keys[0].template}: {nearest}"


@dataclass(frozen=True)
class Compiled:
    """What `load_or_compile` found.

    Attributes:
        spirv: by key.
        fresh: the keys that were not in the cache.
        overridden: the keys whose SPIR-V PUREVK_OVERRIDE gives in place of purevk's own.
    """

    spirv: dict[CacheKey, bytes]
    fresh: tuple[CacheKey, ...] = ()
    overridden: frozenset[CacheKey] = frozenset()


def load_or_compile(
    jobs: Mapping[CacheKey, Callable[[], CompileJob]],
    cache: Cache,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    may_compile: bool = True,
) -> Compiled:
    """The SPIR-V of every key: from the cache, and compiled (and kept) where it is not there. The
    compiler is loaded only if something has to be compiled.

    Args:
        jobs: what to compile for a key; called only where it is compiled.
        threads, progress: as `purevk.shaders.shaderc.compile_many` takes them; the progress counts only
            what is compiled.
        may_compile: False raises where something has to be compiled.

    Raises:
        KernelNotCachedError: a kernel is not in the cache, and `may_compile` is False.
        ShaderCompilerError: a shader does not compile, or must be compiled and there is no
            compiler.
    """
    cached = {key: spirv for key in jobs if (spirv := cache.get_spirv(key)) is not None}
    fresh = tuple(key for key in jobs if key not in cached)
    if not fresh:
        return Compiled(cached)
    if not may_compile:
        raise KernelNotCachedError(
            f"kernels are not in the cache and must not be compiled: {len(fresh)}",
            where=str(cache),
            why=_describe_missing(fresh, cache),
            next=WARM_UP,
        )
    from purevk.shaders import shaderc  # a warm start does without it

    try:
        results = shaderc.compile_many([jobs[key]() for key in fresh], threads, progress)
    except ShaderCompilerError as error:
        if not error.why.startswith("tried"):
            raise
        raise ShaderCompilerError(
            f"kernels are not in the cache and no compiler was found: {len(fresh)}",
            where=str(cache),
            why=error.why,
            next=error.next,
        ) from error
    compiler = shaderc.load()
    for key, spirv in zip(fresh, results):
        cache.put_spirv(key, spirv, {"compiler": compiler.version, "origin": compiler.origin})
        cached[key] = spirv
    return Compiled(cached, fresh)


def compile_cached(
    jobs: Sequence[CompileJob],
    cache: Cache | None = None,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[bytes]:
    """The SPIR-V of every job, in order; see `load_or_compile`. Jobs with the same key are compiled
    once.

    Args:
        cache: None: `default_cache()`.
    """
    cache = default_cache() if cache is None else cache
    keys = [CacheKey.of(job) for job in jobs]
    wanted = {key: partial(_same, job) for key, job in zip(keys, jobs)}
    spirv = load_or_compile(wanted, cache, threads=threads, progress=progress).spirv
    return [spirv[key] for key in keys]


def _same(job: CompileJob) -> CompileJob:
    return job

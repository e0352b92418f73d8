"""The SPIR-V of shaders: from the cache, or compiled and kept there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from purevk.cache.store import Cache, default_cache
from purevk.errors import ShaderCompilerError
from purevk.shaders import shaderc
from purevk.shaders.cache_entry import CacheKey


@dataclass(frozen=True)
class Compiled:
    """What `load_or_compile` found.

    Attributes:
        spirv: by key.
        fresh: the keys that were not in the cache.
        seconds: the time that their compilation took.
    """

    spirv: dict[CacheKey, bytes]
    fresh: tuple[CacheKey, ...] = ()
    seconds: float = 0.0


def load_or_compile(
    jobs: Mapping[CacheKey, Callable[[], shaderc.CompileJob]],
    cache: Cache,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Compiled:
    """The SPIR-V of every key: from the cache, and compiled (and kept) where it is not there. The
    compiler is loaded only if something has to be compiled.

    Args:
        jobs: what to compile for a key; called only where it is compiled.
        threads, progress: as `purevk.shaders.shaderc.compile_many` takes them; the progress counts only
            what is compiled.

    Raises:
        ShaderCompilerError: a shader does not compile, or must be compiled and there is no
            compiler.
    """
    found = {key: spirv for key in jobs if (spirv := cache.get_spirv(key)) is not None}
    fresh = tuple(key for key in jobs if key not in found)
    if not fresh:
        return Compiled(found)
    start = time.perf_counter()
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
        found[key] = spirv
    return Compiled(found, fresh, time.perf_counter() - start)


def compile_cached(
    jobs: Sequence[shaderc.CompileJob],
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
    found = load_or_compile(wanted, cache, threads=threads, progress=progress).spirv
    return [found[key] for key in keys]


def _same(job: shaderc.CompileJob) -> shaderc.CompileJob:
    return job

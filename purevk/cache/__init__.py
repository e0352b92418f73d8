"""What purevk keeps on disk: SPIR-V, the drivers' pipeline caches, tuning results; and bundles of
SPIR-V in one file.

A key is computed in Python from the sources and settings, so a warm start never loads the compiler.
Nothing here fails because of the disk: a damaged entry is a miss, and a folder that cannot be
written leaves the cache in memory.

- `store.py`: `Cache`, with a layer in memory, and `default_cache`.
- `folder.py`: the files of a cache folder.
- `compiled.py`: SPIR-V from the cache, or from the compiler.
"""

from purevk.cache.compiled import Compiled, compile_cached, load_or_compile
from purevk.cache.store import Cache, CacheStats, default_cache
from purevk.shaders.cache_entry import CacheKey

__all__ = [
    "Cache",
    "CacheKey",
    "CacheStats",
    "Compiled",
    "compile_cached",
    "default_cache",
    "load_or_compile",
]

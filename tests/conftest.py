"""Settings for the whole test suite."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.composite_operators import collect_composite_operators_once

# Tables of one width wherever the tests run. Verify the IR after every pass, show no progress bars,
# leave nothing to eager torch, and leave the user's cache alone. Kernels are kept from one run of
# the tests to the next, as they are for a user.
os.environ["COLUMNS"] = "120"
os.environ.setdefault("PUREVK_VERIFY", "1")
os.environ.setdefault("PUREVK_PROGRESS", "0")
os.environ.setdefault("PUREVK_EAGER_FALLBACK", "0")
os.environ.setdefault(
    "PUREVK_CACHE", str(Path(__file__).parent.parent / ".pytest_cache" / "purevk")
)

# The drivers keep their shaders in one place, whatever cache folder a test has.
os.environ.setdefault(
    "MESA_SHADER_CACHE_DIR", os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
)


def pytest_configure(config: pytest.Config) -> None:
    """lavapipe compiles the kernels of the landing tier without LLVM's optimizations, in two thirds of
    the time. The nightly tier has them."""
    if config.getoption("--tier"):
        os.environ.setdefault("GALLIVM_PERF", "nopt")


def pytest_collection_finish() -> None:
    """The garbage collector need not visit torch and the tests again and again, nor all that an export
    makes: by its own thresholds it took a fifth of the time of tests that export."""
    collect_composite_operators_once()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# The first one also in an environment that was made before there was such a plugin.
pytest_plugins = ["purevk.testing.plugin", "pytester", "tests.budget", "tests.tiers"]


@pytest.fixture(scope="session", autouse=True)
def gpu_traits() -> Iterator[None]:
    """With PUREVK_TEST_TRAITS=gpu, a software device gets the traits of a small GPU. So the
    kernels and tiles of GPUs are tested without one. With "least", it is a GPU of the least limits
    that Vulkan allows."""
    if os.environ.get("PUREVK_TEST_TRAITS") == "least":
        from tests.least_device import simulate

        with pytest.MonkeyPatch.context() as patch:
            simulate(patch)
            yield
        return
    if os.environ.get("PUREVK_TEST_TRAITS") != "gpu":
        yield
        return
    from purevk.graph import context
    from purevk.tuning import DEFAULT, SOFTWARE

    traits_of = context.traits_of

    def as_gpu(*args: Any) -> Any:
        traits = traits_of(*args)
        if traits.profile is not SOFTWARE:
            return traits
        return dataclasses.replace(traits, profile=DEFAULT, cores=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "traits_of", as_gpu)
        yield


_GROWN = 300 << 20  # bytes
_resident_after_release = 0


def pytest_runtest_logfinish() -> None:
    """Frees what exports leave behind, each time a process has grown by `_GROWN`."""
    global _resident_after_release
    if _resident() > _resident_after_release + _GROWN:
        _release()
        _resident_after_release = _resident()


def _resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _release() -> None:
    """torch's cache of fake tensors holds every program that executorch lowered, with its weights;
    executorch's cache of equal nodes holds their graphs. Neither has a bound."""
    fake_tensors = sys.modules.get("torch._subclasses.fake_tensor")
    if fake_tensors is not None:
        fake_tensors.FakeTensorMode.cache_clear()
    backends = sys.modules.get("executorch.exir.backend.utils")
    if backends is not None:
        backends.is_same_node.cache_clear()
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)

"""A device with what programs on it share: the cache, the compiled kernels, the traits that kernels are chosen by."""

from __future__ import annotations

import os
import threading
import weakref

from purevk import api, knobs
from purevk.cache import Cache, default_cache
from purevk.graph.kernels import KernelStore
from purevk.memory_planner import ALIGNMENT
from purevk.ops.lowering import TEXEL_FORMATS, DeviceTraits

_lock = threading.Lock()
_default: "Context | None" = None


class Context:
    """A device and its kernels.

    Args:
        device: its device; it is closed with the context.
        cache: the on-disk cache; None: the folder that the knobs name.
    """

    def __init__(self, device: api.Device, cache: Cache | None = None) -> None:
        self.device = device
        self.cache = cache if cache is not None else default_cache()
        self.traits = traits_of(device)
        self.kernels = KernelStore(device, self.cache, self.traits)
        self.programs: weakref.WeakSet = weakref.WeakSet()

    @property
    def closed(self) -> bool:
        return self.device.closed

    def close(self) -> None:
        """Closes every program on the device, then the device."""
        for program in list(self.programs):
            program.close()
        if not self.device.closed:
            self.kernels.close()
            self.device.close()

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def traits_of(device: api.Device) -> DeviceTraits:
    """What the choice of kernels depends on, read from a device."""
    limits = device.limits
    return DeviceTraits(
        features=frozenset(device.features),
        subgroup_size=device.physical.subgroup_size,
        cores=device.core_count or (device.kind == "cpu" and os.cpu_count() or 0),
        is_cpu=device.kind == "cpu",
        max_storage_range=limits.max_storage_buffer_range,
        max_shared_memory=limits.max_shared_memory,
        max_workgroups=limits.max_workgroup_count,
        max_invocations=min(limits.max_workgroup_invocations, limits.max_workgroup_size[0]),
        storage_alignment=limits.min_storage_buffer_alignment,
        max_texels=_max_texels(device),
    )


def _max_texels(device: api.Device) -> int:
    """Elements of a texel buffer; 0 if there are none of the formats that kernels use, or not wherever memory is planned."""
    usable = knobs.TEXELS() and device.limits.min_texel_buffer_alignment <= ALIGNMENT
    usable = usable and all(device.physical.has_texel_format(form) for form in TEXEL_FORMATS)
    return device.limits.max_texel_buffer_elements if usable else 0


def default_context() -> Context:
    """The context of the best device (or the one that PUREVK_DEVICE names), made on first use."""
    global _default
    with _lock:
        if _default is None or _default.closed:
            _default = Context(api.open_device())
        return _default

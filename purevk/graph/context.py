"""A device, and what programs on it share: the cache, the kernels, the device traits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from typing import Any, Protocol

from purevk import api, knobs
from purevk.cache import Cache, default_cache
from purevk.closing import Closing
from purevk.errors import InputError, ShaderCompilerError
from purevk.graph.fragments import FragmentOrder
from purevk.graph.kernels import KernelStore
from purevk.graph.tuned import measured_choices
from purevk.lower.lowering import TEXEL_FORMATS
from purevk.memory_planner import ALIGNMENT
from purevk.tuning import (
    DeviceIdentity,
    DeviceProfile,
    DeviceTraits,
    choose_profile,
    default_profile,
)

# Features of nearly every desktop GPU, for work without a device.
_TYPICAL = (
    "storage_16bit",
    "storage_8bit",
    "float16",
    "int8",
    "int16",
    "int64",
    "subgroup_basic",
    "subgroup_vote",
    "subgroup_arithmetic",
    "subgroup_ballot",
    "subgroup_shuffle",
    "subgroup_shuffle_relative",
    "subgroup_clustered",
    "subgroup_quad",
    "subgroup_extended_types",
    "subgroup_size_control",
    "vulkan_memory_model",
    "scalar_block_layout",
    "integer_dot_product",
    "buffer_device_address",
    "pipeline_cache",
    "timestamp",
    "host_query_reset",
)
_lock = threading.Lock()
_default: Context | None = None


class Closable(Protocol):
    """A program, which a context closes before its device."""

    def close(self) -> None: ...


class Context(Closing):
    """A device and its kernels.

    Args:
        device: its device; it is closed with the context.
        cache: the on-disk cache; None: the folder that the knobs name.
    """

    def __init__(self, device: api.Device, cache: Cache | None = None) -> None:
        knobs.warn_of_names()
        knobs.check()
        self.device = device
        self.cache = cache if cache is not None else default_cache()
        self.traits = traits_of(device, self.cache)
        self.kernels = KernelStore(device, self.cache, self.traits)
        self.traits = dataclasses.replace(self.traits, choices=measured_choices(self.kernels))
        if self.traits.coopmat_columns and device.features.fragments:
            order = FragmentOrder(self.kernels)
            self.traits = dataclasses.replace(self.traits, fragment_order=order)
        self.programs: weakref.WeakSet[Closable] = weakref.WeakSet()
        # The device in another API, by the number that it has there; None if it is another device.
        self.external: dict[int, Any] = {}

    @property
    def closed(self) -> bool:
        return self.device.closed

    @property
    def lost(self) -> bool:
        """Whether the device is lost. All calls on it fail; another context works."""
        return self.device.lost

    def close(self) -> None:
        """Closes every program on the device, then the device."""
        with contextlib.ExitStack() as stack:  # an error keeps nothing else from being closed
            if not self.device.closed:
                stack.callback(self.device.close)
                stack.callback(self.kernels.close)
            for program in list(self.programs):
                stack.callback(program.close)


def traits_of(device: api.Device, cache: Cache | None = None) -> DeviceTraits:
    """The device traits, which the choice of kernels depends on. The cache keeps what the compiler
    was asked."""
    cache = cache or Cache(None)
    limits, profile = device.limits, profile_of(device.physical)
    shapes = _coopmat_shapes(device, cache) if profile.has_fast_matrix_cores else []
    bytes_shapes = _fragments(device, "int8", "int32") if shapes and device.features.int8 else []
    matrices = _workgroup_matrices(device, cache) if shapes else ()
    shape = max(shapes, key=lambda shape: shape[0] * shape[1] * shape[2], default=None)
    size = _subgroup_size(device, profile)
    bfloat16 = _fragments(device, "bfloat16") if shapes and _knows_bfloat16(device, cache) else []
    return DeviceTraits(
        features=frozenset(device.features),
        subgroup_size=size,
        cores=device.core_count or ((device.kind == "cpu" and os.cpu_count()) or 0),
        profile=profile,
        max_storage_range=limits.max_storage_buffer_range,
        max_shared_memory=limits.max_shared_memory,
        max_workgroups=limits.max_workgroup_count,
        max_invocations=min(limits.max_workgroup_invocations, limits.max_workgroup_size[0]),
        max_texels=_max_texels(device),
        coopmat_shape=shape,
        coopmat_columns=_columns(size, shapes, 16),
        bfloat16_columns=_columns(size, bfloat16, 16),
        int8_columns=_columns(size, bytes_shapes, 32),
        workgroup_matrices=matrices,
        max_workgroup_matrix=device.physical.matrix2_max_dimension if matrices else 0,
        bfloat16_fragments=shape in bfloat16,
        bfloat16_matrices=bool(bfloat16) and set(matrices) <= set(_matrices(device, "bfloat16")),
    )


def identity_of(physical: api.PhysicalDevice) -> DeviceIdentity:
    """What a device's family is recognized by."""
    return DeviceIdentity(
        vendor_id=physical.vendor_id,
        device_id=physical.device_id,
        kind=physical.kind,
        name=physical.name,
        driver=physical.driver,
        subgroup_size=physical.subgroup_size,
        min_subgroup_size=physical.limits.min_subgroup_size,
        features=frozenset(physical.available),
    )


def profile_of(physical: api.PhysicalDevice) -> DeviceProfile:
    """The profile by which kernels are chosen for a device."""
    return choose_profile(identity_of(physical))


def typical_traits() -> DeviceTraits:
    """The traits of a typical desktop GPU, without the features in PUREVK_DISABLE."""
    from purevk.api.features import Features, choose

    return DeviceTraits(
        features=frozenset(choose(Features(_TYPICAL))),
        subgroup_size=32,
        cores=32,
        profile=default_profile(),
        max_storage_range=2**31,
        max_shared_memory=32768,
        max_invocations=1024,
    )


def _coopmat_shapes(device: api.Device, cache: Cache) -> list[tuple[int, int, int]]:
    """The shapes (float16 operands, float32 sums) that a subgroup's matrix cores multiply and that
    fit the kernels' tiles."""
    features = device.features
    needed = (
        "cooperative_matrix",
        "float16",
        "storage_16bit",
        "subgroup_size_control",
        "maintenance4",
    )
    if device.physical.api_version < (1, 3, 0) or not all(
        getattr(features, name) for name in needed
    ):
        return []
    shapes = _fragments(device, "float16")
    return (
        shapes
        if shapes and _compiler_knows("GL_KHR_cooperative_matrix", device.physical.name, cache)
        else []
    )


def _fragments(device: api.Device, dtype: str, sums: str = "float32") -> list[tuple[int, int, int]]:
    """The shapes of a subgroup for operands and sums of these types that fit the kernels' tiles."""
    return [
        (shape.m, shape.n, shape.k)
        for shape in device.physical.matrix_shapes
        if (shape.a, shape.b, shape.c, shape.result) == (dtype, dtype, sums, sums)
        and shape.scope == "subgroup"
        and not shape.flexible
        and not shape.saturating
        and 16 % shape.m == 0
        and 16 % shape.n == 0
        and 32 % shape.k == 0
    ]


def _subgroup_size(device: api.Device, profile: DeviceProfile) -> int:
    """`DeviceTraits.subgroup_size`: that of the profile where the device can have it."""
    limits, size = device.limits, profile.subgroup_size
    fits = limits.min_subgroup_size <= size <= limits.max_subgroup_size
    return size if fits and device.chooses_subgroup_size else device.physical.subgroup_size


def _columns(size: int, shapes: list[tuple[int, int, int]], depth: int) -> tuple[int, ...]:
    """`DeviceTraits.coopmat_columns` of these shapes, for fragments of a depth."""
    if size != 32:
        return ()
    return tuple(columns for columns in (8, 16) if (16, columns, depth) in shapes)


def _knows_bfloat16(device: api.Device, cache: Cache) -> bool:
    """Whether the device's matrix cores and the compiler know bfloat16."""
    return (
        device.features.bfloat16
        and ("bfloat16", "shaderBFloat16CooperativeMatrix") in device.physical.feature_fields
        and _compiler_knows("GL_EXT_bfloat16", device.physical.name, cache)
    )


_MATRIX_FIELDS = (
    "cooperativeMatrixReductions",
    "cooperativeMatrixConversions",
    "cooperativeMatrixPerElementOperations",
    "cooperativeMatrixTensorAddressing",
)


def _workgroup_matrices(device: api.Device, cache: Cache) -> tuple[tuple[int, int, int, int], ...]:
    """`DeviceTraits.workgroup_matrices` of a device that has cooperative matrices."""
    physical = device.physical
    has_all = all(
        ("cooperative_matrix2", name) in physical.feature_fields for name in _MATRIX_FIELDS
    )
    if not device.features.cooperative_matrix2 or not has_all:
        return ()
    found = _matrices(device, "float16")
    known = found and _compiler_knows("GL_NV_cooperative_matrix2", physical.name, cache)
    return found if known else ()


def _matrices(device: api.Device, dtype: str) -> tuple[tuple[int, int, int, int], ...]:
    """The shapes of a workgroup for operands of a type."""
    return tuple(
        (shape.m, shape.n, shape.k, shape.invocations)
        for shape in device.physical.matrix_shapes
        if (shape.a, shape.b, shape.c, shape.result) == (dtype, dtype, "float32", "float32")
        and shape.scope == "workgroup"
        and shape.flexible
        and not shape.saturating
    )


def _compiler_knows(extension: str, device: str, cache: Cache) -> bool:
    """Whether the compiler knows a GLSL extension. The cache keeps a yes, so that a warm start
    loads no compiler. Without a compiler the answer is that of the last one, or yes: all kernels
    come from the cache or a bundle. Nor is the compiler asked with the option `only` of PUREVK_CACHE."""
    from purevk.shaders import shaderc

    kept = cache.get_tuning(device, extension)
    if kept or knobs.CACHE().only:
        return kept is not False
    try:
        known = shaderc.load().supports(extension)
    except ShaderCompilerError:
        return kept is not False
    if known is not kept:
        cache.put_tuning(device, extension, known)
    return known


def _max_texels(device: api.Device) -> int:
    """Elements of a texel buffer. 0 if a format that kernels use is missing, or if not all memory
    of plans can be one."""
    usable = device.features.texels and device.limits.min_texel_buffer_alignment <= ALIGNMENT
    usable = usable and all(device.physical.has_texel_format(form) for form in TEXEL_FORMATS)
    return device.limits.max_texel_buffer_elements if usable else 0


def context_of(given: Context | None) -> Context:
    """The context that a caller gave, or the default one.

    Raises:
        InputError: it is something else.
    """
    if given is None:
        return default_context()
    if not isinstance(given, Context):
        raise InputError(
            f"the context is {given!r}",
            why=f"a {Context.__module__}.Context is expected, not a {type(given).__name__}",
            next="leave it out, and name the device in PUREVK_DEVICE: its index, or a part of its"
            " name",
        )
    return given


def default_context() -> Context:
    """The context of the best device (or the one that PUREVK_DEVICE names), made on first use, and
    again after it was closed or its device lost."""
    global _default
    api.check_fork()
    with _lock:
        if _default is None or _default.closed or _default.lost:
            _default = Context(api.open_device())
        return _default

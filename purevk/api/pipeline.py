"""Shader modules, layouts, pipeline caches and compute pipelines."""

from __future__ import annotations

import concurrent.futures
import numbers
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from purevk import knobs
from purevk.api import vk
from purevk.api.device import DeviceObject
from purevk.errors import DeviceError, InputError
from purevk.pool import Pool

if TYPE_CHECKING:
    from purevk.api.device import Device

COMPUTE_STAGE = 0x20
PUSH_BYTES = 128  # what every Vulkan device offers
DESCRIPTOR_TYPES = {
    "storage": vk.const("VK_DESCRIPTOR_TYPE_STORAGE_BUFFER"),
    "texel": vk.const("VK_DESCRIPTOR_TYPE_UNIFORM_TEXEL_BUFFER"),
}
_CAPTURE_STATISTICS = vk.const("VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR")
_OBJECT_PIPELINE = vk.const("VK_OBJECT_TYPE_PIPELINE")


# The features that capabilities of SPIR-V need. Some drivers crash where they are off.
_OP_CAPABILITY = 2 << 16 | 17
_CAPABILITIES = {
    9: "float16", 10: "float64", 11: "int64", 22: "int16", 39: "int8", 4433: "storage_16bit", 4448: "storage_8bit",
}  # fmt: skip


class ShaderModule(DeviceObject):
    """SPIR-V on a device. `code` is bytes, or any contiguous buffer, of whole 32-bit words in the
    host's order.

    Raises:
        InputError: the bytes are not SPIR-V.
        DeviceError: the device lacks a feature that it needs, or the feature is off.
    """

    def __init__(self, device: Device, code: Any, label: str = "") -> None:
        view = memoryview(code).cast("B")
        if view.nbytes < 20 or view.nbytes % 4 or view[:4].tobytes() != b"\x03\x02\x23\x07":
            raise InputError(
                f"{view.nbytes} bytes are not a SPIR-V module",
                why="a module is whole 32-bit words, at least 5, and begins with 0x07230203",
            )
        functions, vk_device = device.functions, device.handle
        words = vk.ffi.new("uint32_t[]", view.nbytes // 4)
        vk.ffi.memmove(words, vk.ffi.from_buffer(view), view.nbytes)
        at, missing = 5, []  # capabilities come first
        while at + 1 < len(words) and words[at] == _OP_CAPABILITY:
            name = _CAPABILITIES.get(words[at + 1])
            if name is not None and name not in device.features:
                missing.append(name)
            at += 2
        if missing:
            raise DeviceError(
                f"a kernel needs {', '.join(missing)}",
                where=label or device.name,
                why=f"{device.name} lacks the feature, or PUREVK_DISABLE switches it off",
                next="please report it with `purevk info`; float32 and int32 need no such feature",
            )
        info = vk.struct("VkShaderModuleCreateInfo", codeSize=view.nbytes, pCode=words)
        handle = vk.ffi.new("VkShaderModule *")
        vk.check(
            functions.vkCreateShaderModule(vk_device, info, vk.NULL, handle), "vkCreateShaderModule"
        )
        self.handle = module = handle[0]
        super().__init__(
            device, lambda: functions.vkDestroyShaderModule(vk_device, module, vk.NULL)
        )
        device.check()


class PipelineLayout(DeviceObject):
    """The layout of pipelines whose bindings 0 to n-1 of set 0 are of the given kinds, "storage" or
    "texel" (a uniform texel buffer), and that take `push_bytes` bytes of push constants. Get it
    from `PipelineLayout.shared`, so that equal layouts are one object.

    Attributes:
        kinds: of the bindings. n_texel: how many of them are texel buffers.
        handle: the VkPipelineLayout; set_layout: the VkDescriptorSetLayout.
    """

    def __init__(self, device: Device, kinds: tuple[str, ...], push_bytes: int) -> None:
        limits = device.limits
        n_texel, n_buffers = kinds.count("texel"), len(kinds)
        for count, limit, name in (
            (
                n_buffers - n_texel,
                limits.max_storage_buffers_per_stage,
                "maxPerStageDescriptorStorageBuffers",
            ),
            (n_texel, limits.max_texel_buffers_per_stage, "maxPerStageDescriptorSampledImages"),
        ):
            if count > limit:
                raise DeviceError(
                    f"A kernel with {count} buffers cannot run on {device.name}",
                    why=f"the device takes {limit} ({name})",
                    next="split the kernel",
                )
        if push_bytes < 0 or push_bytes % 4 or push_bytes > limits.max_push_constants:
            raise DeviceError(
                f"A kernel with {push_bytes} bytes of push constants cannot run on {device.name}",
                why=f"the device takes multiples of 4 up to {limits.max_push_constants}",
            )
        self.kinds, self.n_texel, self.push_bytes = kinds, n_texel, push_bytes
        functions, vk_device = device.functions, device.handle
        bindings = vk.ffi.new("VkDescriptorSetLayoutBinding[]", max(n_buffers, 1))
        for index, kind in enumerate(kinds):
            bindings[index].binding = index
            bindings[index].descriptorType = DESCRIPTOR_TYPES[kind]
            bindings[index].descriptorCount = 1
            bindings[index].stageFlags = COMPUTE_STAGE
        info = vk.struct(
            "VkDescriptorSetLayoutCreateInfo", bindingCount=n_buffers, pBindings=bindings
        )
        set_layout = vk.ffi.new("VkDescriptorSetLayout *")
        result = functions.vkCreateDescriptorSetLayout(vk_device, info, vk.NULL, set_layout)
        vk.check(result, "vkCreateDescriptorSetLayout")
        ranges = vk.ffi.new(
            "VkPushConstantRange[]", [{"stageFlags": COMPUTE_STAGE, "size": push_bytes}]
        )
        info = vk.struct(
            "VkPipelineLayoutCreateInfo",
            setLayoutCount=1,
            pSetLayouts=set_layout,
            pushConstantRangeCount=1 if push_bytes else 0,
            pPushConstantRanges=ranges,
        )
        handle = vk.ffi.new("VkPipelineLayout *")
        result = functions.vkCreatePipelineLayout(vk_device, info, vk.NULL, handle)
        if result < 0:
            functions.vkDestroyDescriptorSetLayout(vk_device, set_layout[0], vk.NULL)
            vk.fail(result, "vkCreatePipelineLayout")

        def destroy() -> None:
            functions.vkDestroyPipelineLayout(vk_device, handle[0], vk.NULL)
            functions.vkDestroyDescriptorSetLayout(vk_device, set_layout[0], vk.NULL)

        self.handle, self.set_layout = handle[0], set_layout[0]
        self.set_layout_number = int(vk.ffi.cast("uintptr_t", self.set_layout))
        super().__init__(device, destroy)

    @classmethod
    def shared(
        cls, device: Device, bindings: int | Sequence[str], push_bytes: int = PUSH_BYTES
    ) -> PipelineLayout:
        """The device's layout of that shape, made on first use and destroyed when nothing holds it
        any more.

        Args:
            bindings: the kind of each, or how many if all are storage buffers.
        """
        kinds = ("storage",) * bindings if isinstance(bindings, int) else tuple(bindings)
        unknown = set(kinds) - set(DESCRIPTOR_TYPES)
        if unknown:
            raise InputError(
                f"A binding cannot be of kind {unknown.pop()!r}",
                why=f"the kinds are {', '.join(DESCRIPTOR_TYPES)}",
            )
        key = (kinds, push_bytes)
        with device.core.lock:
            layout = device.layouts.get(key)
            if layout is None or not layout.alive:
                layout = device.layouts[key] = cls(device, kinds, push_bytes)
            return layout


class PipelineCache(DeviceObject):
    """The driver's own cache of compiled pipelines.

    Args:
        device: its device.
        data: bytes of an earlier `get_data()`. Bytes of another device or driver, or damaged ones,
            are left aside.

    Attributes:
        accepted: whether `data` was given to the driver.
    """

    def __init__(self, device: Device, data: bytes = b"") -> None:
        physical = device.physical
        self.accepted = False
        if len(data) >= 32:
            size, kind, vendor, model = struct.unpack_from("<4I", data)
            ours = (1, physical.vendor_id, physical.device_id, physical.pipeline_cache_uuid)
            self.accepted = 32 <= size <= len(data) and (kind, vendor, model, data[16:32]) == ours
        functions, vk_device = device.functions, device.handle
        initial = vk.ffi.from_buffer(data)
        info = vk.struct(
            "VkPipelineCacheCreateInfo",
            initialDataSize=len(data) if self.accepted else 0,
            pInitialData=initial if self.accepted else vk.NULL,
        )
        handle = vk.ffi.new("VkPipelineCache *")
        vk.check(
            functions.vkCreatePipelineCache(vk_device, info, vk.NULL, handle),
            "vkCreatePipelineCache",
        )
        self.handle = cache = handle[0]
        super().__init__(
            device, lambda: functions.vkDestroyPipelineCache(vk_device, cache, vk.NULL)
        )

    def get_data(self) -> bytes:
        """What to give to `PipelineCache` in a later process. Starts with the driver's 32-byte
        header."""
        functions, vk_device = self.device.functions, self.device.handle
        size = vk.ffi.new("size_t *")
        while True:  # another thread may add pipelines between the two calls
            result = functions.vkGetPipelineCacheData(vk_device, self.handle, size, vk.NULL)
            vk.check(result, "vkGetPipelineCacheData")
            data = vk.ffi.new("char[]", max(size[0], 1))
            result = functions.vkGetPipelineCacheData(vk_device, self.handle, size, data)
            if result != vk.INCOMPLETE:
                vk.check(result, "vkGetPipelineCacheData")
                break
        content: bytes = vk.ffi.buffer(data, size[0])[:]
        return content


@dataclass(frozen=True)
class PipelineSpec:
    """What `ComputePipeline` is made from: see there."""

    spirv: Any
    bindings: int | Sequence[str]
    push_bytes: int = PUSH_BYTES
    specialization: Mapping[int, int | float | bool] = field(default_factory=dict)
    required_subgroup_size: int | None = None
    label: str = ""
    entry: str = "main"


class ComputePipeline(DeviceObject):
    """A compute pipeline. May be made from several threads at once: the compiler runs without the
    interpreter's lock.

    Args:
        device: its device.
        spirv: bytes, a buffer of 32-bit words, or a `ShaderModule` (which then stays the caller's).
        bindings: 0 to n-1 of set 0: the kind of each, "storage" or "texel", or n if all are storage
            buffers.
        push_bytes: size of the push-constant range, a multiple of 4.
        specialization: constant id -> value: bool or int as 32 bits (signed or unsigned), float as
            float32.
        required_subgroup_size: needs a device that `chooses_subgroup_size`.
        cache: a `PipelineCache`, or None.
        label: name in errors and validation messages.
        entry: the shader's entry point.

    Attributes:
        handle: the VkPipeline. layout: the shared `PipelineLayout`.

    Raises:
        InputError: not SPIR-V, or a specialization value out of range. DeviceError: the driver
            refused it.
    """

    def __init__(
        self,
        device: Device,
        spirv: Any,
        bindings: int | Sequence[str],
        *,
        push_bytes: int = PUSH_BYTES,
        specialization: Mapping[int, int | float | bool] | None = None,
        required_subgroup_size: int | None = None,
        cache: PipelineCache | None = None,
        label: str = "",
        entry: str = "main",
    ) -> None:
        self.label = label
        layout = self.layout = PipelineLayout.shared(device, bindings, push_bytes)
        kept: list[Any] = []
        module = spirv if isinstance(spirv, ShaderModule) else ShaderModule(device, spirv, label)
        functions, vk_device = device.functions, device.handle
        try:
            name = vk.ffi.new("char[]", entry.encode())
            info = vk.struct(
                "VkComputePipelineCreateInfo",
                flags=_CAPTURE_STATISTICS if device.features.pipeline_statistics else 0,
                layout=layout.handle,
                basePipelineIndex=-1,
            )
            stage = info.stage
            stage.sType = vk.structure_type("VkPipelineShaderStageCreateInfo")
            stage.pNext = _subgroup_size(device, required_subgroup_size, label, kept)
            stage.stage = COMPUTE_STAGE
            stage.module = module.handle
            stage.pName = name
            stage.pSpecializationInfo = _specialization(specialization or {}, label, kept)
            kept_in = vk.NULL
            if cache is not None and device.features.pipeline_cache:
                kept_in = cache.handle
            handle = vk.ffi.new("VkPipeline *")
            result = functions.vkCreateComputePipelines(
                vk_device, kept_in, 1, info, vk.NULL, handle
            )
            vk.check(result, "vkCreateComputePipelines", where=label)
        finally:
            if module is not spirv:
                module.destroy()
        self.handle = pipeline = handle[0]
        super().__init__(device, lambda: functions.vkDestroyPipeline(vk_device, pipeline, vk.NULL))
        device.set_name(_OBJECT_PIPELINE, pipeline, label)
        device.check()

    def __repr__(self) -> str:
        return f"<ComputePipeline {self.label or hex(id(self))}>"


def create_pipelines(
    device: Device,
    specs: Sequence[PipelineSpec],
    *,
    cache: PipelineCache | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[ComputePipeline]:
    """Makes many pipelines in parallel, in the order of `specs`.

    Args:
        device: their device.
        specs: what to make.
        cache: shared by all of them.
        threads: None reads PUREVK_COMPILE_THREADS; 0: one a core.
        progress: called with the count made so far, from any thread.

    If one fails, those already made are destroyed and its error is raised.
    """
    wanted = (knobs.COMPILE_THREADS() if threads is None else threads) or os.cpu_count() or 1
    done = iter(range(1, len(specs) + 1))

    def make(spec: PipelineSpec) -> ComputePipeline:
        pipeline = ComputePipeline(
            device,
            spec.spirv,
            spec.bindings,
            push_bytes=spec.push_bytes,
            specialization=spec.specialization,
            required_subgroup_size=spec.required_subgroup_size,
            cache=cache,
            label=spec.label,
            entry=spec.entry,
        )
        if progress is not None:
            progress(next(done))
        return pipeline

    if wanted == 1 or len(specs) < 2:
        jobs: list[concurrent.futures.Future[ComputePipeline]] = []
        for spec in specs:
            jobs.append(concurrent.futures.Future())
            try:
                jobs[-1].set_result(make(spec))
            except Exception as raised:
                jobs[-1].set_exception(raised)
                break
    else:
        with Pool(min(wanted, len(specs))) as pool:
            jobs = [pool.submit(make, spec) for spec in specs]
    error = next((found for job in jobs if (found := job.exception()) is not None), None)
    if error is None:
        return [job.result() for job in jobs]
    for job in jobs:
        if job.exception() is None:
            job.result().destroy()
    raise error


def _subgroup_size(device: Device, size: int | None, label: str, kept: list[Any]) -> Any:
    if size is None:
        return vk.NULL
    limits = device.limits
    allowed = device.chooses_subgroup_size
    if (
        not allowed
        or not limits.min_subgroup_size <= size <= limits.max_subgroup_size
        or size & (size - 1)
    ):
        offered = (
            f"powers of two from {limits.min_subgroup_size} to {limits.max_subgroup_size}"
            if allowed
            else "no choice"
        )
        raise DeviceError(
            f"Subgroups of {size} cannot be had on {device.name}",
            where=label,
            why=f"the device offers {offered}",
            next="leave required_subgroup_size out",
        )
    required = vk.struct(
        "VkPipelineShaderStageRequiredSubgroupSizeCreateInfo", requiredSubgroupSize=size
    )
    kept.append(required)
    return vk.ffi.cast("void *", required)


def _specialization(values: Mapping[int, int | float | bool], label: str, kept: list[Any]) -> Any:
    if not values:
        return vk.NULL
    data = b""
    for number, value in values.items():
        if isinstance(value, numbers.Integral):
            if not -(2**31) <= value < 2**32:
                raise InputError(
                    f"Specialization constant {number} = {value} does not fit 32 bits", where=label
                )
            data += struct.pack("=I", int(value) & 0xFFFFFFFF)
        elif isinstance(value, numbers.Real):
            data += struct.pack("=f", float(value))
        else:
            raise InputError(
                f"Specialization constant {number} is {value!r}",
                where=label,
                why="it must be a bool, int or float",
            )
    entries = vk.ffi.new(
        "VkSpecializationMapEntry[]",
        [
            {"constantID": number, "offset": 4 * index, "size": 4}
            for index, number in enumerate(values)
        ],
    )
    block = vk.ffi.from_buffer(data)
    info = vk.ffi.new(
        "VkSpecializationInfo *",
        {
            "mapEntryCount": len(values),
            "pMapEntries": entries,
            "dataSize": len(data),
            "pData": block,
        },
    )
    kept += [entries, block, info]
    return info

"""What a Vulkan device says of itself, read once and kept as plain values."""

from __future__ import annotations

import functools
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from purevk.api import features, vk

if TYPE_CHECKING:
    from purevk.api.instance import Instance

_TYPES = {0: "other", 1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}
_COMPONENTS = {
    0: "float16",
    1: "float32",
    2: "float64",
    3: "int8",
    4: "int16",
    5: "int32",
    6: "int64",
    7: "uint8",
    8: "uint16",
    9: "uint32",
    10: "uint64",
    1000141000: "bfloat16",
    1000491002: "float8_e4m3",
    1000491003: "float8_e5m2",
}
_SCOPES = {1: "device", 2: "workgroup", 3: "subgroup", 5: "queue_family"}
DEVICE_LOCAL, HOST_VISIBLE, HOST_COHERENT, HOST_CACHED = 1, 2, 4, 8
_UNIFORM_TEXEL_BUFFER = 0x8  # VkFormatFeatureFlagBits


@dataclass(frozen=True)
class MemoryHeap:
    """A heap: its size in bytes and whether it is the device's own."""

    size: int
    device_local: bool


@dataclass(frozen=True)
class MemoryType:
    """A memory type: its heap's number and its property flags (DEVICE_LOCAL, HOST_VISIBLE, ...)."""

    heap: int
    flags: int


@dataclass(frozen=True)
class Limits:
    """The limits that matter for compute. Sizes and alignments in bytes."""

    max_storage_buffer_range: int
    max_push_constants: int
    max_allocations: int
    max_allocation: int
    max_buffer_size: int  # 0: the driver does not say
    max_shared_memory: int
    max_workgroup_count: tuple[int, int, int]
    max_workgroup_size: tuple[int, int, int]
    max_workgroup_invocations: int
    max_storage_buffers_per_stage: int
    max_texel_buffers_per_stage: int
    min_storage_buffer_alignment: int
    max_texel_buffer_elements: int
    min_texel_buffer_alignment: int
    non_coherent_atom: int
    min_subgroup_size: int
    max_subgroup_size: int

    @property
    def max_buffer_memory(self) -> int | None:
        """The most bytes of a buffer in one allocation; None: the driver does not say."""
        return min(filter(None, (self.max_allocation, self.max_buffer_size)), default=None)


@dataclass(frozen=True)
class MatrixShape:
    """A shape and types that the matrix cores multiply.

    `m`, `n` and `k` are sizes, or granularities if `flexible`; types are names such as "float16";
    `scope` is "subgroup" or "workgroup"; `invocations` is the workgroup size that a flexible entry
    asks for (0: any).
    """

    m: int
    n: int
    k: int
    a: str
    b: str
    c: str
    result: str
    saturating: bool
    scope: str
    flexible: bool = False
    invocations: int = 0


class PhysicalDevice:
    """A device of an instance; nothing is allocated for it.

    Attributes:
        index: its index in `Instance.physical_devices`.
        name, kind: such as "NVIDIA H200" and "discrete" (discrete, integrated, virtual, cpu,
            other).
        vendor_id, device_id: PCI numbers.
        driver_id: VkDriverId; driver: the driver's name and version as text; driver_version: its
            packed number.
        api_version: (major, minor, patch) in use; offered_version: what the driver offers.
        uuid: a `uuid.UUID`. pipeline_cache_uuid: 16 bytes that a driver cache must start with.
        limits, heaps, memory_types: see those classes.
        extensions: frozenset of names. available: the `Features` offered.
        subgroup_size, subgroup_operations (VkSubgroupFeatureFlags), subgroup_stages.
        preserves_denorms: whether shaders may ask for subnormal float32 numbers.
        queue_family, timestamp_bits, timestamp_period (nanoseconds a tick).
        core_count: multiprocessors or compute units; 0: unknown.
    """

    def __init__(self, instance: Instance, handle: Any, index: int) -> None:
        self.instance, self.handle, self.index = instance, handle, index
        self._texel_formats: dict[str, bool] = {}
        self.functions = functions = instance.functions
        self.extensions = frozenset(
            vk.text(row.extensionName)
            for row in vk.enumerate_all(
                "vkEnumerateDeviceExtensionProperties",
                lambda count, rows: functions.vkEnumerateDeviceExtensionProperties(
                    handle, vk.NULL, count, rows
                ),
                "VkExtensionProperties",
            )
        )
        first = vk.ffi.new("VkPhysicalDeviceProperties *")
        functions.vkGetPhysicalDeviceProperties(handle, first)
        self.offered_version = offered = vk.version(first.apiVersion)
        self.api_version = (
            offered if offered[:2] <= instance.api_version[:2] else instance.api_version
        )
        self._read_properties()
        self._read_memory()
        self._pick_queue_family()
        self.available, self.feature_fields = features.query(self)

    def _read_properties(self) -> None:
        ids = vk.struct("VkPhysicalDeviceIDProperties")
        third = vk.struct("VkPhysicalDeviceMaintenance3Properties", ids)
        subgroup = vk.struct("VkPhysicalDeviceSubgroupProperties", third)
        head, has = subgroup, self.extensions.__contains__
        driver = control = fourth = sms = units = units2 = cores = matrix2 = floats = None
        if self.api_version >= (1, 2, 0):
            floats = head = vk.struct("VkPhysicalDeviceFloatControlsProperties", head)
        if self.api_version >= (1, 2, 0) or has("VK_KHR_driver_properties"):
            driver = head = vk.struct("VkPhysicalDeviceDriverProperties", head)
        if self.api_version >= (1, 3, 0) or has("VK_EXT_subgroup_size_control"):
            control = head = vk.struct("VkPhysicalDeviceSubgroupSizeControlProperties", head)
        if self.api_version >= (1, 3, 0) or has("VK_KHR_maintenance4"):
            fourth = head = vk.struct("VkPhysicalDeviceMaintenance4Properties", head)
        if has("VK_NV_shader_sm_builtins"):
            sms = head = vk.struct("VkPhysicalDeviceShaderSMBuiltinsPropertiesNV", head)
        if has("VK_AMD_shader_core_properties"):
            units = head = vk.struct("VkPhysicalDeviceShaderCorePropertiesAMD", head)
        if has("VK_AMD_shader_core_properties2"):
            units2 = head = vk.struct("VkPhysicalDeviceShaderCoreProperties2AMD", head)
        if has("VK_ARM_shader_core_builtins"):
            cores = head = vk.struct("VkPhysicalDeviceShaderCoreBuiltinsPropertiesARM", head)
        if has("VK_NV_cooperative_matrix2"):
            matrix2 = head = vk.words(1000593002, 3, head)
        properties2 = vk.struct("VkPhysicalDeviceProperties2", vk.ffi.cast("void *", head))
        self.functions.vkGetPhysicalDeviceProperties2(self.handle, properties2)

        properties = properties2.properties
        self.name = vk.text(properties.deviceName)
        self.kind = _TYPES.get(properties.deviceType, "other")
        self.vendor_id, self.device_id = properties.vendorID, properties.deviceID
        self.driver_version = properties.driverVersion
        self.driver_id, self.driver = 0, ".".join(map(str, vk.version(self.driver_version)))
        if driver is not None:
            self.driver_id = int(driver.driverID)
            self.driver = f"{vk.text(driver.driverName)} {vk.text(driver.driverInfo)}".strip()
        self.uuid = uuid.UUID(bytes=bytes(ids.deviceUUID))
        self.pipeline_cache_uuid = bytes(properties.pipelineCacheUUID)
        self.subgroup_size = subgroup.subgroupSize
        self.subgroup_operations, self.subgroup_stages = (
            subgroup.supportedOperations,
            subgroup.supportedStages,
        )
        self.preserves_denorms = floats is not None and bool(floats.shaderDenormPreserveFloat32)
        self.required_subgroup_stages = control.requiredSubgroupSizeStages if control else 0
        self.timestamp_period: float = properties.limits.timestampPeriod
        self.core_count = 0
        if sms:
            self.core_count = sms.shaderSMCount
        elif units2:
            self.core_count = units2.activeComputeUnitCount
        elif units:
            shape = (
                units.shaderEngineCount,
                units.shaderArraysPerEngineCount,
                units.computeUnitsPerShaderArray,
            )
            self.core_count = shape[0] * shape[1] * shape[2]
        elif cores:
            self.core_count = cores.shaderCoreCount
        self.matrix2_max_dimension: int = 0 if matrix2 is None else matrix2[5]
        limits = properties.limits
        self.limits = Limits(
            max_storage_buffer_range=limits.maxStorageBufferRange,
            max_push_constants=limits.maxPushConstantsSize,
            max_allocations=limits.maxMemoryAllocationCount,
            max_allocation=third.maxMemoryAllocationSize,
            max_buffer_size=fourth.maxBufferSize if fourth else 0,
            max_shared_memory=limits.maxComputeSharedMemorySize,
            max_workgroup_count=tuple(limits.maxComputeWorkGroupCount),
            max_workgroup_size=tuple(limits.maxComputeWorkGroupSize),
            max_workgroup_invocations=limits.maxComputeWorkGroupInvocations,
            max_storage_buffers_per_stage=limits.maxPerStageDescriptorStorageBuffers,
            max_texel_buffers_per_stage=limits.maxPerStageDescriptorSampledImages,
            min_storage_buffer_alignment=limits.minStorageBufferOffsetAlignment,
            max_texel_buffer_elements=limits.maxTexelBufferElements,
            min_texel_buffer_alignment=limits.minTexelBufferOffsetAlignment,
            non_coherent_atom=limits.nonCoherentAtomSize,
            min_subgroup_size=control.minSubgroupSize if control else subgroup.subgroupSize,
            max_subgroup_size=control.maxSubgroupSize if control else subgroup.subgroupSize,
        )

    def _read_memory(self) -> None:
        memory = vk.ffi.new("VkPhysicalDeviceMemoryProperties *")
        self.functions.vkGetPhysicalDeviceMemoryProperties(self.handle, memory)
        heaps = [memory.memoryHeaps[i] for i in range(memory.memoryHeapCount)]
        types = [memory.memoryTypes[i] for i in range(memory.memoryTypeCount)]
        self.heaps = tuple(MemoryHeap(heap.size, bool(heap.flags & 1)) for heap in heaps)
        self.memory_types = tuple(MemoryType(kind.heapIndex, kind.propertyFlags) for kind in types)

    def _pick_queue_family(self) -> None:
        count = vk.ffi.new("uint32_t *")
        self.functions.vkGetPhysicalDeviceQueueFamilyProperties(self.handle, count, vk.NULL)
        rows = vk.ffi.new("VkQueueFamilyProperties[]", max(count[0], 1))
        self.functions.vkGetPhysicalDeviceQueueFamilyProperties(self.handle, count, rows)
        graphics, compute = 1, 2
        found = [i for i in range(count[0]) if rows[i].queueFlags & compute and rows[i].queueCount]
        # A family without graphics is not shared with the desktop.
        found.sort(key=lambda i: bool(rows[i].queueFlags & graphics))
        self.queue_family: int | None = found[0] if found else None
        self.timestamp_bits: int = rows[found[0]].timestampValidBits if found else 0

    @property
    def is_unified(self) -> bool:
        """Whether the host reads and writes the device's own memory at full speed (integrated
        devices, lavapipe)."""
        wanted = DEVICE_LOCAL | HOST_VISIBLE | HOST_CACHED
        return self.kind != "discrete" and any(
            kind.flags & wanted == wanted for kind in self.memory_types
        )

    def has_texel_format(self, name: str) -> bool:
        """Whether kernels read uniform texel buffers of a format, such as "rgba32f" (see
        `TEXEL_FORMATS`)."""
        found = self._texel_formats.get(name)
        if found is None:
            from purevk.api.view import texel_format

            row = vk.ffi.new("VkFormatProperties *")
            self.functions.vkGetPhysicalDeviceFormatProperties(
                self.handle, texel_format(name)[0], row
            )
            found = self._texel_formats[name] = bool(row.bufferFeatures & _UNIFORM_TEXEL_BUFFER)
        return found

    @functools.cached_property
    def matrix_shapes(self) -> tuple[MatrixShape, ...]:
        """What the matrix cores multiply. Empty without the feature cooperative_matrix."""
        if "cooperative_matrix" not in self.available:
            return ()
        name = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
        rows = vk.enumerate_all(
            name, getattr(self.functions, name), "VkCooperativeMatrixPropertiesKHR", self.handle
        )
        shapes = [
            _shape(
                (row.MSize, row.NSize, row.KSize),
                (row.AType, row.BType, row.CType, row.ResultType),
                row.saturatingAccumulation,
                row.scope,
            )
            for row in rows
        ]
        if "cooperative_matrix2" in self.available:
            shapes += self._flexible_shapes()
        return tuple(shapes)

    def _flexible_shapes(self) -> list[MatrixShape]:
        name = "vkGetPhysicalDeviceCooperativeMatrixFlexibleDimensionsPropertiesNV"
        address = self.instance.functions.address(name)
        if address == vk.NULL:
            return []
        function = vk.ffi.cast("VkResult (*)(VkPhysicalDevice, uint32_t *, uint32_t *)", address)
        count = vk.ffi.new("uint32_t *")
        vk.check(function(self.handle, count, vk.NULL), name)
        stride = 14  # 32-bit words of a VkCooperativeMatrixFlexibleDimensionsPropertiesNV
        rows = vk.ffi.new("uint32_t[]", stride * max(count[0], 1))
        for index in range(count[0]):
            rows[index * stride] = 1000593001
        vk.check(function(self.handle, count, rows), name)
        found = [rows[i * stride + 4 : i * stride + stride] for i in range(count[0])]
        return [_shape(row[0:3], row[3:7], row[7], row[8], True, row[9]) for row in found]

    def __repr__(self) -> str:
        version = ".".join(map(str, self.offered_version))
        return f"<PhysicalDevice {self.index}: {self.name} ({self.kind}), Vulkan {version}>"


def _shape(
    sizes: Any,
    types: Any,
    saturating: int,
    scope: int,
    flexible: bool = False,
    invocations: int = 0,
) -> MatrixShape:
    name = _SCOPES.get(int(scope), f"scope{int(scope)}")
    m, n, k = (int(size) for size in sizes)
    a, b, c, result = (_COMPONENTS.get(int(kind), f"type{int(kind)}") for kind in types)
    return MatrixShape(m, n, k, a, b, c, result, bool(saturating), name, flexible, int(invocations))

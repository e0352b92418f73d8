"""Optional device features: one row each says how the feature is asked for and how it is switched
on.

A row's `fields` are members of a feature struct, which is queried through
`vkGetPhysicalDeviceFeatures2` and set when the device is made. Rows without fields are read from
properties by their `test`. `purevk info --all` prints the names, and PUREVK_DISABLE
takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from purevk import knobs
from purevk.api import vk
from purevk.errors import PurevkError

if TYPE_CHECKING:
    from purevk.api.physical import PhysicalDevice

_COMPUTE = 0x20  # VK_SHADER_STAGE_COMPUTE_BIT
_NVIDIA_PROPRIETARY = 4  # VK_DRIVER_ID_NVIDIA_PROPRIETARY


@dataclass(frozen=True)
class RawStruct:
    """A feature struct newer than the package's definitions: its `sType`, and its VkBool32 fields
    in order."""

    structure: int
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Feature:
    """One optional feature.

    Attributes:
        name: as printed and as disabled.
        doc: one line.
        struct: name of the feature struct (or a RawStruct, or "" for the fields of
            VkPhysicalDeviceFeatures).
        fields: members that must all be true; those in `extra` are switched on too where the device
            has them.
        extension: needed where the device's version is below `core`.
        core: version from which no extension is needed; None: never part of the core.
        test: for rows without fields, decides from the physical device's properties.
        requires: names of features without which this one is not switched on.
        on_request: switched on only for a `Device` that names it, because it makes the driver do
            more work.
    """

    name: str
    doc: str
    struct: str | RawStruct = ""
    fields: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    extension: str = ""
    core: tuple[int, int] | None = (1, 0)
    test: Callable[[PhysicalDevice], bool] | None = None
    requires: tuple[str, ...] = ()
    on_request: bool = False

    def reachable(self, physical: PhysicalDevice) -> bool:
        """Whether the device may be asked: its version or its extensions carry the feature."""
        in_core = self.core is not None and physical.api_version[:2] >= self.core
        return in_core or (bool(self.extension) and self.extension in physical.extensions)

    def needs_extension(self, physical: PhysicalDevice) -> bool:
        """Whether the extension must be named when the device is made."""
        return bool(self.extension) and not (
            self.core is not None and physical.api_version[:2] >= self.core
        )


def _subgroup(bit: int) -> Callable[[PhysicalDevice], bool]:
    return lambda physical: bool(
        physical.subgroup_stages & _COMPUTE and physical.subgroup_operations & bit
    )


def _preserves_denorms(physical: PhysicalDevice) -> bool:
    """Whether shaders with the execution mode DenormPreserve keep subnormal float32 numbers. NVIDIA's
    driver does not say so of float32, but does it (580 on an H200, at no cost); the validation layer
    goes by what it says."""
    return physical.preserves_denorms or (
        physical.driver_id == _NVIDIA_PROPRIETARY and not knobs.VALIDATION()
    )


_MATRIX_2 = RawStruct(
    1000593000,
    (
        "cooperativeMatrixWorkgroupScope",
        "cooperativeMatrixFlexibleDimensions",
        "cooperativeMatrixReductions",
        "cooperativeMatrixConversions",
        "cooperativeMatrixPerElementOperations",
        "cooperativeMatrixTensorAddressing",
        "cooperativeMatrixBlockLoads",
    ),
)
_BFLOAT16 = RawStruct(
    1000141000,
    ("shaderBFloat16Type", "shaderBFloat16DotProduct", "shaderBFloat16CooperativeMatrix"),
)
_MODEL = "VkPhysicalDeviceVulkanMemoryModelFeatures"
_16, _8 = "VkPhysicalDevice16BitStorageFeatures", "VkPhysicalDevice8BitStorageFeatures"
_ATOMIC = "VkPhysicalDeviceShaderAtomicFloatFeaturesEXT"
_LAYOUT = "VkPhysicalDeviceWorkgroupMemoryExplicitLayoutFeaturesKHR"

FEATURES: tuple[Feature, ...] = (
    Feature(
        "storage_16bit",
        "16-bit values in storage buffers",
        _16,
        ("storageBuffer16BitAccess",),
        core=(1, 1),
    ),
    Feature(
        "storage_8bit",
        "8-bit values in storage buffers",
        _8,
        ("storageBuffer8BitAccess",),
        extension="VK_KHR_8bit_storage",
        core=(1, 2),
    ),
    Feature(
        "float16",
        "half precision arithmetic",
        "VkPhysicalDeviceShaderFloat16Int8Features",
        ("shaderFloat16",),
        extension="VK_KHR_shader_float16_int8",
        core=(1, 2),
    ),
    Feature(
        "int8",
        "8-bit integer arithmetic",
        "VkPhysicalDeviceShaderFloat16Int8Features",
        ("shaderInt8",),
        extension="VK_KHR_shader_float16_int8",
        core=(1, 2),
    ),
    Feature("int16", "16-bit integer arithmetic", fields=("shaderInt16",)),
    Feature("int64", "64-bit integer arithmetic", fields=("shaderInt64",)),
    Feature("float64", "double precision arithmetic", fields=("shaderFloat64",)),
    Feature(
        "denorm_preserve",
        "subnormal float32 numbers are computed with, not taken for 0",
        core=(1, 2),
        test=_preserves_denorms,
    ),
    Feature("subgroup_basic", "subgroup identity and barriers", test=_subgroup(0x01)),
    Feature("subgroup_vote", "subgroup votes", test=_subgroup(0x02)),
    Feature("subgroup_arithmetic", "subgroup reductions and scans", test=_subgroup(0x04)),
    Feature("subgroup_ballot", "subgroup ballots and broadcasts", test=_subgroup(0x08)),
    Feature("subgroup_shuffle", "subgroup shuffles", test=_subgroup(0x10)),
    Feature("subgroup_shuffle_relative", "subgroup shuffles up and down", test=_subgroup(0x20)),
    Feature("subgroup_clustered", "subgroup reductions in clusters", test=_subgroup(0x40)),
    Feature("subgroup_quad", "subgroup operations on quads", test=_subgroup(0x80)),
    Feature(
        "subgroup_extended_types",
        "subgroup operations on 8, 16 and 64-bit types",
        "VkPhysicalDeviceShaderSubgroupExtendedTypesFeatures",
        ("shaderSubgroupExtendedTypes",),
        extension="VK_KHR_shader_subgroup_extended_types",
        core=(1, 2),
    ),
    Feature(
        "subgroup_size_control",
        "choice of the subgroup size",
        "VkPhysicalDeviceSubgroupSizeControlFeatures",
        ("subgroupSizeControl",),
        ("computeFullSubgroups",),
        extension="VK_EXT_subgroup_size_control",
        core=(1, 3),
    ),
    Feature(
        "maintenance4",
        "workgroup sizes as SPIR-V 1.6 writes them",
        "VkPhysicalDeviceMaintenance4Features",
        ("maintenance4",),
        extension="VK_KHR_maintenance4",
        core=(1, 3),
    ),
    Feature(
        "vulkan_memory_model",
        "the Vulkan memory model, device scope",
        _MODEL,
        ("vulkanMemoryModel",),
        ("vulkanMemoryModelDeviceScope",),
        extension="VK_KHR_vulkan_memory_model",
        core=(1, 2),
    ),
    Feature(
        "cooperative_matrix",
        "matrix cores, subgroup scope",
        "VkPhysicalDeviceCooperativeMatrixFeaturesKHR",
        ("cooperativeMatrix",),
        extension="VK_KHR_cooperative_matrix",
        core=None,
        requires=("vulkan_memory_model",),
    ),
    Feature(
        "cooperative_matrix2",
        "matrix cores, workgroup scope, flexible sizes, tensor addressing",
        _MATRIX_2,
        ("cooperativeMatrixWorkgroupScope", "cooperativeMatrixFlexibleDimensions"),
        (
            "cooperativeMatrixReductions",
            "cooperativeMatrixConversions",
            "cooperativeMatrixPerElementOperations",
            "cooperativeMatrixTensorAddressing",
            "cooperativeMatrixBlockLoads",
        ),
        extension="VK_NV_cooperative_matrix2",
        core=None,
        requires=("cooperative_matrix",),
    ),
    Feature(
        "bfloat16",
        "bfloat16 as a shader type",
        _BFLOAT16,
        ("shaderBFloat16Type",),
        ("shaderBFloat16DotProduct", "shaderBFloat16CooperativeMatrix"),
        extension="VK_KHR_shader_bfloat16",
        core=None,
    ),
    Feature(
        "fragments",
        "kernels that use elements of matrix-core fragments one by one",
        test=lambda physical: True,
        requires=("cooperative_matrix",),
    ),
    Feature(
        "texels",
        "texel buffers, where they are faster than storage buffers",
        test=lambda physical: True,
    ),
    Feature(
        "integer_dot_product",
        "dot products of packed 8-bit integers",
        "VkPhysicalDeviceShaderIntegerDotProductFeatures",
        ("shaderIntegerDotProduct",),
        extension="VK_KHR_shader_integer_dot_product",
        core=(1, 3),
    ),
    Feature(
        "atomic_float_add",
        "float32 atomic addition in storage buffers",
        _ATOMIC,
        ("shaderBufferFloat32AtomicAdd",),
        (
            "shaderBufferFloat32Atomics",
            "shaderSharedFloat32Atomics",
            "shaderSharedFloat32AtomicAdd",
        ),
        extension="VK_EXT_shader_atomic_float",
        core=None,
    ),
    Feature(
        "workgroup_memory_explicit_layout",
        "shared memory viewed as several types",
        _LAYOUT,
        ("workgroupMemoryExplicitLayout",),
        (
            "workgroupMemoryExplicitLayoutScalarBlockLayout",
            "workgroupMemoryExplicitLayout8BitAccess",
            "workgroupMemoryExplicitLayout16BitAccess",
        ),
        extension="VK_KHR_workgroup_memory_explicit_layout",
        core=None,
    ),
    Feature(
        "buffer_device_address",
        "pointers to buffers",
        "VkPhysicalDeviceBufferDeviceAddressFeatures",
        ("bufferDeviceAddress",),
        extension="VK_KHR_buffer_device_address",
        core=(1, 2),
    ),
    Feature(
        "scalar_block_layout",
        "arrays without padding in every block",
        "VkPhysicalDeviceScalarBlockLayoutFeatures",
        ("scalarBlockLayout",),
        extension="VK_EXT_scalar_block_layout",
        core=(1, 2),
    ),
    Feature(
        "push_descriptor",
        "descriptors written into the command buffer",
        extension="VK_KHR_push_descriptor",
        core=None,
        test=lambda physical: True,
    ),
    Feature("pipeline_cache", "compiled pipelines kept by the driver", test=lambda physical: True),
    Feature(
        "timestamp",
        "timestamps on the compute queue",
        test=lambda physical: physical.timestamp_bits > 0 and physical.timestamp_period > 0,
    ),
    Feature(
        "host_query_reset",
        "queries reset by the host",
        "VkPhysicalDeviceHostQueryResetFeatures",
        ("hostQueryReset",),
        extension="VK_EXT_host_query_reset",
        core=(1, 2),
    ),
    Feature(
        "timeline_semaphore",
        "semaphores that count",
        "VkPhysicalDeviceTimelineSemaphoreFeatures",
        ("timelineSemaphore",),
        extension="VK_KHR_timeline_semaphore",
        core=(1, 2),
    ),
    Feature(
        "external_memory_fd",
        "memory shared with other APIs on the device, such as CUDA",
        extension="VK_KHR_external_memory_fd",
        core=None,
        test=lambda physical: True,
    ),
    Feature(
        "external_semaphore_fd",
        "semaphores shared with other APIs on the device, such as CUDA",
        extension="VK_KHR_external_semaphore_fd",
        core=None,
        test=lambda physical: True,
        requires=("timeline_semaphore",),
    ),
    Feature(
        "robust_access",
        "accesses outside a buffer stay harmless",
        fields=("robustBufferAccess",),
    ),
    Feature(
        "robust_access2",
        "accesses outside a binding read zeros and write nothing",
        "VkPhysicalDeviceRobustness2FeaturesEXT",
        ("robustBufferAccess2",),
        extension="VK_EXT_robustness2",
        core=None,
        requires=("robust_access",),
    ),
    Feature(
        "memory_budget",
        "how much memory is free on the device",
        extension="VK_EXT_memory_budget",
        core=None,
        test=lambda physical: True,
    ),
    Feature(
        "pipeline_statistics",
        "the driver's statistics of compiled pipelines",
        "VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR",
        ("pipelineExecutableInfo",),
        extension="VK_KHR_pipeline_executable_properties",
        core=None,
        on_request=True,
    ),
)
BY_NAME: dict[str, Feature] = {feature.name: feature for feature in FEATURES}


class Features(frozenset[str]):
    """The features of a device, as a frozen set of names that also reads `features.float16` -> True
    or False."""

    __slots__ = ()

    def __getattr__(self, name: str) -> bool:
        if name in BY_NAME:
            return name in self
        raise AttributeError(f"no feature is named {name!r}")

    def __repr__(self) -> str:
        return f"Features({', '.join(row.name for row in FEATURES if row.name in self)})"


class _Chain:
    """Feature structs linked through pNext, one of each kind."""

    def __init__(self) -> None:
        self.head: Any = vk.NULL
        self._kept: dict[Any, Any] = {}

    def open(self, kind: str | RawStruct) -> Any:
        if kind not in self._kept:
            if isinstance(kind, RawStruct):
                made = vk.words(kind.structure, len(kind.fields), self.head)
            else:
                made = vk.struct(kind, self.head)
            self._kept[kind] = made
            self.head = vk.ffi.cast("void *", made)
        return self._kept[kind]

    def get(self, kind: str | RawStruct, field: str) -> bool:
        made = self._kept[kind]
        return bool(
            made[4 + kind.fields.index(field)]
            if isinstance(kind, RawStruct)
            else getattr(made, field)
        )

    def set(self, kind: str | RawStruct, field: str) -> None:
        made = self.open(kind)
        if isinstance(kind, RawStruct):
            made[4 + kind.fields.index(field)] = 1
        else:
            setattr(made, field, 1)


def query(physical: PhysicalDevice) -> tuple[Features, frozenset[tuple[str, str]]]:
    """What a device offers: its features, and the (feature, field) pairs of `fields` and `extra`
    that it has."""
    rows = [row for row in FEATURES if row.reachable(physical)]
    chain = _Chain()
    for row in rows:
        if row.fields and row.struct:
            chain.open(row.struct)
    core = vk.struct("VkPhysicalDeviceFeatures2", chain.head)
    physical.functions.vkGetPhysicalDeviceFeatures2(physical.handle, core)

    def value(row: Feature, field: str) -> bool:
        return chain.get(row.struct, field) if row.struct else bool(getattr(core.features, field))

    fields = {
        (row.name, field) for row in rows for field in row.fields + row.extra if value(row, field)
    }
    found: set[str] = set()
    for row in rows:
        offered = all((row.name, field) in fields for field in row.fields) and (
            row.test is None or row.test(physical)
        )
        if offered and found.issuperset(row.requires):
            found.add(row.name)
    return Features(found), frozenset(fields)


def choose(
    available: Features, disabled: Iterable[str] | None = None, requested: Iterable[str] = ()
) -> Features:
    """The features to switch on: those available, less PUREVK_DISABLE (or `disabled`) and what
    depends on it. Rows with `on_request` are left off unless `requested` names them.

    Raises:
        PurevkError: a disabled name is not a feature.
    """
    names = set(knobs.DISABLE() if disabled is None else disabled)
    asked = set(requested)
    unknown = names - BY_NAME.keys()
    if unknown:
        raise PurevkError(
            f"No device feature is named {', '.join(sorted(unknown))}",
            where="PUREVK_DISABLE",
            why=f"the names are {', '.join(BY_NAME)}",
            next="correct the name, or unset the variable",
        )
    kept: set[str] = set()
    for row in FEATURES:
        if row.on_request and row.name not in asked:
            continue
        if row.name in available and row.name not in names and kept.issuperset(row.requires):
            kept.add(row.name)
    return Features(kept)


def enable(physical: PhysicalDevice, chosen: Features) -> tuple[Any, list[str], list[Any]]:
    """What `vkCreateDevice` takes: the head of the pNext chain (a VkPhysicalDeviceFeatures2),
    extension names, and the objects to hold until the call is over."""
    chain = _Chain()
    core_fields: dict[str, int] = {}
    extensions: list[str] = []
    for row in FEATURES:
        if row.name not in chosen:
            continue
        if row.needs_extension(physical) and row.extension not in extensions:
            extensions.append(row.extension)
        for field in row.fields + row.extra:
            if (row.name, field) not in physical.feature_fields:
                continue
            if row.struct:
                chain.set(row.struct, field)
            else:
                core_fields[field] = 1
    head = vk.struct("VkPhysicalDeviceFeatures2", chain.head, features=core_fields)
    return head, extensions, [chain, head]

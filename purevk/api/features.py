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
_EXPORTABLE = 1  # VK_EXTERNAL_SEMAPHORE_FEATURE_EXPORTABLE_BIT
TIMELINE = 1  # VK_SEMAPHORE_TYPE_TIMELINE
OPAQUE_FD = 1  # VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT, and the same of semaphores
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


def _always(physical: PhysicalDevice) -> bool:
    """The test of features that no property tells."""
    return True


def _exports_timelines(physical: PhysicalDevice) -> bool:
    """Whether timeline semaphores have file descriptors: some drivers with the extension export
    binary semaphores only."""
    if physical.api_version < (1, 2, 0) and "VK_KHR_timeline_semaphore" not in physical.extensions:
        return False
    kind = vk.struct("VkSemaphoreTypeCreateInfo", semaphoreType=TIMELINE)
    asked = vk.struct("VkPhysicalDeviceExternalSemaphoreInfo", kind, handleType=OPAQUE_FD)
    answer = vk.struct("VkExternalSemaphoreProperties")
    physical.functions.vkGetPhysicalDeviceExternalSemaphoreProperties(
        physical.handle, asked, answer
    )
    return bool(answer.externalSemaphoreFeatures & _EXPORTABLE)


def _has_timestamps(physical: PhysicalDevice) -> bool:
    return physical.timestamp_bits > 0 and physical.timestamp_period > 0


_MATRIX_EXTRA = (
    "cooperativeMatrixReductions cooperativeMatrixConversions"
    " cooperativeMatrixPerElementOperations cooperativeMatrixTensorAddressing"
    " cooperativeMatrixBlockLoads"
)
_MATRIX_2 = RawStruct(
    1000593000,
    (
        "cooperativeMatrixWorkgroupScope",
        "cooperativeMatrixFlexibleDimensions",
        *_MATRIX_EXTRA.split(),
    ),
)
_BFLOAT16 = RawStruct(
    1000141000,
    ("shaderBFloat16Type", "shaderBFloat16DotProduct", "shaderBFloat16CooperativeMatrix"),
)


def _row(
    name: str,
    doc: str,
    since: str = "1.0",
    struct: str | RawStruct = "",
    fields: str = "",
    extra: str = "",
    **settings: Any,
) -> Feature:
    """A feature. `since` is the version that has it, the extension for others, or both. A struct has
    its name without VkPhysicalDevice."""
    extension = since[since.find("VK_") :] if "VK_" in since else ""
    version = since.removesuffix(extension).strip()
    core = (int(version[0]), int(version[2])) if version else None
    struct = f"VkPhysicalDevice{struct}" if isinstance(struct, str) and struct else struct
    members = tuple(fields.split()), tuple(extra.split())
    return Feature(name, doc, struct, *members, extension, core, **settings)


# fmt: off
FEATURES: tuple[Feature, ...] = (
    _row("storage_16bit", "16-bit values in storage buffers", "1.1", "16BitStorageFeatures",
         "storageBuffer16BitAccess"),
    _row("storage_8bit", "8-bit values in storage buffers", "1.2 VK_KHR_8bit_storage",
         "8BitStorageFeatures", "storageBuffer8BitAccess"),
    _row("float16", "half precision arithmetic", "1.2 VK_KHR_shader_float16_int8",
         "ShaderFloat16Int8Features", "shaderFloat16"),
    _row("int8", "8-bit integer arithmetic", "1.2 VK_KHR_shader_float16_int8",
         "ShaderFloat16Int8Features", "shaderInt8"),
    _row("int16", "16-bit integer arithmetic", fields="shaderInt16"),
    _row("int64", "64-bit integer arithmetic", fields="shaderInt64"),
    _row("float64", "double precision arithmetic", fields="shaderFloat64"),
    _row("denorm_preserve", "subnormal float32 numbers are computed with, not taken for 0", "1.2",
         test=_preserves_denorms),
    _row("subgroup_basic", "subgroup identity and barriers", test=_subgroup(0x01)),
    _row("subgroup_vote", "subgroup votes", test=_subgroup(0x02)),
    _row("subgroup_arithmetic", "subgroup reductions and scans", test=_subgroup(0x04)),
    _row("subgroup_ballot", "subgroup ballots and broadcasts", test=_subgroup(0x08)),
    _row("subgroup_shuffle", "subgroup shuffles", test=_subgroup(0x10)),
    _row("subgroup_shuffle_relative", "subgroup shuffles up and down", test=_subgroup(0x20)),
    _row("subgroup_clustered", "subgroup reductions in clusters", test=_subgroup(0x40)),
    _row("subgroup_quad", "subgroup operations on quads", test=_subgroup(0x80)),
    _row("subgroup_extended_types", "subgroup operations on 8, 16 and 64-bit types",
         "1.2 VK_KHR_shader_subgroup_extended_types", "ShaderSubgroupExtendedTypesFeatures",
         "shaderSubgroupExtendedTypes"),
    _row("subgroup_size_control", "choice of the subgroup size", "1.3 VK_EXT_subgroup_size_control",
         "SubgroupSizeControlFeatures", "subgroupSizeControl", "computeFullSubgroups"),
    _row("maintenance4", "workgroup sizes as SPIR-V 1.6 writes them", "1.3 VK_KHR_maintenance4",
         "Maintenance4Features", "maintenance4"),
    _row("vulkan_memory_model", "the Vulkan memory model, device scope",
         "1.2 VK_KHR_vulkan_memory_model", "VulkanMemoryModelFeatures", "vulkanMemoryModel",
         "vulkanMemoryModelDeviceScope"),
    _row("cooperative_matrix", "matrix cores, subgroup scope", "VK_KHR_cooperative_matrix",
         "CooperativeMatrixFeaturesKHR", "cooperativeMatrix", requires=("vulkan_memory_model",)),
    _row("cooperative_matrix2", "matrix cores, workgroup scope, flexible sizes, tensor addressing",
         "VK_NV_cooperative_matrix2", _MATRIX_2,
         "cooperativeMatrixWorkgroupScope cooperativeMatrixFlexibleDimensions", _MATRIX_EXTRA,
         requires=("cooperative_matrix",)),
    _row("bfloat16", "bfloat16 as a shader type", "VK_KHR_shader_bfloat16", _BFLOAT16,
         "shaderBFloat16Type", "shaderBFloat16DotProduct shaderBFloat16CooperativeMatrix"),
    _row("fragments", "kernels that use elements of matrix-core fragments one by one", test=_always,
         requires=("cooperative_matrix",)),
    _row("texels", "texel buffers, where they are faster than storage buffers", test=_always),
    _row("integer_dot_product", "dot products of packed 8-bit integers",
         "1.3 VK_KHR_shader_integer_dot_product", "ShaderIntegerDotProductFeatures",
         "shaderIntegerDotProduct"),
    _row("atomic_float_add", "float32 atomic addition in storage buffers",
         "VK_EXT_shader_atomic_float", "ShaderAtomicFloatFeaturesEXT",
         "shaderBufferFloat32AtomicAdd",
         "shaderBufferFloat32Atomics shaderSharedFloat32Atomics shaderSharedFloat32AtomicAdd"),
    _row("workgroup_memory_explicit_layout", "shared memory viewed as several types",
         "VK_KHR_workgroup_memory_explicit_layout", "WorkgroupMemoryExplicitLayoutFeaturesKHR",
         "workgroupMemoryExplicitLayout",
         "workgroupMemoryExplicitLayoutScalarBlockLayout workgroupMemoryExplicitLayout8BitAccess"
         " workgroupMemoryExplicitLayout16BitAccess"),
    _row("buffer_device_address", "pointers to buffers", "1.2 VK_KHR_buffer_device_address",
         "BufferDeviceAddressFeatures", "bufferDeviceAddress"),
    _row("scalar_block_layout", "arrays without padding in every block",
         "1.2 VK_EXT_scalar_block_layout", "ScalarBlockLayoutFeatures", "scalarBlockLayout"),
    _row("push_descriptor", "descriptors written into the command buffer", "VK_KHR_push_descriptor",
         test=_always),
    _row("pipeline_cache", "compiled pipelines kept by the driver", test=_always),
    _row("timestamp", "timestamps on the compute queue", test=_has_timestamps),
    _row("host_query_reset", "queries reset by the host", "1.2 VK_EXT_host_query_reset",
         "HostQueryResetFeatures", "hostQueryReset"),
    _row("timeline_semaphore", "semaphores that count", "1.2 VK_KHR_timeline_semaphore",
         "TimelineSemaphoreFeatures", "timelineSemaphore"),
    _row("external_memory_fd", "memory shared with other APIs on the device, such as CUDA",
         "VK_KHR_external_memory_fd", test=_always),
    _row("external_semaphore_fd", "semaphores shared with other APIs on the device, such as CUDA",
         "VK_KHR_external_semaphore_fd", test=_exports_timelines, requires=("timeline_semaphore",)),
    _row("robust_access", "accesses outside a buffer stay harmless", fields="robustBufferAccess"),
    _row("robust_access2", "accesses outside a binding read zeros and write nothing",
         "VK_EXT_robustness2", "Robustness2FeaturesEXT", "robustBufferAccess2",
         requires=("robust_access",)),
    _row("memory_budget", "how much memory is free on the device", "VK_EXT_memory_budget",
         test=_always),
    _row("pipeline_statistics", "the driver's statistics of compiled pipelines",
         "VK_KHR_pipeline_executable_properties", "PipelineExecutablePropertiesFeaturesKHR",
         "pipelineExecutableInfo", on_request=True),
)
# fmt: on
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

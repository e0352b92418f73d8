"""What purevk uses of Vulkan's C declarations, made known to cffi in one go.

cffi builds a type when it is first asked for. It may run Python code meanwhile: an allocation can
start the garbage collector, whose finalizers may let another thread run. If that thread asks for
the same type, cffi fails an assertion, and the process dies (`_realize_c_struct_or_union`, seen
with cffi 2.1 and Python 3.11). So all types are built here, while the module is imported by one
thread. A new struct, handle or function belongs into these lists; tests compare them with the code.
"""

from __future__ import annotations

import gc
from typing import Any

HANDLES = """
    Buffer BufferView CommandBuffer CommandPool DebugUtilsMessengerEXT DescriptorPool
    DescriptorSet DescriptorSetLayout Device DeviceMemory Fence Instance PhysicalDevice Pipeline
    PipelineCache PipelineLayout QueryPool Queue Semaphore ShaderModule
""".split()

ENUMS = "Result StructureType ValidationFeatureEnableEXT".split()

STRUCTS = """
    ApplicationInfo BufferCopy BufferCreateInfo BufferDeviceAddressInfo BufferViewCreateInfo
    CommandBufferAllocateInfo CommandBufferBeginInfo CommandPoolCreateInfo
    ComputePipelineCreateInfo CooperativeMatrixPropertiesKHR DebugUtilsMessengerCreateInfoEXT
    DebugUtilsObjectNameInfoEXT DescriptorPoolCreateInfo DescriptorPoolSize
    DescriptorSetAllocateInfo DescriptorSetLayoutBinding DescriptorSetLayoutCreateInfo
    DeviceCreateInfo DeviceQueueCreateInfo ExportMemoryAllocateInfo ExportSemaphoreCreateInfo
    ExtensionProperties ExternalMemoryBufferCreateInfo ExternalSemaphoreProperties
    FenceCreateInfo FormatProperties
    InstanceCreateInfo LayerProperties MappedMemoryRange MemoryAllocateFlagsInfo
    MemoryAllocateInfo MemoryBarrier MemoryGetFdInfoKHR MemoryRequirements
    PhysicalDevice16BitStorageFeatures PhysicalDevice8BitStorageFeatures
    PhysicalDeviceBufferDeviceAddressFeatures PhysicalDeviceCooperativeMatrixFeaturesKHR
    PhysicalDeviceDriverProperties PhysicalDeviceExternalSemaphoreInfo PhysicalDeviceFeatures2
    PhysicalDeviceFloatControlsProperties PhysicalDeviceHostQueryResetFeatures
    PhysicalDeviceIDProperties PhysicalDeviceMaintenance3Properties
    PhysicalDeviceMaintenance4Features PhysicalDeviceMaintenance4Properties
    PhysicalDeviceMemoryBudgetPropertiesEXT PhysicalDeviceMemoryProperties
    PhysicalDeviceMemoryProperties2 PhysicalDevicePipelineExecutablePropertiesFeaturesKHR
    PhysicalDeviceProperties PhysicalDeviceProperties2 PhysicalDeviceRobustness2FeaturesEXT
    PhysicalDeviceScalarBlockLayoutFeatures PhysicalDeviceShaderAtomicFloatFeaturesEXT
    PhysicalDeviceShaderCoreBuiltinsPropertiesARM PhysicalDeviceShaderCoreProperties2AMD
    PhysicalDeviceShaderCorePropertiesAMD PhysicalDeviceShaderFloat16Int8Features
    PhysicalDeviceShaderIntegerDotProductFeatures PhysicalDeviceShaderSMBuiltinsPropertiesNV
    PhysicalDeviceShaderSubgroupExtendedTypesFeatures PhysicalDeviceSubgroupProperties
    PhysicalDeviceSubgroupSizeControlFeatures PhysicalDeviceSubgroupSizeControlProperties
    PhysicalDeviceTimelineSemaphoreFeatures PhysicalDeviceVulkanMemoryModelFeatures
    PhysicalDeviceWorkgroupMemoryExplicitLayoutFeaturesKHR PipelineCacheCreateInfo
    PipelineExecutableInfoKHR PipelineExecutablePropertiesKHR PipelineExecutableStatisticKHR
    PipelineInfoKHR PipelineLayoutCreateInfo PipelineShaderStageCreateInfo
    PipelineShaderStageRequiredSubgroupSizeCreateInfo PushConstantRange QueryPoolCreateInfo
    QueueFamilyProperties SemaphoreCreateInfo SemaphoreGetFdInfoKHR SemaphoreSignalInfo
    SemaphoreTypeCreateInfo ShaderModuleCreateInfo SpecializationInfo SpecializationMapEntry
    SubmitInfo TimelineSemaphoreSubmitInfo ValidationFeaturesEXT WriteDescriptorSet
""".split()

FUNCTIONS = """
    AllocateCommandBuffers AllocateDescriptorSets AllocateMemory BeginCommandBuffer
    BindBufferMemory CmdBindDescriptorSets CmdBindPipeline CmdCopyBuffer CmdDispatch
    CmdFillBuffer CmdPipelineBarrier CmdPushConstants CmdResetQueryPool CmdUpdateBuffer
    CmdWriteTimestamp CreateBuffer CreateBufferView CreateCommandPool
    CreateComputePipelines CreateDebugUtilsMessengerEXT CreateDescriptorPool
    CreateDescriptorSetLayout CreateDevice CreateFence CreateInstance CreatePipelineCache
    CreatePipelineLayout CreateQueryPool CreateSemaphore CreateShaderModule DestroyBuffer
    DestroyBufferView DestroyCommandPool DestroyDebugUtilsMessengerEXT DestroyDescriptorPool
    DestroyDescriptorSetLayout DestroyDevice DestroyFence DestroyInstance DestroyPipeline
    DestroyPipelineCache DestroyPipelineLayout DestroyQueryPool DestroySemaphore
    DestroyShaderModule DeviceWaitIdle EndCommandBuffer EnumerateDeviceExtensionProperties
    EnumerateInstanceExtensionProperties EnumerateInstanceLayerProperties
    EnumerateInstanceVersion EnumeratePhysicalDevices FlushMappedMemoryRanges FreeMemory
    GetBufferDeviceAddress GetBufferMemoryRequirements GetDeviceProcAddr GetDeviceQueue
    GetFenceStatus GetInstanceProcAddr GetMemoryFdKHR
    GetPhysicalDeviceCooperativeMatrixPropertiesKHR
    GetPhysicalDeviceExternalSemaphoreProperties GetPhysicalDeviceFeatures2
    GetPhysicalDeviceFormatProperties GetPhysicalDeviceMemoryProperties
    GetPhysicalDeviceMemoryProperties2 GetPhysicalDeviceProperties GetPhysicalDeviceProperties2
    GetPhysicalDeviceQueueFamilyProperties GetPipelineCacheData
    GetPipelineExecutablePropertiesKHR GetPipelineExecutableStatisticsKHR GetQueryPoolResults
    GetSemaphoreCounterValue GetSemaphoreFdKHR InvalidateMappedMemoryRanges MapMemory
    QueueSubmit ResetFences ResetQueryPool SetDebugUtilsObjectNameEXT SignalSemaphore
    UpdateDescriptorSets WaitForFences DebugUtilsMessengerCallbackEXT
""".split()

# Types as the calls of ffi.new() and ffi.cast() write them: cffi looks the text up first.
OTHER = (
    "char *",
    "char[]",
    "char *[]",
    "float[]",
    "int *",
    "size_t *",
    "uint32_t *",
    "uint32_t[]",
    "uint64_t *",
    "uint64_t[]",
    "uintptr_t",
    "uintptr_t *",
    "void *",
    "void **",
)


def build(ffi: Any) -> None:
    """Builds all types listed here. Names that this version of the package lacks are skipped: who
    uses them finds that out by itself."""
    collecting = gc.isenabled()
    gc.disable()  # no finalizer runs in between; a second import in another thread has its own `ffi`
    try:
        for name in (*HANDLES, *ENUMS, *STRUCTS):
            try:
                _build_fields(ffi.typeof("Vk" + name))
            except ffi.error:
                continue
            ffi.typeof(f"Vk{name} *")
            ffi.typeof(f"Vk{name}[]")
        for name in FUNCTIONS:
            try:
                ffi.typeof("PFN_vk" + name)
            except ffi.error:
                continue
        for text in OTHER:
            ffi.typeof(text)
    finally:
        if collecting:
            gc.enable()


def _build_fields(kind: Any) -> None:
    if kind.kind == "array":
        _build_fields(kind.item)
    elif kind.kind in ("struct", "union"):
        for _, field in kind.fields:
            _build_fields(field.type)

"""A thin Vulkan layer: one class a Vulkan object, for compute. It knows bytes and kernels, not
tensors."""

from purevk.api.buffer import Buffer, Usage
from purevk.api.commands import Access, CommandBuffer, CommandPool
from purevk.api.descriptors import DescriptorArena
from purevk.api.device import Device, DeviceObject, open_device
from purevk.api.features import FEATURES, Feature, Features
from purevk.api.instance import Instance, check_fork
from purevk.api.memory import Allocator, FreeList, MemoryKind, MemoryStats
from purevk.api.physical import Limits, MatrixShape, PhysicalDevice
from purevk.api.pipeline import (
    PUSH_BYTES,
    ComputePipeline,
    PipelineCache,
    PipelineLayout,
    PipelineSpec,
    ShaderModule,
    create_pipelines,
)
from purevk.api.queries import TimestampPool
from purevk.api.queue import Queue, Submission
from purevk.api.semaphore import TimelineSemaphore
from purevk.api.statistics import pipeline_statistics
from purevk.api.view import TEXEL_FORMATS, BufferView, texel_format

__all__ = [
    "FEATURES",
    "PUSH_BYTES",
    "TEXEL_FORMATS",
    "Access",
    "Allocator",
    "Buffer",
    "BufferView",
    "CommandBuffer",
    "CommandPool",
    "ComputePipeline",
    "DescriptorArena",
    "Device",
    "DeviceObject",
    "Feature",
    "Features",
    "FreeList",
    "Instance",
    "Limits",
    "MatrixShape",
    "MemoryKind",
    "MemoryStats",
    "PhysicalDevice",
    "PipelineCache",
    "PipelineLayout",
    "PipelineSpec",
    "Queue",
    "ShaderModule",
    "Submission",
    "TimelineSemaphore",
    "TimestampPool",
    "Usage",
    "check_fork",
    "create_pipelines",
    "open_device",
    "pipeline_statistics",
    "texel_format",
]

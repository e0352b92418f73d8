"""What a driver tells of the code of a compiled pipeline: registers, spills, code size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from purevk.api import vk
from purevk.errors import DeviceError

if TYPE_CHECKING:
    from purevk.api.pipeline import ComputePipeline

_FIELDS = {  # members of VkPipelineExecutableStatisticValueKHR
    vk.const("VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_BOOL32_KHR"): "b32",
    vk.const("VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_INT64_KHR"): "i64",
    vk.const("VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_UINT64_KHR"): "u64",
    vk.const("VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_FLOAT64_KHR"): "f64",
}


def pipeline_statistics(pipeline: ComputePipeline) -> list[dict[str, Any]]:
    """The executables that the driver made of a pipeline, usually one: "name", "subgroup_size", and
    "statistics" by the driver's own names.

    Raises:
        DeviceError: the pipeline's device was made without the feature pipeline_statistics.
    """
    device = pipeline.device
    if not device.features.pipeline_statistics:
        raise DeviceError(
            f"{device.name} tells no statistics of pipelines",
            why="the driver lacks VK_KHR_pipeline_executable_properties"
            if "pipeline_statistics" not in device.physical.available
            else "the feature is off",
            next='api.Device(physical, request=("pipeline_statistics",))',
        )
    functions, handle = device.functions, device.handle
    executables = vk.enumerate_all(
        "vkGetPipelineExecutablePropertiesKHR",
        functions.vkGetPipelineExecutablePropertiesKHR,
        "VkPipelineExecutablePropertiesKHR",
        handle,
        vk.struct("VkPipelineInfoKHR", pipeline=pipeline.handle),
    )
    found = []
    for index, executable in enumerate(executables):
        rows = vk.enumerate_all(
            "vkGetPipelineExecutableStatisticsKHR",
            functions.vkGetPipelineExecutableStatisticsKHR,
            "VkPipelineExecutableStatisticKHR",
            handle,
            vk.struct(
                "VkPipelineExecutableInfoKHR", pipeline=pipeline.handle, executableIndex=index
            ),
        )
        values = {vk.text(row.name): getattr(row.value, _FIELDS[row.format]) for row in rows}
        found.append(
            {
                "name": vk.text(executable.name),
                "subgroup_size": int(executable.subgroupSize),
                "statistics": values,
            }
        )
    return found

"""A device that promises what every Vulkan 1.1 device does, and no more: PUREVK_TEST_TRAITS=least.

The limits are those of the table "Required Limits" of the Vulkan specification.
"""

from __future__ import annotations

import dataclasses

import pytest

from purevk import knobs
from purevk.api import physical
from purevk.api.features import FEATURES

LIMITS = {
    "max_storage_buffer_range": 2**27,
    "max_push_constants": 128,
    "max_shared_memory": 16384,
    "max_workgroup_count": (65535, 65535, 65535),
    "max_workgroup_size": (128, 128, 64),
    "max_workgroup_invocations": 128,
    "max_storage_buffers_per_stage": 8,  # the table has 4
    "max_texel_buffers_per_stage": 16,
    "min_storage_buffer_alignment": 256,
    "max_texel_buffer_elements": 65536,
    "min_texel_buffer_alignment": 256,
}


def simulate(patch: pytest.MonkeyPatch) -> None:
    """Has all devices report version 1.1, no extensions, no optional features and `LIMITS`."""
    read = physical.PhysicalDevice._read_properties

    def least(self: physical.PhysicalDevice) -> None:
        self.api_version, self.extensions = (1, 1, 0), frozenset()
        read(self)
        self.kind, self.core_count, self.required_subgroup_stages = "other", 0, 0
        self.subgroup_operations = 1  # basic
        self.limits = dataclasses.replace(self.limits, **LIMITS)

    patch.setattr(physical.PhysicalDevice, "_read_properties", least)
    patch.setenv(knobs.DISABLE.name, ",".join(feature.name for feature in FEATURES))

"""Discrete GPUs of Intel before Xe2: Arc of the A series. Nothing was measured on one.

Drivers offer their matrix cores to Vulkan, but kernels on them are slower: llama.cpp saw prompts
of an A770 at the same speed or much slower with them, and uses them from Xe2 on, where they take a
third of the time (its pull requests 14001 and 24404). Subgroups of Xe2 have 16 invocations at
least, those before it 8.
"""

from dataclasses import replace

from purevk.tuning.families.intel import INTEL
from purevk.tuning.registry import DeviceIdentity, Family, register

ALCHEMIST = replace(INTEL, name="alchemist", has_fast_matrix_cores=False)


def _matches(device: DeviceIdentity) -> bool:
    is_before_xe2 = device.min_subgroup_size < 16
    return device.vendor_id == 0x8086 and device.kind == "discrete" and is_before_xe2


register(Family(ALCHEMIST, _matches, priority=1))

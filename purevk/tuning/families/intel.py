"""GPUs of Intel. Nothing was measured on one: where this file gives no number, it is the default's.

The driver does not report the number of cores.
"""

from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import Family, register

# Intel's optimization guide gives 128 KiB of shared local memory for an Xe core or dual subslice,
# and 64 KiB of it for a workgroup.
#
# Linux's i915 resets a GPU on which a workgroup does not end within DRM_I915_PREEMPT_TIMEOUT, 640 ms;
# 7.5 s on Xe, and 5 s with its successor, the driver xe.
#
# A thread has 128 registers, whatever the size of its subgroup: with 32 invocations, the driver's own
# choice, each has half as many as with 16. ANV of Mesa 26.2 spills up to 641 registers of attention
# with 32, 103 with 16, and 28 with two queries in an invocation too. Of recurrent layers it spills
# 119 with 32, 19 with 16, and none with 32 weights in an invocation too. The matrices of Xe2 have 16
# columns there: 8 x 16 x 16 of float16 and bfloat16, 8 x 16 x 32 of int8.
INTEL = replace(
    DEFAULT,
    name="intel",
    subgroup_size=16,
    shared_memory_ratio=2,
    dispatch_seconds=0.64,
    attention_queries=2,
    recurrent_elements=(32, 32),
)

register(Family(INTEL, lambda device: device.vendor_id == 0x8086))

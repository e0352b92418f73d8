"""GPUs of Intel. Nothing was measured on one: where this file gives no number, it is the default's.

Subgroups of 8, 16 or 32 invocations need no number here, since the driver reports their size. It
does not report the number of cores.
"""

from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import Family, register

# Intel's optimization guide gives 128 KiB of shared local memory for an Xe core or dual subslice,
# and 64 KiB of it for a workgroup.
#
# Linux's i915 resets a GPU on which a workgroup does not end within DRM_I915_PREEMPT_TIMEOUT, 640 ms;
# 7.5 s on Xe, and 5 s with its successor, the driver xe.
INTEL = replace(DEFAULT, name="intel", shared_memory_ratio=2, dispatch_seconds=0.64)

register(Family(INTEL, lambda device: device.vendor_id == 0x8086))

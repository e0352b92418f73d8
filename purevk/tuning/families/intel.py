"""GPUs of Intel. Nothing was measured on one: where this file gives no number, it is the default's.

Subgroups of 8, 16 or 32 invocations need no number here, since the driver reports their size. It
does not report the number of cores.
"""

from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import Family, register

# Intel's optimization guide gives 128 KiB of shared local memory for an Xe core or dual subslice,
# and 64 KiB of it for a workgroup.
INTEL = replace(DEFAULT, name="intel", shared_memory_ratio=2)

register(Family(INTEL, lambda device: device.vendor_id == 0x8086))

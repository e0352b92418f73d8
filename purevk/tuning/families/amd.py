"""GPUs of AMD. Nothing was measured on one: where this file gives no number, it is the default's.

Subgroups of 32 and 64 invocations need no number here, since the driver reports their size.
"""

from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import Family, register

# AMD's manuals give 64 KiB of LDS for a compute unit; Mesa lets one workgroup have all of it.
AMD = replace(DEFAULT, name="amd", shared_memory_ratio=1)

register(Family(AMD, lambda device: device.vendor_id in (0x1002, 0x1022)))

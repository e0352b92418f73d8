"""GPUs of AMD. Nothing was measured on one: the numbers are the default's.

Subgroups of 32 and 64 invocations need no number here, since the driver reports their size.
"""

from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import Family, register

AMD = replace(DEFAULT, name="amd")

register(Family(AMD, lambda device: device.vendor_id in (0x1002, 0x1022)))

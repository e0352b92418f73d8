"""GPUs of Intel. Nothing was measured on one: the numbers are the default's.

Subgroups of 8, 16 or 32 invocations need no number here, since the driver reports their size. It
does not report the number of cores.
"""

from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import Family, register

INTEL = replace(DEFAULT, name="intel")

register(Family(INTEL, lambda device: device.vendor_id == 0x8086))

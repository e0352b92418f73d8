"""GPUs of Apple, by MoltenVK or Honeykrisp. Nothing was measured on one: where this file gives no
number, it is the default's.

The drivers do not report the number of cores. Apple states 8 to 10 for the smallest of its M
series.
"""

from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import DeviceIdentity, Family, register

APPLE = replace(DEFAULT, name="apple", assumed_cores=8)


def _matches(device: DeviceIdentity) -> bool:
    # Honeykrisp reports the vendor Mesa.
    return device.vendor_id == 0x106B or device.name.startswith("Apple ")


register(Family(APPLE, _matches))

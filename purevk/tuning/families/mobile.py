"""GPUs of phones and small boards: Adreno, Mali, PowerVR, VideoCore, Vivante. Nothing was measured
on one: where this file gives no number, it is the default's.

They have few cores: 1 to 16 by Arm's data sheet of Mali, which also gives 1024 threads for most of
its cores. Only Arm's driver reports how many cores there are.
"""

from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import Family, register

VENDORS = {
    0x5143: "Qualcomm",
    0x13B5: "Arm",
    0x1010: "Imagination Technologies",
    0x14E4: "Broadcom",
    0x10001: "Vivante",
}
MOBILE = replace(
    DEFAULT,
    name="mobile",
    assumed_cores=4,
    max_invocations_per_core=1024,
    iteration_seconds=200e-9,  # clocks and memory are a quarter as fast
)

register(Family(MOBILE, lambda device: device.vendor_id in VENDORS))

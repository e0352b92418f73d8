"""GPUs of NVIDIA. The default's numbers were measured on one of them, an H200; these are the same."""

from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import Family, register

NVIDIA = replace(DEFAULT, name="nvidia")

register(Family(NVIDIA, lambda device: device.vendor_id == 0x10DE))

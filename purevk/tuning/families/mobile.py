"""GPUs of phones and small boards: Adreno, Mali, PowerVR, VideoCore, Vivante. Nothing was measured
on one: where this file gives no number, it is the default's.

They have few cores: 1 to 16 by Arm's data sheet of Mali, which also gives 1024 threads for most of
its cores. Only Arm's driver reports how many cores there are.

Half precision is stored and read as such, and computed in float32: kernels of these GPUs lose
nothing where float16 is the slower one (llama.cpp's pull request 18493 turns it off on Mali).
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
    # Adreno has subgroups of 64 or 128, those of the others are smaller. A core has registers for so
    # many invocations only: with 128, Turnip of Mesa 26.2 spills in attention, with 64 it does not.
    subgroup_size=64,
    attention_queries=2,
    # Adreno 618 has 48 registers. In 54 depthwise convolutions of 4 models, Turnip of Mesa 26.2 stores
    # 12,545 registers to memory with windows that are unrolled, 964 with a limit of 32, none with 16.
    max_depthwise_code=16,
    assumed_cores=4,
    max_invocations_per_core=1024,
    # Linux ends what takes longer: JOB_TIMEOUT_MS in its panfrost_job.c (Mali up to G57 and G78; 5 s in
    # panthor_sched.c for later ones), hang_limit_ms in v3d_sched.c, and for Adreno
    # DRM_MSM_HANGCHECK_DEFAULT_PERIOD in msm_gpu.h.
    dispatch_seconds=0.5,
    iteration_seconds=200e-9,  # clocks and memory are a quarter as fast
)

register(Family(MOBILE, lambda device: device.vendor_id in VENDORS))

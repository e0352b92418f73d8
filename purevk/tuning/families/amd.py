"""GPUs of AMD. Nothing was measured on one: where this file gives no number, it is the default's.

Subgroups of 32 and 64 invocations need no number here, since the driver reports their size, nor do
the matrices of RDNA 3 and 4: RADV of Mesa 26 offers 16 x 16 x 16, for float16, int8 and, on RDNA 4,
bfloat16. No kernel on them spills there.
"""

from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import Family, register
from purevk.tuning.tiles import NchwStep

# AMD's manuals give 64 KiB of LDS for a compute unit; Mesa lets one workgroup have all of it.
# Registers, as scripts/compile_only.py tells for RADV of Mesa 22.3 and 25.0. With the default's tiles, a
# convolution by a window of 3 x 3 needs 196 to 216 of them, or spills 179. It needs 124 to 168 if reads
# do not start a step ahead, and more subgroups run at the same time. The int8 matmul in groups needs 84
# to 256 in place of up to 256 and 110 spilled.
TILES = DEFAULT.tiles._replace(
    quantized_unrolled=False,
    nchw_narrow=NchwStep(depth=2, unrolled=1, ahead=False),
    nchw_small=NchwStep(depth=8, unrolled=8, ahead=False),
    nchw_window=NchwStep(depth=8, unrolled=2, ahead=False),
)
AMD = replace(DEFAULT, name="amd", shared_memory_ratio=1, tiles=TILES)

register(Family(AMD, lambda device: device.vendor_id in (0x1002, 0x1022)))

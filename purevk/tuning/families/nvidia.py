"""GPUs of NVIDIA. The default's numbers were measured on one of them, an H200; these are the same."""

from dataclasses import replace

from purevk.tuning.families.default import DEFAULT
from purevk.tuning.registry import Family, register
from purevk.tuning.tiles import TiledSizes

# 128 results of an invocation take 231 of its 255 registers, and read shared memory less often. On
# AMD's GPUs, RADV of Mesa 22.3 spills 521 registers.
TILES = DEFAULT.tiles._replace(
    tiled_long=(*DEFAULT.tiles.tiled_long, TiledSizes(128, 256, 16, 8, 16, 1))
)
# With 256 halves in an invocation, RADV of Mesa 22.3 spills 481 registers: it makes floats of them
# before the loop over the steps.
NVIDIA = replace(
    DEFAULT, name="nvidia", recurrent_elements=(128, 256), tiles=TILES, packs_to_nearest=True
)

register(Family(NVIDIA, lambda device: device.vendor_id == 0x10DE))

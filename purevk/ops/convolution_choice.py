"""Which convolution kernel a device runs for given sizes, with which tiles."""

from __future__ import annotations

from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.ops.lowering import DeviceTraits
from purevk.ops.matmul_choice import Choice
from purevk.ops.matmul_choice import choose as choose_matmul


def choose(traits: DeviceTraits, rows: Size, columns: Size, depth: Size, groups: int, dtype: DType) -> Choice:
    """The tiles of an implicit matrix product [rows, depth] x [depth, columns] in `groups` groups."""
    return choose_matmul(traits, rows, columns, depth, groups, dtype, False)


@dataclass(frozen=True)
class Depthwise:
    """`conv2d_dw.comp`: `pixels` neighbours along x an invocation."""

    pixels: int
    window: bool
    local: int = 64

    def macros(self) -> dict[str, int]:
        return {"PX": self.pixels, "WINDOW": int(self.window), "LX": self.local}

    def grid(self, batches: Size, channels: Size, height: Size, width: Size) -> tuple[Size, Size, Size]:
        work = _dims.ceil_div(channels, 4) * _dims.ceil_div(width, self.pixels)
        return (_dims.ceil_div(work, self.local), height, batches)


def choose_depthwise(traits: DeviceTraits, width: Size, kernel: int, stride: int, dilation: int) -> Depthwise:
    """The depthwise kernel for a row of `width` outputs."""
    if traits.is_cpu:
        return Depthwise(4, dilation == 1)
    return Depthwise(2, dilation == 1)

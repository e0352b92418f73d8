"""Which convolution kernel a device runs for given sizes, with which tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.lower.gpu_kernels import Problem
from purevk.lower.gpu_tiles import choose_gpu
from purevk.lower.numbers import gcd4
from purevk.ops.matmul.choice import Choice, choose_registers
from purevk.ops.matmul.choice import choose as choose_matmul
from purevk.tuning import DeviceTraits
from purevk.tuning.candidates import Candidate, Needs, by_cost, take


def is_short(channels: Size) -> bool:
    """Whether one step along K covers the input channels of a tap. If the driver knows their number,
    it drops the loop over them, which halves the time on software devices."""
    return isinstance(channels, int) and channels <= 4


def choose(
    traits: DeviceTraits,
    rows: Size,
    columns: Size,
    taps: int,
    channels: Size,
    groups: int,
    half: bool,
    vectors: tuple[bool, bool] = (True, True),
    wide: bool = False,
    transposed: bool = False,
    bfloat16: bool = False,
) -> Choice:
    """The tiles of an implicit matmul [rows, taps * channels] x [taps * channels, columns] in
    `groups` groups; `half`, `vectors`, `wide`, `transposed` and `bfloat16` as for a
    matmul."""
    profile = traits.profile
    if not profile.has_fast_shared_memory and is_short(channels):
        # The loop over a row of taps is unrolled then. Larger tiles would spill registers.
        return choose_registers(
            traits, rows, columns, 4 * taps, groups, vectors[0], gcd4(columns), 16
        )
    if not profile.has_fast_shared_memory:
        return choose_matmul(traits, rows, columns, taps * channels, groups, half, False)
    depth = taps * _dims.upper(_dims.ceil_div(channels, 4)) * 4
    choice: Choice = choose_gpu(
        traits,
        Problem(
            _dims.upper(rows),
            _dims.upper(columns),
            depth,
            groups,
            half,
            transposed,
            vectors=vectors,
            window=True,
            wide=wide,
            bfloat16=bfloat16,
        ),
    )
    return choice


class DepthwiseProblem(NamedTuple):
    """`rows` rows (of all images) of `width` outputs; `texels`: read from texel buffers."""

    channels: int
    width: int
    rows: int
    dilation: int
    texels: bool


@dataclass(frozen=True)
class Depthwise(Candidate[DepthwiseProblem]):
    """`conv2d_dw.comp`: `pixels` neighbours along x per invocation. `window`: it reads a column of the
    window once. This is left to drivers that find equal reads of texel buffers."""

    pixels: int
    window: bool
    local: int = 64
    splits = 1

    def macros(self) -> dict[str, int]:
        return {"PX": self.pixels, "WINDOW": int(self.window), "LX": self.local}

    def grid(
        self, batches: Size, channels: Size, height: Size, width: Size
    ) -> tuple[Size, Size, Size]:
        work = _dims.ceil_div(channels, 4) * _dims.ceil_div(width, self.pixels)
        return (_dims.ceil_div(work, self.local), height, batches)

    def needs(self, traits: DeviceTraits, problem: DepthwiseProblem) -> Needs:
        return iter(())

    def cost(self, traits: DeviceTraits, problem: DepthwiseProblem) -> float:
        profile, pixels = traits.profile, self.pixels
        if problem.texels:
            costs = profile.registers
            spill = costs.depthwise_spill if pixels == 8 else 1.0
            return -(-problem.width // pixels) * (pixels + costs.depthwise_block) * spill
        # More neighbours per invocation, as long as enough invocations are left.
        wanted = profile.depthwise_invocations_per_core * traits.processors
        work = -(-problem.channels // 4) * problem.width * problem.rows
        return float(profile.needs_many_invocations and 1 < pixels and work < pixels * wanted)


def choose_depthwise(
    traits: DeviceTraits, channels: Size, width: Size, rows: Size, dilation: int
) -> Depthwise:
    """The depthwise kernel for `rows` rows (of all images) of `width` outputs."""
    texels = bool(traits.profile.prefers_texel_reads and traits.max_texels)
    upper = _dims.upper
    problem = DepthwiseProblem(upper(channels), upper(width), upper(rows), dilation, texels)
    window = not texels and dilation == 1
    kernels = [Depthwise(p, window) for p in ((7, 8, 4, 1) if texels else (4, 2, 1))]
    return take(traits, "depthwise", problem, by_cost(traits, problem, kernels), lambda: kernels)

"""Convolutions over planes (NCHW) by tiles in shared memory, for GPUs: many channels, or groups of
some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, Size
from purevk.ir import dims as _dims
from purevk.lower.epilogue import make_epilogue
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4, power_of_two
from purevk.ops.conv.shapes import window_parameters
from purevk.tuning import DeviceTraits

LEAST_COLUMNS = 8
_INVOCATIONS = 128
_ENOUGH = 1  # workgroups a processor, at least
_LEAST_USED = 0.8  # of the places of all tiles


@dataclass(frozen=True)
class PlaneTiles:
    """The macros of `conv2d_nchw_tiled.comp`."""

    outs: int
    groups_o: int
    groups_x: int
    groups_y: int
    blocks: int
    depth: int
    unrolled: int
    along_x: bool
    ahead: bool = False

    def macros(self) -> dict[str, int]:
        return {
            "OUTS": self.outs,
            "GROUPS_O": self.groups_o,
            "GROUPS_X": self.groups_x,
            "GROUPS_Y": self.groups_y,
            "BLOCKS": self.blocks,
            "DEPTH": self.depth,
            "UNROLLED": self.unrolled,
            "ALONG_X": int(self.along_x),
            "AHEAD": int(self.ahead),
        }

    @property
    def columns(self) -> int:
        """Of a workgroup."""
        return self.outs * self.groups_o

    @property
    def width(self) -> int:
        """Places of a workgroup along x."""
        return 4 * self.groups_x * (self.blocks if self.along_x else 1)

    @property
    def height(self) -> int:
        """Places of a workgroup along y."""
        return self.groups_y * (1 if self.along_x else self.blocks)

    @property
    def threads(self) -> int:
        return self.groups_o * self.groups_x * self.groups_y

    def shared(self, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> int:
        """Bytes of shared memory, at most."""
        wide = (self.width - 1) * stride[1] + (kernel[1] - 1) * dilation[1] + 1 + 3
        high = (self.height - 1) * stride[0] + (kernel[0] - 1) * dilation[0] + 1
        return self.depth * (16 * high * -(-wide // 4) + 4 * kernel[0] * kernel[1] * self.columns)


def choose_tiles(
    traits: DeviceTraits,
    out: Sequence[int],
    columns: int,
    channels: int,
    groups: int,
    window: tuple[Sequence[int], ...],
    spread: Sequence[int],
) -> PlaneTiles | None:
    """The tiles for places `out` [B, H, W] of `columns` in each of `groups`, from `channels` each;
    None where other kernels are better.

    Args:
        window: kernel, stride and dilation along y and x.
    """
    batches, height, width = out
    kernel, stride, dilation = window
    taps, phases = kernel[0] * kernel[1], spread[0] * spread[1]
    blocks, along_x = 2, height == 1
    outs, groups_o = 8, min(8, power_of_two(-(-columns // 8)))
    most = _INVOCATIONS // groups_o
    # Windows of neighbouring lines overlap: tiles are rather square where there are any.
    widest = most if along_x or taps == 1 else 16 if most > 32 else 8
    places = _places(most, widest, blocks, height, width)
    if places is None:
        return None
    groups_x, groups_y = places
    depth, unrolled, ahead = _steps(taps, groups_o)
    while True:
        tiles = PlaneTiles(
            outs, groups_o, groups_x, groups_y, blocks, depth, min(depth, unrolled), along_x, ahead
        )
        if depth == 1 or (
            depth // 2 < channels
            and tiles.shared(kernel, stride, dilation) <= traits.max_shared_memory
        ):
            break
        depth //= 2
    span_y, span_x = (
        (kernel[0] - 1) * dilation[0] + 1,
        3 * stride[1] + (kernel[1] - 1) * dilation[1] + 1,
    )
    lines = blocks * span_y if along_x else (blocks - 1) * stride[0] + span_y
    fits = (
        lines * span_x <= traits.profile.max_tile_window_elements
        and tiles.threads <= traits.max_invocations
        and tiles.shared(kernel, stride, dilation) <= traits.max_shared_memory
        and outs % spread[1] == 0
        and (phases == 1 or tiles.columns % (4 * phases) == 0)
    )
    grid = (
        -(-height // tiles.height) * -(-width // tiles.width),
        -(-columns // tiles.columns) * groups,
        batches,
    )
    fits = fits and all(count <= most for count, most in zip(grid, traits.max_workgroups))
    fits = fits and tiles.threads >= traits.subgroup_size
    return tiles if fits and grid[0] * grid[1] * grid[2] >= _ENOUGH * traits.processors else None


def _places(most: int, widest: int, blocks: int, height: int, width: int) -> tuple[int, int] | None:
    """The blocks of places that a workgroup has along x and y, at most `most`; None where much of
    the tiles would have no work: images of 14 x 14 take as long as converted for other kernels."""
    along_x = height == 1
    first = min(most, widest, power_of_two(-(-width // (4 * blocks if along_x else 4))))
    for groups_x in (first, first // 2, first // 4):
        groups_y = (
            1
            if along_x or not groups_x
            else min(most // groups_x, power_of_two(-(-height // blocks)))
        )
        wide, high = (
            4 * groups_x * (blocks if along_x else 1),
            groups_y * (1 if along_x else blocks),
        )
        if groups_x and height * width >= _LEAST_USED * (-(-width // wide) * wide) * (
            -(-height // high) * high
        ):
            return groups_x, groups_y
    return None


def _steps(taps: int, groups_o: int) -> tuple[int, int, bool]:
    """Channels of a step, those whose products are unrolled, and whether a step's reads are on
    their way during the step before: as measured on an H200."""
    if taps == 1:
        return 32, 16, False
    if groups_o == 1:
        return 2, 1, True
    return 8, (8 if taps <= 4 else 2), True


def tiles_of(traits: DeviceTraits, node: Node) -> PlaneTiles | None:
    """The tiles of a convolution node, if it should run by them where its input and its result are
    planes."""
    x, weight, _, stride, _, dilation, groups, _, _, spread = node.args
    kh, kw, group_in, columns = weight.type.dims
    units = traits.matrix_shape is not None and x.type.dtype is weight.type.dtype is DType.float16
    few = columns // groups < LEAST_COLUMNS or group_in < 4
    if not traits.profile.has_fast_shared_memory or units or few:
        return None
    batches, _, height, width = node.result.type.dims
    sizes = [_dims.upper(size) for size in (batches, height // spread[0], width // spread[1])]
    if not all(sizes):
        return None
    return choose_tiles(
        traits, sizes, columns // groups, group_in, groups, ((kh, kw), stride, dilation), spread
    )


def _pairs(traits: DeviceTraits, tiles: PlaneTiles) -> bool:
    """Whether neighbours of a subgroup are neighbours along x."""
    whole = traits.subgroup_size > 1 and tiles.threads % traits.subgroup_size == 0
    return whole and tiles.groups_x % 2 == 0 and traits.has("subgroup_shuffle")


def lower_tiles(
    lowering: Lowering,
    tiles: PlaneTiles,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    out: Operand,
    epilogue: Any,
    extras: tuple,
    window: tuple[tuple, tuple, tuple],
    groups: int,
    spread: tuple[int, int],
) -> None:
    """The kernel; input and result are planes."""
    batches, _, height, width = x.dims
    kh, kw, group_in, columns = weight.dims
    stride, padding, dilation = window
    places_y, places_x = out.dims[2] // spread[0], out.dims[3] // spread[1]
    vector = gcd4(places_x, out.offset)
    pairs = (
        vector
        and spread[1] == 2
        and _dims.gcd_of(places_x) % 8 == 0
        and _pairs(lowering.traits, tiles)
    )
    made = make_epilogue(
        lowering,
        epilogue,
        extras,
        out,
        3 + (bias is not None),
        "at, n",
        "at",
        None,
        vector,
        (1, "n"),
    )
    macros = {
        "T_A": x.dtype.glsl,
        "T_B": weight.dtype.glsl,
        "T_OUT": out.dtype.glsl,
        "BIAS": int(bias is not None),
        "VEC4_A": int(gcd4(width, x.offset, *x.strides[:3])),
        "VEC4_OUT": int(vector),
        "PAIRS": int(pairs),
        "VEC4_B": int(gcd4(columns // groups, columns, weight.offset, out.dims[1])),
        "SPREAD_Y": spread[0],
        "SPREAD_X": spread[1],
        **tiles.macros(),
        **made.macros,
    }
    buffers = [(x, "r"), (weight, "r")]
    if bias is not None:
        macros["T_BIAS"] = bias.dtype.glsl
        buffers.append((bias, "r"))
    tiles_x, tiles_y = _dims.ceil_div(places_x, tiles.width), _dims.ceil_div(places_y, tiles.height)
    params: dict[str, Size] = {
        "offset_a": x.offset,
        "offset_b": weight.offset,
        "offset_o": out.offset,
        **({"offset_bias": bias.offset} if bias is not None else {}),
        "IC": group_in,
        "columns": columns // groups,
        "all_columns": columns,
        "H": height,
        "W": width,
        "OH": places_y,
        "OW": places_x,
        "tiles_x": tiles_x,
        **{name: x.strides[d] for d, name in enumerate(("image_a", "channel_a", "row_a"))},
    }
    lowering.dispatch(
        "conv/conv2d_nchw_tiled.comp",
        [*buffers, (out, "w"), *made.buffers],
        macros=macros,
        params=params,
        specialize=params,
        constants=window_parameters((kh, kw), stride, padding, dilation),
        grid=(
            tiles_x * tiles_y,
            _dims.ceil_div(columns // groups, tiles.columns) * groups,
            batches,
        ),
        flops=2 * out.type.numel * kh * kw * group_in,
    )

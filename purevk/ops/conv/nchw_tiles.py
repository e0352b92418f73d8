"""Convolutions of NCHW images by tiles in shared memory, for GPUs: many channels, or groups of
some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from purevk.ir import Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.epilogue import make_epilogue
from purevk.lower.gpu_kernels import limits
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4, power_of_two
from purevk.ops.conv.arguments import Conv2d, Window
from purevk.ops.matmul.choice import both_half
from purevk.tuning import DeviceTraits
from purevk.tuning.candidates import Candidate, Needs, reasons, take
from purevk.tuning.tiles import NchwStep, TileSizes

LEAST_COLUMNS = 8
_INVOCATIONS = 128
_ENOUGH = 1  # workgroups per multiprocessor, at least
_LEAST_USED = 0.8  # of the outputs of all tiles


class NchwProblem(NamedTuple):
    """`batches` results of `height` x `width`, of `columns` channels in each of `groups`, from
    `channels` each."""

    batches: int
    height: int
    width: int
    columns: int
    channels: int
    groups: int
    window: Window
    spread: tuple[int, int]


@dataclass(frozen=True)
class NchwTiles(Candidate[NchwProblem]):
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
        """Output channels of a workgroup."""
        return self.outs * self.groups_o

    @property
    def width(self) -> int:
        """Outputs of a workgroup along x."""
        return 4 * self.groups_x * (self.blocks if self.along_x else 1)

    @property
    def height(self) -> int:
        """Outputs of a workgroup along y."""
        return self.groups_y * (1 if self.along_x else self.blocks)

    @property
    def threads(self) -> int:
        return self.groups_o * self.groups_x * self.groups_y

    def shared(self, window: Window) -> int:
        """Bytes of shared memory, at most."""
        high = (self.height - 1) * window.stride[0] + window.span[0]
        wide = (self.width - 1) * window.stride[1] + window.span[1] + 3
        return self.depth * (16 * high * -(-wide // 4) + 4 * window.taps * self.columns)

    def needs(self, traits: DeviceTraits, problem: NchwProblem) -> Needs:
        window, spread = problem.window, problem.spread
        span_y, span_x = window.span
        rows = (self.blocks - 1) * window.stride[0] + span_y
        if self.along_x:
            rows = self.blocks * span_y
        elements, most = (
            rows * (3 * window.stride[1] + span_x),
            traits.profile.max_tile_window_elements,
        )
        yield elements <= most, f"{elements} elements of windows in registers"
        yield from limits(traits, self.threads, self.shared(window))
        yield self.threads >= traits.subgroup_size, "a whole subgroup"
        yield self.depth == 1 or self.depth // 2 < problem.channels, "channels for a step"
        phases = spread[0] * spread[1]
        whole = self.outs % spread[1] == 0 and (phases == 1 or self.columns % (4 * phases) == 0)
        yield whole, "pixels that are spread to whole vectors"
        grid = (
            -(-problem.height // self.height) * -(-problem.width // self.width),
            -(-problem.columns // self.columns) * problem.groups,
            problem.batches,
        )
        enough = _ENOUGH * traits.processors
        yield grid[0] * grid[1] * grid[2] >= enough, "a workgroup for each multiprocessor"


def choose_tiles(traits: DeviceTraits, problem: NchwProblem) -> NchwTiles | None:
    """The tiles for a convolution; None where other kernels are better."""
    default = _default_tiles(traits, problem)
    if default is None:
        return None
    tiles = (default, *_variants(default))
    if not default.fits(traits, problem):
        traits.choices.note("nchw", problem, None, lambda: reasons(traits, problem, (default,)))
        return None
    fitting = (tile for tile in tiles if tile.fits(traits, problem))
    return take(traits, "nchw", problem, fitting, lambda: tiles)


def _variants(tiles: NchwTiles) -> Iterator[NchwTiles]:
    """Tiles with another step, another shape, or other numbers of columns and invocations."""
    for depth in (2 * tiles.depth, tiles.depth // 2):
        if depth:
            yield replace(tiles, depth=depth, unrolled=min(depth, tiles.unrolled))
    yield replace(tiles, ahead=not tiles.ahead)
    for unrolled in (2 * tiles.unrolled, tiles.unrolled // 2):
        if 0 < unrolled <= tiles.depth:
            yield replace(tiles, unrolled=unrolled)
    x, y, o = tiles.groups_x, tiles.groups_y, tiles.groups_o
    for groups_x, groups_y, groups_o in (
        (2 * x, y // 2, o),
        (x // 2, 2 * y, o),
        (x, 2 * y, o // 2),
        (2 * x, y, o // 2),
        (x, y // 2, 2 * o),
        (x // 2, y, 2 * o),
        (x, 2 * y, o),
        (2 * x, y, o),
        (x, y // 2, o),
        (x // 2, y, o),
    ):
        if groups_x and groups_y and groups_o and not (tiles.along_x and groups_y > 1):
            yield replace(tiles, groups_x=groups_x, groups_y=groups_y, groups_o=groups_o)


def _default_tiles(traits: DeviceTraits, problem: NchwProblem) -> NchwTiles | None:
    height, width, columns = problem.height, problem.width, problem.columns
    window = problem.window
    taps = window.taps
    blocks, along_x = 2, height == 1
    outs, groups_o = 8, min(8, power_of_two(-(-columns // 8)))
    most = _INVOCATIONS // groups_o
    # The windows of neighbouring rows overlap. Square tiles read each element fewer times.
    widest = most if along_x or taps == 1 else 16 if most > 32 else 8
    split = _split(most, widest, blocks, height, width)
    if split is None:
        return None
    groups_x, groups_y = split
    depth, unrolled, ahead = _step(traits.profile.tiles, taps, groups_o)
    while True:
        tiles = NchwTiles(
            outs, groups_o, groups_x, groups_y, blocks, depth, min(depth, unrolled), along_x, ahead
        )
        if depth == 1 or (
            depth // 2 < problem.channels and tiles.shared(window) <= traits.max_shared_memory
        ):
            break
        depth //= 2
    return tiles


def _split(most: int, widest: int, blocks: int, height: int, width: int) -> tuple[int, int] | None:
    """The groups of invocations that a workgroup has along x and y, at most `most`. None where
    large parts of the tiles would have no work: images of 14 x 14 take as long as when they are
    converted for other kernels."""
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


def _step(tiles: TileSizes, taps: int, groups_o: int) -> NchwStep:
    if taps == 1:
        return tiles.nchw_pointwise
    if groups_o == 1:
        return tiles.nchw_narrow
    return tiles.nchw_small if taps <= 4 else tiles.nchw_window


def tiles_of(traits: DeviceTraits, conv: Conv2d, result: TensorType) -> NchwTiles | None:
    """The tiles of a convolution, if it should run by them where its input and its result are
    NCHW."""
    _, _, group_in, channels = conv.weight.type.dims
    coopmat = traits.coopmat_shape is not None and both_half(
        conv.x.type.dtype, conv.weight.type.dtype
    )
    few = channels // conv.groups < LEAST_COLUMNS or group_in < 4
    if not traits.profile.has_fast_shared_memory or coopmat or few:
        return None
    batches, _, height, width = result.dims
    spread = conv.spread
    sizes = (batches, height // spread[0], width // spread[1])
    batches, height, width = (_dims.upper(size) for size in sizes)
    if not (batches and height and width):
        return None
    columns, depth = _dims.specialize(channels) // conv.groups, _dims.upper(group_in)
    problem = NchwProblem(batches, height, width, columns, depth, conv.groups, conv.window, spread)
    return choose_tiles(traits, problem)


def _pairs(traits: DeviceTraits, tiles: NchwTiles) -> bool:
    """Whether neighbours of a subgroup are neighbours along x."""
    whole = traits.subgroup_size > 1 and tiles.threads % traits.subgroup_size == 0
    return whole and tiles.groups_x % 2 == 0 and traits.has("subgroup_shuffle")


def lower_tiles(
    lowering: Lowering,
    conv: Conv2d,
    tiles: NchwTiles,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    out: Operand,
) -> None:
    """The kernel; input and result are NCHW."""
    batches, _, height, width = x.dims
    _, _, group_in, columns = weight.dims
    groups, spread = conv.groups, conv.spread
    out_y, out_x = out.dims[2] // spread[0], out.dims[3] // spread[1]
    vector = gcd4(out_x, out.offset)
    pairs = (
        vector
        and spread[1] == 2
        and _dims.gcd_of(out_x) % 8 == 0
        and _pairs(lowering.traits, tiles)
    )
    epilogue = make_epilogue(
        lowering,
        conv.epilogue,
        conv.extras,
        out,
        "at, n",
        "at",
        None,
        vector,
        (1, "n"),
    )
    macros = {
        "VEC4_A": int(gcd4(width, x.offset, *x.strides[:3])),
        "VEC4_OUT": int(vector),
        "PAIRS": int(pairs),
        "VEC4_B": int(gcd4(columns // groups, columns, weight.offset, out.dims[1])),
        "SPREAD_Y": spread[0],
        "SPREAD_X": spread[1],
        **tiles.macros(),
    }
    tiles_x, tiles_y = _dims.ceil_div(out_x, tiles.width), _dims.ceil_div(out_y, tiles.height)
    params: dict[str, Size] = {
        "IC": group_in,
        "columns": columns // groups,
        "all_columns": columns,
        "H": height,
        "W": width,
        "OH": out_y,
        "OW": out_x,
        "tiles_x": tiles_x,
        **{name: x.strides[d] for d, name in enumerate(("image_a", "channel_a", "row_a"))},
    }
    lowering.dispatch(
        "conv/conv2d_nchw_tiled.comp",
        {"a": x, "b": weight, "bias": bias, "out": out},
        params,
        macros,
        epilogue=epilogue,
        specialize=True,
        constants=conv.window.params,
        grid=(
            tiles_x * tiles_y,
            _dims.ceil_div(columns // groups, tiles.columns) * groups,
            batches,
        ),
        flops=2 * out.type.numel * conv.window.taps * group_in,
    )

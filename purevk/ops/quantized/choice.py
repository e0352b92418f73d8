"""Which kernel multiplies by a quantized weight, with which tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.lower.gpu_tiles import Coopmat, Problem
from purevk.tuning import DeviceTraits

FEW_ROWS = 8  # up to so many rows, the weight is read once and not put into tiles


@dataclass(frozen=True)
class Form:
    """A template with what specializes it."""

    template: str
    grid: tuple[Size, Size, Size]
    macros: dict[str, int] = field(default_factory=dict)
    subgroup_size: int | None = None


def choose(
    traits: DeviceTraits,
    m: Size,
    n: Size,
    k: Size,
    bits: int,
    words: Size,
    first_word: Size,
    group: int,
    integers: bool,
    halves: bool = False,
) -> Form:
    """The kernel for [m, k] times a weight of n rows.

    Args:
        words: of 4 bytes from one row of the weight to the next; `first_word` is that of the first
            row.
        group: codes that share a scale; 0: all of a row.
        integers: the activations are int8 codes. halves: they are float16.
    """
    unit = 16 if integers else 4

    def whole(count: int) -> bool:
        """Whether rows and groups have a multiple of so many words."""
        return (
            _dims.gcd_of(words) % count == 0
            and _dims.gcd_of(first_word) % count == 0
            and group % (count * 32 // bits) == 0
        )

    few = not traits.profile.has_fast_shared_memory or m <= FEW_ROWS
    if (form := _units(traits, m, n, k, bits, group, integers, halves, whole)) is not None:
        return form
    if few or group % unit:
        return _few_rows(traits, m, n, bits, group, integers, halves, whole)
    most = _dims.upper(m)
    if most <= 4 * FEW_ROWS and (
        integers or (traits.has("subgroup_arithmetic", "subgroup_size_control") and bits == 4)
    ):
        return _few_rows(traits, m, n, bits, group, integers, halves, whole)
    shape = traits.matrix_shape
    if halves and not group and shape is not None and shape[0] * shape[1] == 256:
        units = _half_tile(traits, shape, most)
        if units.fits(traits, Problem(most, _dims.upper(n), _dims.upper(k), 1, True, True)):
            return Form(
                "quantized/qmatmul.comp", units.grid(m, n, 1), units.macros(), units.subgroup
            )
    tile_m, tile_n = _tile(traits, m, n)
    grid = (_dims.ceil_div(n, tile_n), _dims.ceil_div(m, tile_m), 1)
    if integers:
        return Form("quantized/qmatmul_int.comp", grid, integer_tile(tile_m, tile_n))
    if most <= 16:
        grid = (_dims.ceil_div(n, 32), 1, 1)
        return Form(
            "quantized/qmatmul.comp",
            grid,
            {"TILE_M": 16, "TILE_N": 32, "TILE_K": 64, "THREAD_M": 4, "THREAD_N": 4, "SLICES": 4},
        )
    depth = 16 if tile_m == 64 else 32
    return Form(
        "quantized/qmatmul.comp",
        grid,
        {"TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": depth, "THREAD_M": 4, "THREAD_N": 4},
    )


def _half_tile(traits: DeviceTraits, shape: tuple[int, int, int], rows: int) -> Coopmat:
    """Tiles on matrix units for activations in half."""
    sizes = (128, 64, 32, 32, 32) if rows > 64 else (64, 64, 64, 32, 32)
    return Coopmat(*sizes, shape=shape, subgroup=traits.subgroup_size)


def _tile(traits: DeviceTraits, m: Size, n: Size) -> tuple[int, int]:
    """The largest tile that still gives every core one."""
    for tile_m, tile_n in ((64, 64), (32, 64), (32, 32)):
        if -(-_dims.upper(m) // tile_m) * -(-_dims.upper(n) // tile_n) >= max(traits.cores, 16):
            break
    return tile_m, tile_n


def integer_tile(tile_m: int, tile_n: int) -> dict[str, int]:
    """Macros of `qtile.glslh`."""
    return {"TILE_M": tile_m, "TILE_N": tile_n, "CHUNKS": 4, "THREAD_M": 4, "THREAD_N": 4}


def _few_rows(
    traits: DeviceTraits,
    m: Size,
    n: Size,
    bits: int,
    group: int,
    integers: bool,
    halves: bool,
    whole: Callable[[int], bool],
) -> Form:
    rows = next(count for count in (1, 2, 4, 8) if count >= min(_dims.upper(m), FEW_ROWS))
    subgroups = traits.has("subgroup_arithmetic", "subgroup_size_control")
    lanes = traits.subgroup_size if subgroups else 32
    profile = traits.profile
    share = not integers and profile.has_fast_shared_memory
    many = (
        _dims.upper(n) >= 64 * traits.processors
    )  # a subgroup for each 8 columns fills the device
    columns, most, local = 4, 4, lanes
    if integers and profile.overlaps_loads:
        columns = 8 if rows == 4 and bits == 4 else 4
        most = 2 if rows == 8 else 4
    elif share:
        columns, most = 8 if rows < 8 and many else 4, 2
        if many and rows <= 2 and subgroups:
            columns, most = 4 if rows == 1 and bits == 4 else 8, 4 if rows == 2 or bits == 4 else 2
    few = not many and rows == 1 and profile.has_fast_shared_memory
    if few and 2 * lanes <= traits.max_invocations:
        local = 2 * lanes

    teams = 1
    if (
        share and many and subgroups and (rows > 1 or bits == 4)
    ):  # what is read of A serves more columns
        teams = max(min(4 if rows < 4 else 8, traits.max_invocations // lanes), 1)

    def fits(count: int) -> bool:
        shared = rows * local * (count * 32 // bits // 4 + 1) * 16 if share else 0
        return count <= most and whole(count) and shared <= traits.max_shared_memory

    together = next(filter(fits, (4, 2, 1)), 0)
    macros = {
        "ROWS": rows,
        "COLS": columns,
        "STEPS": 1,
        "WORDS": together or 1,
        "ANY_GROUP": int(not together),
        "SHARE": int(share),
        "LX": local,
        "SUBGROUP": lanes if subgroups else 0,
        "TEAMS": teams,
    }
    grid = (_dims.ceil_div(n, columns * teams), _dims.ceil_div(m, rows), 1)
    return Form("quantized/qmatvec.comp", grid, macros, lanes if subgroups else None)


def _units(
    traits: DeviceTraits,
    m: Size,
    n: Size,
    k: Size,
    bits: int,
    group: int,
    integers: bool,
    halves: bool,
    whole: Callable[[int], bool],
) -> Form | None:
    """The kernel on matrix units, where it can be and is the faster one: its time hardly grows with
    the first rows."""
    most, segment = _dims.upper(m), 512 // bits
    if most == 1 or (integers and bits == 8 and most <= 4):  # the vector kernel is as fast
        return None
    if (
        not traits.profile.has_fast_shared_memory
        or not traits.few_columns
        or not whole(4)
        or (group and segment % group and group % segment)
    ):
        return None
    split = not (halves or integers)
    sizes = (4, 8, 16) if split else (8, 16, 32)
    rows = next((count for count in sizes if count >= most), sizes[-1])
    units, scales = rows * (1 + split) // 8, max(segment // group, 1) if group else 1
    shapes = [
        _units_shape(units, bits, most > rows),
        (1, 2, 4, 2, 0, 1),
        (1, 2, 4, 1, 0, 1),
        (1, 4, 2, 1, 0, 1),
        (1, 4, 1, 1, 0, 1),
    ]
    tiles, subs_n, *_ = shapes[0]
    if (
        2 * _dims.ceil_div(most, rows) * _dims.ceil_div(_dims.upper(n), 16 * tiles * subs_n)
        < traits.processors
    ):
        shapes = shapes[1:]  # few tiles: K is shared
    for shape in shapes:
        tiles, subs_n, subs_k, blocks, ahead, segments = shape
        shared = subs_k * (blocks * units * 16384 // bits + 8 * rows) + 512 * subs_n * subs_k
        if shared <= traits.max_shared_memory and 32 * subs_n * subs_k <= traits.max_invocations:
            break
    else:
        return None
    if not traits.fragment_order():
        return None
    macros = {
        "MATRIX_UNITS": 1,
        "ROWS": rows,
        "SPLIT": int(split),
        "SCALES": scales,
        "SCALES4": int(scales == 4 and _dims.gcd_of(k) % segment == 0),
        "BLOCKS": blocks,
        "SEGMENTS": segments,
        "TILES": tiles,
        "SUBS_N": subs_n,
        "SUBS_K": subs_k,
        "AHEAD": ahead,
    }
    grid = (_dims.ceil_div(m, rows), _dims.ceil_div(n, 16 * tiles * subs_n), 1)
    return Form("quantized/qmatmul_coopmat.comp", grid, macros, 32)


def _units_shape(units: int, bits: int, many: bool) -> tuple[int, int, int, int, int, int]:
    """TILES, SUBS_N, SUBS_K, BLOCKS, AHEAD and SEGMENTS for `units` times 8 columns of A, as
    measured on an NVIDIA H200: neighbours in this list may take twice the time, or need more
    registers than there are. `many`: the weight is read more than once."""
    if units == 1:
        return (1, 8, 1, 4, 0, 2) if bits == 4 else (1, 4, 4, 1, 1, 2)
    if bits == 8 and not many:
        return (1, 8, 2, 2, 1, 1)
    return (2, 8, 1, 4 if units == 2 else 2, 1, 1)

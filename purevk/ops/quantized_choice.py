"""Which kernel multiplies by a quantized weight, with which tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.ops.lowering import DeviceTraits

FEW_ROWS = 8  # up to so many rows, the weight is read once and not put into tiles


@dataclass(frozen=True)
class Form:
    """A template with what specializes it."""

    template: str
    grid: tuple[Size, Size, Size]
    macros: dict[str, Any] = field(default_factory=dict)
    subgroup_size: int | None = None


def choose(
    traits: DeviceTraits, m: Size, n: Size, k: Size, bits: int, words: Size, first_word: int, group: int, integers: bool
) -> Form:
    """The kernel for [m, k] times a weight of n rows.

    Args:
        words: of 4 bytes from one row of the weight to the next; `first_word` is that of the first row.
        group: codes that share a scale; 0: all of a row.
        integers: the activations are int8 codes.
    """
    unit = 16 if integers else 4
    if traits.is_cpu or m <= FEW_ROWS or group % unit:
        return _few_rows(traits, m, n, bits, words, first_word, group)
    tile_m, tile_n = _tile(traits, m, n)
    grid = (_dims.ceil_div(n, tile_n), _dims.ceil_div(m, tile_m), 1)
    if integers:
        return Form("qmatmul_int.comp", grid, integer_tile(tile_m, tile_n))
    depth = 16 if tile_m == 64 else 32
    return Form("qmatmul.comp", grid, {"TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": depth, "THREAD_M": 4, "THREAD_N": 4})


def _tile(traits: DeviceTraits, m: Size, n: Size) -> tuple[int, int]:
    """The largest tile that still gives every core one."""
    for tile_m, tile_n in ((64, 64), (32, 64), (32, 32)):
        if -(-_dims.upper(m) // tile_m) * -(-_dims.upper(n) // tile_n) >= max(traits.cores, 16):
            break
    return tile_m, tile_n


def integer_tile(tile_m: int, tile_n: int) -> dict[str, int]:
    """Macros of `qtile.glslh`."""
    return {"TILE_M": tile_m, "TILE_N": tile_n, "CHUNKS": 4, "THREAD_M": 4, "THREAD_N": 4}


def _few_rows(traits: DeviceTraits, m: Size, n: Size, bits: int, words: Size, first_word: int, group: int) -> Form:
    rows = next(count for count in (1, 2, 4, 8) if count >= min(_dims.upper(m), FEW_ROWS))
    macros: dict[str, Any] = {"ROWS": rows, "COLS": 4, "STEPS": 1, "WORDS": 1}
    together = [
        count for count in (4, 2, 1)
        if _dims.gcd_of(words) % count == 0 and first_word % count == 0 and group % (count * 32 // bits) == 0
    ]  # fmt: skip
    if together:
        macros["WORDS"] = together[0]
    else:
        macros["ANY_GROUP"] = 1
    subgroups = traits.has("subgroup_arithmetic", "subgroup_size_control")
    lanes = traits.subgroup_size if subgroups else 32
    macros |= {"LX": lanes, "SUBGROUP": lanes if subgroups else 0}
    grid = (_dims.ceil_div(n, macros["COLS"]), _dims.ceil_div(m, rows), 1)
    return Form("qmatvec.comp", grid, macros, lanes if subgroups else None)

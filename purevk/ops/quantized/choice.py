"""Which kernel multiplies by a quantized weight, with which tiles.

- One row of activations: `qdot.comp`, where a workgroup takes 4 rows of the weight and stages nothing;
  with many columns `qmatvec.comp`, where a subgroup takes them and shares activations. Without matrix
  cores, up to 8 rows take the latter.
- Few rows with matrix cores: `qdot_coopmat.comp` for one row of many columns, and for 2 to 4 rows of
  float16 with weights of 4 bits in groups of a multiple of 32 values.
- Other rows with matrix cores: `qmatmul_coopmat.comp`. Quantized values go from memory into fragments
  as exact float16. A float32 activation becomes two float16 values, so the accuracy is that of float32.
- From 256 rows of float16 on, `qdequantize.comp` makes the weight into float16 at each call, and a
  matmul of float16 follows. Weights with minimums have no other kernel on matrix cores, so for them
  it is so from 33 rows on. Software devices do the same in float32, from 16 rows on: they have no
  other kernel for many rows.
- Many rows of int8: `qmatmul_int.comp`, convolutions `qconv2d.comp`. Their sums are integers, so they
  are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.lower.gpu_kernels import Problem
from purevk.lower.lowering import Operand
from purevk.lower.matrix_core_kernels import Coopmat
from purevk.lower.numbers import gcd4, gcd8
from purevk.ops.quantized.fragments import choose_fragments
from purevk.tuning import DeviceTraits
from purevk.tuning.tiles import QuantizedSizes, TileSizes

HALVES_ROWS = (
    256  # from so many rows on, a matmul of halves is faster by more than it takes to make them
)
DEQUANTIZED_BYTES = 1 << 28  # of a dequantized weight, at most: it is temporary memory
MANY_COLUMNS = 64  # for each multiprocessor
DOT_ROWS = (1, 2, 4, 8)  # that `qdot_coopmat.comp` takes at once
FUSED_ROWS = 4  # up to so many it normalizes: each workgroup computes the norms of all rows
FEW_ROWS = 8  # up to so many rows, the weight is read once and not put into tiles
MINIMUM_ROWS = 4 * FEW_ROWS + 1  # as HALVES_ROWS, of weights with minimums
SOFTWARE_ROWS = 2 * FEW_ROWS  # as HALVES_ROWS, of float32 on software devices


@dataclass(frozen=True)
class Form:
    """A template with what specializes it."""

    template: str
    grid: tuple[Size, Size, Size]
    macros: dict[str, int] = field(default_factory=dict)
    subgroup_size: int | None = None


@dataclass(frozen=True)
class QuantizedMatmul:
    """A matmul of [m, k] with a weight of n rows.

    Attributes:
        bits: of a quantized value of the weight: 8 or 4.
        words: of 4 bytes from one row of the weight to the next.
        first_word: of the first row of the weight.
        group: quantized values that share a scale; 0: all of a row.
        integers: the activations are int8.
        halves: the activations are float16.
        wide: rows of the activations start at multiples of 16 elements, of which they have a whole
            number.
        groups: scales from one row of the weight to the next. There may be more than a row needs.
        minimums: each group has a minimum besides its scale.
    """

    m: Size
    n: Size
    k: Size
    bits: int
    words: Size
    first_word: Size
    group: int
    integers: bool
    halves: bool = False
    wide: bool = False
    groups: Size = 1
    minimums: bool = False

    @property
    def max_m(self) -> int:
        """Rows of the activations, at most."""
        return _dims.upper(self.m)

    @property
    def max_n(self) -> int:
        """Rows of the weight, at most."""
        return _dims.upper(self.n)

    @property
    def has_vectors_of_scales(self) -> bool:
        """Whether the scales of each row start at a multiple of 4, of which there is a whole number."""
        return _dims.gcd_of(self.groups) % 4 == 0

    def reads_words(self, count: int) -> bool:
        """Whether rows and groups consist of so many words, several times."""
        return (
            _dims.gcd_of(self.words) % count == 0
            and _dims.gcd_of(self.first_word) % count == 0
            and self.group % (count * 32 // self.bits) == 0
        )


def choose(traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
    """The kernel for a matmul with a quantized weight."""
    few = not traits.profile.has_fast_shared_memory or matmul.m <= FEW_ROWS
    aligned = matmul.wide and matmul.reads_words(matmul.bits // 2)
    if matmul.integers and aligned and not matmul.group:
        tile = choose_fragments(traits, matmul.m, matmul.n, matmul.k)
        if tile is not None:
            grid = tile.grid(matmul.m, matmul.n)
            return Form("quantized/qmatmul_int.comp", grid, tile.macros(), tile.subgroup)
    if (form := _dot_coopmat(traits, matmul) or _coopmat(traits, matmul)) is not None:
        return form
    if few or matmul.group % (16 if matmul.integers else 4):
        return _few_rows(traits, matmul)
    rows = matmul.max_m
    if rows <= 4 * FEW_ROWS and (
        matmul.integers
        or (traits.has("subgroup_arithmetic", "subgroup_size_control") and matmul.bits == 4)
    ):
        return _few_rows(traits, matmul)
    shape = traits.coopmat_shape
    if matmul.halves and not matmul.group and shape is not None and shape[0] * shape[1] == 256:
        coopmat = _half_tile(traits, shape, rows)
        problem = Problem(rows, matmul.max_n, _dims.upper(matmul.k), 1, True, True)
        if coopmat.fits(traits, problem):
            grid = coopmat.grid(matmul.m, matmul.n, 1)
            return Form("quantized/qmatmul.comp", grid, coopmat.macros(), coopmat.subgroup)
    tile_m, tile_n = _tile(traits, rows, matmul.max_n)
    grid = (_dims.ceil_div(matmul.n, tile_n), _dims.ceil_div(matmul.m, tile_m), 1)
    if matmul.integers:
        return Form("quantized/qmatmul_int.comp", grid, integer_tile(traits, tile_m, tile_n))
    if rows <= 16:
        grid = (_dims.ceil_div(matmul.n, 32), 1, 1)
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


def is_dequantized(traits: DeviceTraits, matmul: QuantizedMatmul) -> bool:
    """Whether the weight is better dequantized at each call, to the dtype of the activations."""
    if not traits.profile.has_fast_shared_memory:
        least = None if matmul.halves else SOFTWARE_ROWS
    elif matmul.halves and traits.coopmat_shape is not None:
        least = MINIMUM_ROWS if matmul.minimums else HALVES_ROWS
    else:
        least = None
    nbytes = (2 if matmul.halves else 4) * matmul.max_n * _dims.upper(matmul.k)
    return (
        least is not None
        and not matmul.integers
        and _dims.range_of(matmul.m)[0] >= least
        and nbytes <= min(DEQUANTIZED_BYTES, traits.max_storage_range)
        and _dims.gcd_of(matmul.k) % 8 == 0
        and matmul.group % 8 == 0
    )


def _half_tile(traits: DeviceTraits, shape: tuple[int, int, int], rows: int) -> Coopmat:
    """Tiles on matrix cores for float16 activations."""
    sizes = (128, 64, 32, 32, 32) if rows > 64 else (64, 64, 64, 32, 32)
    return Coopmat(*sizes, shape=shape, subgroup=traits.subgroup_size)


def _tile(traits: DeviceTraits, rows: int, columns: int) -> tuple[int, int]:
    """The largest tile that leaves one for each multiprocessor."""
    for tile_m, tile_n in ((64, 64), (32, 64), (32, 32)):
        if -(-rows // tile_m) * -(-columns // tile_n) >= max(traits.cores, 16):
            break
    return tile_m, tile_n


def integer_tile(traits: DeviceTraits, tile_m: int, tile_n: int) -> dict[str, int]:
    """Macros of `qtile.glslh`."""
    sizes = {"TILE_M": tile_m, "TILE_N": tile_n, "CHUNKS": 4, "THREAD_M": 4, "THREAD_N": 4}
    return sizes if traits.profile.tiles.quantized_unrolled else {**sizes, "UNROLL_CHUNKS": 0}


class _Vectors(NamedTuple):
    """Macros of `qmatvec.comp`: COLS, WORDS, LX and TEAMS."""

    columns: int
    words: int
    local: int
    teams: int


def _variants(
    default: _Vectors, lanes: int, max_invocations: int, subgroups: bool
) -> Iterator[_Vectors]:
    """Other sizes that the template takes, those near the default first."""
    teams = (1, 2, 4, 8) if subgroups else (1,)
    shapes = [(lanes, count) for count in teams] + [(2 * lanes, 1)]
    for changes in (1, 2, 3):
        for words in (4, 2, 1):
            for columns in (4, 8):
                for local, count in shapes:
                    made = _Vectors(columns, words, local, count)
                    shape = (local, count) != (default.local, default.teams)
                    changed = (words != default.words) + (columns != default.columns) + shape
                    if changed == changes and local * count <= max_invocations:
                        yield made


def _few_rows(traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
    """The vector kernel: a workgroup reads columns of the weight once."""
    bits, integers = matmul.bits, matmul.integers
    rows = next(count for count in (1, 2, 4, 8) if count >= min(matmul.max_m, FEW_ROWS))
    subgroups = traits.has("subgroup_arithmetic", "subgroup_size_control")
    if rows == 1 and subgroups and (form := _dot(traits, matmul)) is not None:
        return form
    lanes = traits.subgroup_size if subgroups else 32
    profile = traits.profile
    share = not integers and profile.has_fast_shared_memory
    # A subgroup for each 8 columns fills the device.
    many = matmul.max_n >= MANY_COLUMNS * traits.processors
    columns, most, local = 4, 4, lanes
    if integers and profile.overlaps_loads:
        columns = 8 if rows == 4 and bits == 4 else 4
        most = 2 if rows == 8 else 4
    elif share:
        columns, most = 8 if rows < 8 and many else 4, 2
        if many and rows <= 2 and subgroups:
            columns, most = 4 if rows == 1 and bits == 4 else 8, 4 if rows == 2 or bits == 4 else 2
    if rows == 1 and not integers and not profile.has_fast_shared_memory:
        columns = 16  # what is read of A serves more columns
    wide = 2 * lanes
    if not many and rows == 1 and profile.has_fast_shared_memory and wide <= traits.max_invocations:
        local = wide

    teams = 1
    if share and many and subgroups and (rows > 1 or bits == 4):
        # What is read of A serves more columns.
        teams = max(min(4 if rows < 4 else 8, traits.max_invocations // lanes), 1)

    def fits(tile: _Vectors) -> bool:
        count = tile.words
        shared = rows * tile.local * (count * 32 // bits // 4 + 1) * 16 if share else 0
        return matmul.reads_words(count) and shared <= traits.max_shared_memory

    sizes = [_Vectors(columns, count, local, teams) for count in (4, 2, 1) if count <= most]
    default = next(filter(fits, sizes), None)
    if default is None:
        tile = _Vectors(columns, 1, local, teams)
    else:
        found = filter(fits, _variants(default, lanes, traits.max_invocations, subgroups))
        problem = (rows, matmul.max_n, _dims.upper(matmul.k), bits, matmul.group, integers, share)
        tile = traits.choices.take("quantized rows", problem, chain((default,), found))
    macros = {
        "ROWS": rows,
        "COLS": tile.columns,
        "STEPS": 1,
        "WORDS": tile.words,
        "ANY_GROUP": int(default is None),
        "SHARE": int(share),
        "LX": tile.local,
        "SUBGROUP": lanes if subgroups else 0,
        "TEAMS": tile.teams,
    }
    grid = (_dims.ceil_div(matmul.n, tile.columns * tile.teams), _dims.ceil_div(matmul.m, rows), 1)
    return Form("quantized/qmatvec.comp", grid, macros, lanes if subgroups else None)


def _dot(traits: DeviceTraits, matmul: QuantizedMatmul) -> Form | None:
    """The kernel of one row that stages nothing; None if another is faster or needed."""
    words = matmul.bits // 2  # 16 elements
    chunks = _dims.upper(matmul.k) // 16
    lanes = next((lanes for lanes in (256, 128, 64, 32) if chunks >= lanes), 0)
    # With many columns, shared memory saves more loads than its barriers cost.
    if (
        matmul.integers
        or matmul.max_n >= MANY_COLUMNS * traits.processors
        or not traits.profile.has_fast_shared_memory
        or not matmul.reads_words(words)
        or _dims.gcd_of(matmul.k) % 4
        or not lanes
        or lanes % traits.subgroup_size
        or lanes > traits.max_invocations
    ):
        return None
    macros = {
        "WORDS": words,
        "STEPS": min(-(-chunks // lanes), 2),
        "LX": lanes,
        "SG": traits.subgroup_size,
    }
    grid = (_dims.ceil_div(matmul.n, 4), matmul.m, 1)
    return Form("quantized/qdot.comp", grid, macros, traits.subgroup_size)


def choose_few_rows(traits: DeviceTraits, matmul: QuantizedMatmul, paired: bool) -> Form | None:
    """How one of the kernels of few rows runs; None if another template is faster, or its form lacks
    these parts.

    Args:
        paired: a team computes pairs of columns.
    """
    if matmul.max_m > FEW_ROWS or _dims.gcd_of(matmul.k) % 4:
        return None
    if paired and matmul.max_n % 8:
        return None
    form = choose(traits, matmul)
    macros = form.macros
    if form.template == "quantized/qdot_coopmat.comp" and macros["ROWS"] > FUSED_ROWS:
        return None
    columns = {"quantized/qdot.comp": 4, "quantized/qdot_coopmat.comp": 16}.get(form.template)
    if columns:
        if paired and macros.get("ROWS") == 1:  # a pair has as many words in flight as two segments
            macros = {**macros, "SEGMENTS": 1}
        grid = (_dims.ceil_div(matmul.n, columns * (1 + paired)), *form.grid[1:])
        return Form(form.template, grid, macros, form.subgroup_size)
    if form.template != "quantized/qmatvec.comp" or not macros["SHARE"] or macros["ANY_GROUP"]:
        return None
    if not paired:
        return form
    columns = 8  # pairs of two vec4s for each invocation
    grid = (_dims.ceil_div(matmul.n, columns * macros["TEAMS"]), *form.grid[1:])
    return Form(form.template, grid, {**macros, "COLS": columns}, form.subgroup_size)


def vectors_of_rows(form: Form, x: Operand) -> dict[str, int]:
    """The macros that say how long vectors a kernel reads of the dense rows of float activations."""
    starts = (x.dims[1], x.strides[0], x.offset)
    wide = form.template == "quantized/qdot.comp" and x.dtype is DType.float16 and gcd8(*starts)
    return {"VEC8_A": 1, "VEC4_A": 0} if wide else {"VEC4_A": int(gcd4(*starts))}


def _columns(tile: QuantizedSizes) -> int:
    """Columns of the result that a workgroup computes."""
    return 16 * tile.tiles * tile.subs_n


def _shared(tile: QuantizedSizes, rows: int, fragments: int, bits: int) -> int:
    """Bytes of shared memory."""
    of_a = tile.blocks * fragments * 16384 // bits
    return tile.subs_k * (of_a + 8 * rows) + 512 * tile.subs_n * tile.subs_k


def _dot_coopmat(traits: DeviceTraits, matmul: QuantizedMatmul) -> Form | None:
    """The kernel on matrix cores for few rows of halves and weights of 4 bits; None if another is
    faster or needed."""
    rows = next((count for count in DOT_ROWS if count >= matmul.max_m), 0)
    many = matmul.max_n >= MANY_COLUMNS * traits.processors
    # Each workgroup brings all rows into shared memory. One row of few columns is faster without
    # fragments.
    if (
        not rows
        or (many and rows > FUSED_ROWS)
        or (rows == 1 and not many)
        or matmul.integers
        or matmul.minimums
        or not matmul.halves
        or matmul.bits != 4
        or not traits.profile.has_fast_shared_memory
        or 8 not in traits.coopmat_columns
        or not traits.has("subgroup_shuffle", "subgroup_arithmetic")
        or not matmul.reads_words(4)
        or not traits.fragment_order(DType.float16, 8)
    ):
        return None
    depth = max(-(-_dims.upper(matmul.k) // 128), 1)
    if many:
        subs, segments = 4, 2
    else:
        subs, segments = (16, 1) if depth >= 64 else (8, 2)
    # Bytes of shared memory: A, the sums of columns or pairs of them, and squares.
    per_subgroup = rows * (256 * segments + (132 if rows <= FUSED_ROWS else 64))
    most = min(traits.max_invocations // 32, traits.max_shared_memory // per_subgroup, depth)
    while subs > max(most, 1):
        subs //= 2
    segments = min(segments, -(-depth // subs))
    macros = {
        "COOPMAT": 1,
        "ROWS": rows,
        "SCALES4": int(matmul.group == 32 and matmul.has_vectors_of_scales),
        "SEGMENTS": segments,
        "SUBS": subs,
    }
    grid = (_dims.ceil_div(matmul.n, 16), _dims.ceil_div(matmul.m, rows), 1)
    return Form("quantized/qdot_coopmat.comp", grid, macros, 32)


def _coopmat(traits: DeviceTraits, matmul: QuantizedMatmul) -> Form | None:
    """The kernel on matrix cores, if the device can run it and it is the fastest one. Its time
    hardly grows with the first rows."""
    most, bits, group = matmul.max_m, matmul.bits, matmul.group
    segment = 512 // bits
    # The vector kernel is as fast.
    if most == 1 or (matmul.integers and bits == 8 and most <= 4):
        return None
    if (
        not traits.profile.has_fast_shared_memory
        or matmul.minimums
        or 8 not in traits.coopmat_columns
        or not traits.has("subgroup_shuffle", "subgroup_arithmetic")
        or not matmul.reads_words(4)
        or (group and segment % group and group % segment)
    ):
        return None
    split = not (matmul.halves or matmul.integers)
    sizes = (4, 8, 16) if split else (8, 16, 32)
    rows = next((count for count in sizes if count >= most), sizes[-1])
    fragments = rows * (1 + split) // 8
    scales = max(segment // group, 1) if group else 1
    known = traits.profile.tiles
    best = _best_tile(known, fragments, bits, most > rows)
    groups = _dims.ceil_div(most, rows) * _dims.ceil_div(matmul.max_n, _columns(best))
    # With few workgroups, several subgroups share K.
    small = known.quantized_small
    tiles = small if 2 * groups < traits.processors else (best, *small)
    for tile in tiles:
        shared, invocations = _shared(tile, rows, fragments, bits), 32 * tile.subs_n * tile.subs_k
        if shared <= traits.max_shared_memory and invocations <= traits.max_invocations:
            break
    else:
        return None
    if not traits.fragment_order(DType.float16, 8):
        return None
    macros = {
        "COOPMAT": 1,
        "ROWS": rows,
        "SPLIT": int(split),
        "SCALES": scales,
        "SCALES4": int(scales == 4 and matmul.has_vectors_of_scales),
        "BLOCKS": tile.blocks,
        "SEGMENTS": tile.segments,
        "TILES": tile.tiles,
        "SUBS_N": tile.subs_n,
        "SUBS_K": tile.subs_k,
        "AHEAD": tile.ahead,
    }
    grid = (_dims.ceil_div(matmul.m, rows), _dims.ceil_div(matmul.n, _columns(tile)), 1)
    return Form("quantized/qmatmul_coopmat.comp", grid, macros, 32)


def _best_tile(sizes: TileSizes, fragments: int, bits: int, rereads: bool) -> QuantizedSizes:
    """The fastest tile where it fits.

    Args:
        fragments: of 8 rows of A that a workgroup multiplies.
        bits: of a quantized value.
        rereads: the weight is read more than once.
    """
    if fragments == 1:
        return sizes.quantized_4bit if bits == 4 else sizes.quantized_8bit
    if bits == 8 and not rereads:
        return sizes.quantized_8bit_once
    return sizes.quantized_two if fragments == 2 else sizes.quantized_many

"""The templates that multiply by a quantized weight: what each needs, and how it runs. `choice.py`
takes one of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.lower.gpu_kernels import Problem, limits
from purevk.lower.matrix_core_kernels import Coopmat
from purevk.ops.quantized.fragments import Fragments, choose_fragments
from purevk.tuning import DeviceTraits
from purevk.tuning.candidates import Candidate, Needs
from purevk.tuning.tiles import QuantizedSizes, TileSizes

MANY_COLUMNS = 64  # for each multiprocessor
DOT_ROWS = (1, 2, 4, 8)  # that `qdot_coopmat.comp` takes at once
FUSED_ROWS = 4  # up to so many it normalizes: each workgroup computes the norms of all rows
FEW_ROWS = 8  # up to so many rows, the weight is read once and not put into tiles


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

    def has_many_columns(self, traits: DeviceTraits) -> bool:
        """Whether a subgroup for each 8 columns fills the device."""
        return self.max_n >= MANY_COLUMNS * traits.processors

    def reads_words(self, count: int) -> bool:
        """Whether rows and groups consist of so many words, several times."""
        return (
            _dims.gcd_of(self.words) % count == 0
            and _dims.gcd_of(self.first_word) % count == 0
            and self.group % (count * 32 // self.bits) == 0
        )


class _Template(Candidate[QuantizedMatmul]):
    """A template for matmuls with a quantized weight."""

    @abstractmethod
    def form(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
        """How it runs, if what it needs holds."""

    def __str__(self) -> str:
        return type(self).__name__


class IntegerFragments(_Template):
    """`qmatmul_int.comp` on matrix cores."""

    def needs(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Needs:
        yield matmul.integers, "int8 activations"
        yield matmul.wide and matmul.reads_words(matmul.bits // 2), "rows in steps of 16 values"
        yield not matmul.group, "one scale for each row of the weight"
        yield self._tile(traits, matmul) is not None, "matrix cores for int8, and many rows"

    @staticmethod
    def _tile(traits: DeviceTraits, matmul: QuantizedMatmul) -> Fragments | None:
        return choose_fragments(traits, matmul.m, matmul.n, matmul.k)

    def form(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
        tile = self._tile(traits, matmul)
        assert tile is not None  # `needs` asks for one
        grid = tile.grid(matmul.m, matmul.n)
        return Form("quantized/qmatmul_int.comp", grid, tile.macros(), tile.subgroup)


class DotCoopmat(_Template):
    """`qdot_coopmat.comp`: few rows of halves and weights of 4 bits. Each workgroup brings all rows
    into shared memory."""

    def needs(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Needs:
        rows, many = matmul.max_m, matmul.has_many_columns(traits)
        most = FUSED_ROWS if many else DOT_ROWS[-1]
        yield rows <= most, lambda: f"up to {most} rows"
        yield rows > 1 or many, "several rows, or many columns"
        yield matmul.halves and not matmul.integers, "float16 activations"
        yield matmul.bits == 4 and not matmul.minimums, "4 bits without minimums"
        yield from _on_matrix_cores(traits, matmul)

    def form(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
        rows = next(count for count in DOT_ROWS if count >= matmul.max_m)
        depth = max(-(-_dims.upper(matmul.k) // 128), 1)
        if matmul.has_many_columns(traits):
            subs, segments = 4, 2
        else:
            subs, segments = (16, 1) if depth >= 64 else (8, 2)
        # Bytes of shared memory: A, the sums of columns or pairs of them, and squares.
        per_subgroup = rows * (256 * segments + (132 if rows <= FUSED_ROWS else 64))
        most = min(traits.max_invocations // 32, traits.max_shared_memory // per_subgroup, depth)
        while subs > max(most, 1):
            subs //= 2
        macros = {
            "COOPMAT": 1,
            "ROWS": rows,
            "SCALES4": int(matmul.group == 32 and matmul.has_vectors_of_scales),
            "SEGMENTS": min(segments, -(-depth // subs)),
            "SUBS": subs,
        }
        grid = (_dims.ceil_div(matmul.n, 16), _dims.ceil_div(matmul.m, rows), 1)
        return Form("quantized/qdot_coopmat.comp", grid, macros, 32)


class MatmulCoopmat(_Template):
    """`qmatmul_coopmat.comp`. Its time hardly grows with the first rows."""

    def needs(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Needs:
        group, segment = matmul.group, 512 // matmul.bits
        least = 5 if matmul.integers and matmul.bits == 8 else 2  # others are as fast
        yield matmul.max_m >= least, lambda: f"{least} rows"
        yield not matmul.minimums, "no minimums"
        yield not (group and segment % group and group % segment), "segments of whole groups"
        yield self._tile(traits, matmul) is not None, "a tile within the limits of the device"
        yield from _on_matrix_cores(traits, matmul)

    @staticmethod
    def _rows(matmul: QuantizedMatmul) -> tuple[int, int]:
        """Rows of a workgroup, and fragments of 8 rows that it multiplies: those of a float32
        activation are two."""
        split = not (matmul.halves or matmul.integers)
        sizes = (4, 8, 16) if split else (8, 16, 32)
        rows = next((count for count in sizes if count >= matmul.max_m), sizes[-1])
        return rows, rows * (1 + split) // 8

    def _tile(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> QuantizedSizes | None:
        """The fastest tile that fits."""
        rows, fragments = self._rows(matmul)
        sizes, most, bits = traits.profile.tiles, matmul.max_m, matmul.bits
        best = _best_tile(sizes, fragments, bits, most > rows)
        groups = _dims.ceil_div(most, rows) * _dims.ceil_div(matmul.max_n, _columns(best))
        # With few workgroups, several subgroups share K.
        few = 2 * groups < traits.processors
        tiles = sizes.quantized_small if few else (best, *sizes.quantized_small)
        for tile in tiles:
            shared = _shared(tile, rows, fragments, bits)
            threads = 32 * tile.subs_n * tile.subs_k
            if all(holds for holds, _ in limits(traits, threads, shared)):
                return tile
        return None

    def form(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
        tile, group = self._tile(traits, matmul), matmul.group
        assert tile is not None  # `needs` asks for one
        rows, fragments = self._rows(matmul)
        scales = max(512 // matmul.bits // group, 1) if group else 1
        macros = {
            "COOPMAT": 1,
            "ROWS": rows,
            "SPLIT": int(8 * fragments > rows),
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


def _columns(tile: QuantizedSizes) -> int:
    """Columns of the result that a workgroup computes."""
    return 16 * tile.tiles * tile.subs_n


def _shared(tile: QuantizedSizes, rows: int, fragments: int, bits: int) -> int:
    """Bytes of shared memory."""
    of_a = tile.blocks * fragments * 16384 // bits
    return tile.subs_k * (of_a + 8 * rows) + 512 * tile.subs_n * tile.subs_k


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


class Dot(_Template):
    """`qdot.comp`: one row, of which it stages nothing."""

    def needs(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Needs:
        yield has_few_rows(traits, matmul) and matmul.max_m <= 1, "one row"
        yield not matmul.integers, "float activations"
        # With many columns, shared memory saves more loads than its barriers cost.
        yield not matmul.has_many_columns(traits), "fewer columns"
        yield traits.profile.has_fast_shared_memory, "fast shared memory"
        yield traits.has("subgroup_arithmetic", "subgroup_size_control"), "sums of subgroups"
        yield matmul.reads_words(matmul.bits // 2), "groups of a multiple of 16 values"
        yield _dims.gcd_of(matmul.k) % 4 == 0, "a multiple of 4 terms"
        lanes = self._lanes(matmul)
        yield lanes > 0 and lanes % traits.subgroup_size == 0, "terms for whole subgroups"
        yield from limits(traits, lanes, 0)

    @staticmethod
    def _lanes(matmul: QuantizedMatmul) -> int:
        """Invocations that share a row, which take 16 elements or more each."""
        chunks = _dims.upper(matmul.k) // 16
        return next((lanes for lanes in (256, 128, 64, 32) if chunks >= lanes), 0)

    def form(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
        lanes, chunks = self._lanes(matmul), _dims.upper(matmul.k) // 16
        macros = {
            "WORDS": matmul.bits // 2,
            "STEPS": min(-(-chunks // lanes), 2),
            "LX": lanes,
            "SG": traits.subgroup_size,
        }
        grid = (_dims.ceil_div(matmul.n, 4), matmul.m, 1)
        return Form("quantized/qdot.comp", grid, macros, traits.subgroup_size)


class Vectors(_Template):
    """`qmatvec.comp`: a workgroup reads columns of the weight once."""

    def needs(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Needs:
        yield has_few_rows(traits, matmul), "few rows"

    def form(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
        bits, integers = matmul.bits, matmul.integers
        rows = next(count for count in (1, 2, 4, 8) if count >= min(matmul.max_m, FEW_ROWS))
        subgroups = traits.has("subgroup_arithmetic", "subgroup_size_control")
        lanes = traits.subgroup_size if subgroups else 32
        profile = traits.profile
        share = not integers and profile.has_fast_shared_memory
        many = matmul.has_many_columns(traits)
        columns, most, local = 4, 4, lanes
        if integers and profile.overlaps_loads:
            columns = 8 if rows == 4 and bits == 4 else 4
            most = 2 if rows == 8 else 4
        elif share:
            columns, most = 8 if rows < 8 and many else 4, 2
            if many and rows <= 2 and subgroups:
                columns, most = (
                    4 if rows == 1 and bits == 4 else 8,
                    4 if rows == 2 or bits == 4 else 2,
                )
        if rows == 1 and not integers and not profile.has_fast_shared_memory:
            columns = 16  # what is read of A serves more columns
        wide = 2 * lanes
        if (
            not many
            and rows == 1
            and profile.has_fast_shared_memory
            and wide <= traits.max_invocations
        ):
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
            problem = (
                rows,
                matmul.max_n,
                _dims.upper(matmul.k),
                bits,
                matmul.group,
                integers,
                share,
            )
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
        grid = (
            _dims.ceil_div(matmul.n, tile.columns * tile.teams),
            _dims.ceil_div(matmul.m, rows),
            1,
        )
        return Form("quantized/qmatvec.comp", grid, macros, lanes if subgroups else None)


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
                    vectors = _Vectors(columns, words, local, count)
                    shape = (local, count) != (default.local, default.teams)
                    changed = (words != default.words) + (columns != default.columns) + shape
                    if changed == changes and local * count <= max_invocations:
                        yield vectors


class HalfTiles(_Template):
    """`qmatmul.comp` on matrix cores: float16 activations."""

    def needs(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Needs:
        shape = traits.coopmat_shape
        yield matmul.halves, "float16 activations"
        yield not matmul.group, "one scale for each row of the weight"
        yield shape is not None and shape[0] * shape[1] == 256, "matrix cores of 16 x 16 results"
        problem = Problem(matmul.max_m, matmul.max_n, _dims.upper(matmul.k), 1, True, True)
        yield from self._tile(traits, matmul).needs(traits, problem)

    @staticmethod
    def _tile(traits: DeviceTraits, matmul: QuantizedMatmul) -> Coopmat:
        sizes = (128, 64, 32, 32, 32) if matmul.max_m > 64 else (64, 64, 64, 32, 32)
        shape = traits.coopmat_shape or (16, 16, 16)
        return Coopmat(*sizes, shape=shape, subgroup=traits.subgroup_size)

    def form(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
        tile = self._tile(traits, matmul)
        grid = tile.grid(matmul.m, matmul.n, 1)
        return Form("quantized/qmatmul.comp", grid, tile.macros(), tile.subgroup)


class Tiles(_Template):
    """`qmatmul_int.comp`, `qmatmul.comp`: tiles in shared memory."""

    def needs(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Needs:
        return iter(())

    def form(self, traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
        few = not matmul.integers and matmul.max_m <= 16
        m, n = (16, 32) if few else _tile(traits, matmul.max_m, matmul.max_n)
        grid = (_dims.ceil_div(matmul.n, n), 1 if few else _dims.ceil_div(matmul.m, m), 1)
        if matmul.integers:
            return Form("quantized/qmatmul_int.comp", grid, integer_tile(traits, m, n))
        depth = 64 if few else 16 if m == 64 else 32
        macros = {"TILE_M": m, "TILE_N": n, "TILE_K": depth, "THREAD_M": 4, "THREAD_N": 4}
        return Form("quantized/qmatmul.comp", grid, {**macros, **({"SLICES": 4} if few else {})})


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


def _on_matrix_cores(traits: DeviceTraits, matmul: QuantizedMatmul) -> Needs:
    """What templates need that read quantized values into fragments."""
    yield traits.profile.has_fast_shared_memory, "fast shared memory"
    yield 8 in traits.coopmat_columns, "matrix cores with fragments of 8 columns"
    yield traits.has("subgroup_shuffle", "subgroup_arithmetic"), "shuffles of subgroups"
    yield matmul.reads_words(4), "rows and groups of a multiple of 4 words"
    yield traits.fragment_order(DType.float16, 8), "a known order of elements in fragments"


def has_few_rows(traits: DeviceTraits, matmul: QuantizedMatmul) -> bool:
    """Whether kernels that read the weight for a few rows are better than those with tiles."""
    few = not traits.profile.has_fast_shared_memory or matmul.m <= FEW_ROWS
    if few or matmul.group % (16 if matmul.integers else 4):
        return True
    return matmul.max_m <= 4 * FEW_ROWS and (
        matmul.integers
        or (traits.has("subgroup_arithmetic", "subgroup_size_control") and matmul.bits == 4)
    )


TEMPLATES: tuple[_Template, ...] = (
    IntegerFragments(),
    DotCoopmat(),
    MatmulCoopmat(),
    Dot(),
    Vectors(),
    HalfTiles(),
    Tiles(),
)
"""In the order in which they are preferred."""

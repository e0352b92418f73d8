"""Chooses the matmul kernel and its tiles for a GPU: the cheapest of a list, by the cost models of
`gpu_kernels.py` and `matrix_core_kernels.py`.

One row or a few go through `matmul_vec.comp`, or, if B is dense along K, through `matmul_dot.comp`.
Weights of linear layers stay dense along K, as torch stores them, where the device multiplies float16
by matrices of a workgroup, which take both layouts (`prefers_columns`). Elsewhere loading transposes
them. Larger matmuls have tiles in shared memory (`matmul_tiled.comp`), in float32 or by fragments on
matrix cores. With `VK_NV_cooperative_matrix2`, float16 with 2048 terms or more, in sizes of at least a
tile, runs by matrices of a whole workgroup (`matmul_coopmat2.comp`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias, TypeVar

from purevk.lower.gpu_kernels import (
    Distance,
    Dot,
    DotBlocks,
    GpuChoice,
    Problem,
    Tiled,
    Vector,
    ceil,
)
from purevk.lower.matrix_core_kernels import (
    Coopmat,
    FragmentConvolution,
    Fragments,
    WorkgroupCoopmat,
)
from purevk.tuning import DeviceTraits

MAX_SPLIT_OUTPUT = 1 << 22  # elements of a result that is made in parts

GpuKernel: TypeAlias = Tiled | Coopmat | WorkgroupCoopmat | Vector | Dot
_Tile = TypeVar("_Tile", Fragments, FragmentConvolution)


def candidates(traits: DeviceTraits, problem: Problem) -> Iterator[GpuKernel]:
    """All kernels that fit."""
    sizes = traits.profile.tiles
    tiles: list[Tiled | Coopmat | WorkgroupCoopmat] = [
        Tiled(*each) for each in (*sizes.tiled, *(() if problem.window else sizes.tiled_long))
    ]
    if problem.on_matrix_cores(traits) and traits.coopmat_shape is not None:
        for each in (*sizes.coopmat, *(() if problem.window else sizes.coopmat_more)):
            narrow = Coopmat(*each, 1, traits.coopmat_shape, traits.subgroup_size)
            wide = replace(narrow, width=8)
            tiles.append(wide if wide.fits(traits, problem) else narrow)
    tiles += [WorkgroupCoopmat(*each) for each in sizes.workgroup_coopmat]
    for tile in tiles:
        if tile.fits(traits, problem):
            yield tile
            yield from _split(traits, problem, tile)
    if problem.window:
        return
    yield from dots(traits, problem)
    if problem.m > 8 and problem.transposed and problem.on_matrix_cores(traits):
        return  # matrix cores are faster
    for rows in (1, 2, 4, 8, 16):
        if rows > 1 and rows >= 2 * problem.m:
            break
        if rows == 16 and not (
            problem.m <= 16
            and problem.batches == 1
            and (problem.transposed or problem.n * problem.k >= 1 << 23)
        ):
            break
        shapes = sizes.vector if rows < 16 else sizes.vector_rows
        for lanes, slices in sizes.vector_transposed if problem.transposed else shapes:
            chunk = rows
            while chunk > 1 and 16 * chunk * lanes * slices > traits.max_shared_memory:
                chunk //= 2
            depth = 4 if rows == 16 and traits.max_shared_memory >= 40960 else 2
            choice = Vector(rows, lanes, slices, chunk, depth)
            if choice.fits(traits, problem) and not (rows == 8 and slices == 64):
                yield choice


def dots(traits: DeviceTraits, problem: Problem) -> Iterator[Dot]:
    """The kernels of few rows that fit, if B is dense along K."""
    if problem.m > 8:
        return
    rows = 1 << (problem.m - 1).bit_length()
    for lanes, steps in traits.profile.tiles.dot:
        choice = Dot(rows, lanes, steps, traits.subgroup_size)
        if choice.fits(traits, problem):
            yield choice


def _split(
    traits: DeviceTraits, problem: Problem, tile: Tiled | Coopmat | WorkgroupCoopmat
) -> Iterator[Tiled | Coopmat | WorkgroupCoopmat]:
    """The same tile with K split among workgroups, where there are too few tiles to fill the
    device."""
    groups = ceil(problem.m, tile.tile_m) * ceil(problem.n, tile.tile_n) * problem.batches
    cores = traits.processors
    if (
        groups > (1 if problem.large else 2) * cores
        or problem.m * problem.n * problem.batches > MAX_SPLIT_OUTPUT
        or (problem.window and problem.batches > 1)
    ):
        return
    for splits in (2, 4, 8, 16):
        part = replace(tile, splits=splits)
        if groups * splits <= 5 * cores and problem.k >= splits * tile.tile_k:
            if not isinstance(part, WorkgroupCoopmat) or part.fits(traits, problem):
                yield part


def _total(traits: DeviceTraits, problem: Problem, choice: GpuKernel) -> float:
    cost, costs = choice.cost(traits, problem), traits.profile.matmul
    if choice.splits > 1:
        cost += (
            costs.split_start
            + costs.split_element * problem.m * problem.n * problem.batches * choice.splits
        )
    return cost


def _runs(traits: DeviceTraits, problem: Problem, choice: GpuChoice) -> bool:
    """Whether the grid is one that the device takes."""
    grid = choice.grid(problem.m, problem.n, problem.batches)
    return all(size <= limit for size, limit in zip(grid, traits.max_workgroups))


def choose_fragment_tile(
    traits: DeviceTraits,
    problem: Problem,
    paired: bool = False,
    always: bool = False,
    copied: int = 0,
    alone: bool = False,
) -> Fragments | None:
    """The tile of `matmul_fragments.comp` for a problem; None if none fits, or if another kernel is
    expected to be faster.

    Args:
        paired: it makes one column of two, and has an even number of fragments along the columns.
        always: whether another kernel is faster does not matter.
        copied: elements of operands that have to be copied into the order of fragments before.
        alone: the matmul is not one of many kernels of a network, after which all start slowly.
    """
    found, costs = _fragment_tiles(traits, problem), traits.profile.matmul.fragments
    if paired:
        found = [tile for tile in found if tile.fragments_n % 2 == 0]
    if not found:
        return None
    if not always:
        cost, others = found[0].cost(traits, problem), costs.others
        if copied:
            cost += costs.copy * copied + (0.0 if alone else costs.copy_start)
            others = costs.others_copied if alone else costs.others
        if cost >= others * _total(traits, problem, _cheapest(traits, problem)):
            return None
    kind = "fragments of pairs" if paired else "fragments"
    return traits.choices.take(kind, problem, lambda: found, found[0])


def choose_convolution_tile(traits: DeviceTraits, problem: Problem) -> FragmentConvolution | None:
    """The tile of `conv2d_fragments.comp` for a problem; None if none fits, or if another kernel is
    expected to be faster."""
    found = _convolution_tiles(traits, problem)
    others = traits.profile.matmul.convolution.others
    if not found or found[0].cost(traits, problem) >= others * _total(
        traits, problem, _cheapest(traits, problem)
    ):
        return None
    return traits.choices.take("convolution", problem, lambda: found, found[0])


@lru_cache(maxsize=4096)
def _fragment_tiles(traits: DeviceTraits, problem: Problem) -> list[Fragments]:
    """The tiles of `matmul_fragments.comp` that fit, the cheapest first."""
    return _fitting(traits, problem, (Fragments(*each) for each in traits.profile.tiles.fragments))


@lru_cache(maxsize=4096)
def _convolution_tiles(traits: DeviceTraits, problem: Problem) -> list[FragmentConvolution]:
    """The tiles of `conv2d_fragments.comp` that fit, the cheapest first."""
    sizes = traits.profile.tiles.convolution
    return _fitting(traits, problem, (FragmentConvolution(*each) for each in sizes))


def _fitting(traits: DeviceTraits, problem: Problem, tiles: Iterable[_Tile]) -> list[_Tile]:
    """Those that fit, the cheapest first."""
    return sorted(
        [each for each in tiles if each.fits(traits, problem) and _runs(traits, problem, each)],
        key=lambda each: each.cost(traits, problem),
    )


def choose_gpu(traits: DeviceTraits, problem: Problem) -> GpuKernel:
    """The kernel that was measured to be the fastest, or else the cheapest of those that fit."""
    default = _cheapest(traits, problem)
    return traits.choices.take("matmul", problem, lambda: _by_cost(traits, problem), default)


@lru_cache(maxsize=4096)
def _cheapest(traits: DeviceTraits, problem: Problem) -> GpuKernel:
    return _by_cost(traits, problem)[0]


def _by_cost(traits: DeviceTraits, problem: Problem) -> list[GpuKernel]:
    """The kernels that fit, the cheapest first."""
    found = list(candidates(traits, problem))
    return sorted(
        [c for c in found if _runs(traits, problem, c)] or found,
        key=lambda c: _total(traits, problem, c),
    )


@lru_cache(maxsize=4096)
def choose_rows(traits: DeviceTraits, problem: Problem, single: bool) -> GpuKernel:
    """The cheapest kernel for groups of rows, each with a matrix of its own: `problem` is one group
    of the average size, and its batches are the groups.

    Groups differ in size. A tile of as many rows as the average would need a second tile for every
    other group, so costs are those of groups a fifth smaller and of groups a fifth larger.

    Args:
        single: a workgroup can only take a single row.
    """
    sizes = [problem] if single else [replace(problem, m=m) for m in _around(problem.m)]
    found: list[GpuKernel] = [
        choice
        for each in sizes
        for choice in candidates(traits, each)
        if choice.splits == 1
        and not isinstance(choice, Dot)
        and (not single or (isinstance(choice, Vector) and choice.rows == 1))
    ]
    return min(found, key=lambda choice: sum(choice.cost(traits, each) for each in sizes))


def _around(rows: int) -> tuple[int, int]:
    """Sizes of groups of so many rows on average."""
    return rows - rows // 5, rows + rows // 5


def choose_few_rows(traits: DeviceTraits, problem: Problem, saved: int = 0) -> Vector | Dot | None:
    """The cheapest `Dot`, or `Vector` of up to 8 rows, or the one that was measured to be the fastest
    in its place; None if another kernel is cheaper by more than the dispatches that it saves take.

    Args:
        saved: how many dispatches before and after the matmul become part of it.
    """
    default = _cheapest_few_rows(traits, problem, saved)
    if default is None:
        return None
    return traits.choices.take("rows", problem, lambda: _few_rows(traits, problem), default)


def prefers_few_rows(traits: DeviceTraits, problem: Problem, saved: int = 0) -> bool:
    """Whether the cost model chooses a `Dot`, or a `Vector` of up to 8 rows, with `saved` as for
    `choose_few_rows`."""
    return _cheapest_few_rows(traits, problem, saved) is not None


@lru_cache(maxsize=4096)
def _cheapest_few_rows(traits: DeviceTraits, problem: Problem, saved: int) -> Vector | Dot | None:
    found = _few_rows(traits, problem) if problem.m <= 8 else []
    if not found:
        return None
    cheapest = _cheapest(traits, problem)
    if isinstance(cheapest, (Vector, Dot)):
        return found[0]
    # A small dispatch that waits for the one before takes as long as the start of a matmul.
    limit = _total(traits, problem, cheapest) + saved * traits.profile.matmul.vector.start
    return found[0] if saved and found[0].cost(traits, problem) <= limit else None


def _few_rows(traits: DeviceTraits, problem: Problem) -> list[Vector | Dot]:
    """Those of up to 8 rows that read B as it is, the cheapest first."""
    fits = Dot if problem.transposed else Vector
    found = [c for c in candidates(traits, problem) if isinstance(c, fits) and c.rows <= 8]
    return sorted(found, key=lambda choice: choice.cost(traits, problem))


_FEW = 4  # workgroups for a multiprocessor, fewer of which take more invocations each


def choose_dot_blocks(traits: DeviceTraits, problem: Problem, pair: int) -> DotBlocks:
    """The tile for up to 8 rows of halves or bfloat16, where B is in the order of fragments. Its
    default was measured on an NVIDIA GPU, on products of a Llama: it takes 3 % more than the best on
    average. `pair` is the distance of two columns of a pair, a multiple of 4, or 0."""
    rows = 1 << (problem.m - 1).bit_length()
    columns = 8 if pair % 8 == 0 else 4
    few = ceil(problem.n, columns) < _FEW * traits.processors
    wanted = (32 if few else 16, {1: 2, 8: 4 if few else 1}.get(rows, 4))
    sizes = [wanted, *((s, n) for s in (32, 16, 8, 4, 2, 1) for n in (4, 2, 1) if (s, n) != wanted)]
    found = [
        each
        for each in (DotBlocks(rows, columns, slices, steps) for slices, steps in sizes)
        if each.threads <= traits.max_invocations
        and each.shared_memory(pair > 0) <= traits.max_shared_memory
        and (problem.k >= 16 * each.slices * each.steps or each.slices == each.steps == 1)
    ]
    kind = "pairs of blocks" if pair else "rows of blocks"
    return traits.choices.take(kind, problem, lambda: found, found[0])


def prefers_columns(traits: DeviceTraits, m: int, k: int, half: bool) -> bool:
    """Whether a constant B [k, n] is better dense along k than along n.

    `Dot` needs it, and fragments read both operands along k then. Apart from a short k, the answer
    does not depend on m, so that graphs of few and of many rows share their weights.
    """
    if not half or traits.coopmat_shape is None or k % 8:
        return False
    return m > 8 or k >= 512


def choose_distance(
    traits: DeviceTraits,
    metric: int,
    m: int,
    n: int,
    k: int,
    batches: int,
    transposed: bool,
    vectors: tuple[bool, bool],
) -> Distance:
    """The tile for distances between m and n rows of k elements."""
    problem = Problem(m, n, k, batches, False, transposed, vectors)
    tiles = [Distance(*sizes, metric=metric) for sizes in traits.profile.tiles.distance]
    found = [tile for tile in tiles if tile.fits(traits, problem)]
    return min(
        [tile for tile in found if _runs(traits, problem, tile)] or found,
        key=lambda tile: tile.cost(traits, problem),
    )

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

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from purevk.lower.gpu_kernels import (
    Distance,
    Dot,
    DotBlocks,
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
from purevk.tuning.candidates import by_cost, take

MAX_SPLIT_OUTPUT = 1 << 22  # elements of a result that is made in parts

GpuKernel: TypeAlias = Tiled | Coopmat | WorkgroupCoopmat | Vector | Dot


def candidates(traits: DeviceTraits, problem: Problem) -> Iterator[GpuKernel]:
    """All kernels that fit."""
    return (kernel for kernel in _kernels(traits, problem) if kernel.fits(traits, problem))


def _kernels(traits: DeviceTraits, problem: Problem) -> Iterator[GpuKernel]:
    """The kernels for a matmul, some of which may not fit."""
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
        yield tile
        yield from _split(traits, problem, tile)
    if problem.window:
        return
    if problem.m <= 8:
        rows = 1 << (problem.m - 1).bit_length()
        yield from (Dot(rows, *shape, traits.subgroup_size) for shape in sizes.dot)
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
            if not (rows == 8 and slices == 64):
                yield Vector(rows, lanes, slices, chunk, depth)


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
            yield part


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
        if cost >= others * _least_cost(traits, problem):
            return None
    kind = "fragments of pairs" if paired else "fragments"
    return take(traits, kind, problem, found, lambda: _fragments(traits))


def choose_convolution_tile(traits: DeviceTraits, problem: Problem) -> FragmentConvolution | None:
    """The tile of `conv2d_fragments.comp` for a problem; None if none fits, or if another kernel is
    expected to be faster."""
    found = _convolution_tiles(traits, problem)
    others = traits.profile.matmul.convolution.others
    if not found or found[0].cost(traits, problem) >= others * _least_cost(traits, problem):
        return None
    return take(traits, "convolution", problem, found, lambda: _convolutions(traits))


def _fragments(traits: DeviceTraits) -> Iterator[Fragments]:
    return (Fragments(*sizes) for sizes in traits.profile.tiles.fragments)


def _convolutions(traits: DeviceTraits) -> Iterator[FragmentConvolution]:
    return (FragmentConvolution(*sizes) for sizes in traits.profile.tiles.convolution)


@lru_cache(maxsize=4096)
def _fragment_tiles(traits: DeviceTraits, problem: Problem) -> list[Fragments]:
    """The tiles of `matmul_fragments.comp` that fit, the cheapest first."""
    return by_cost(traits, problem, _fragments(traits))


@lru_cache(maxsize=4096)
def _convolution_tiles(traits: DeviceTraits, problem: Problem) -> list[FragmentConvolution]:
    """The tiles of `conv2d_fragments.comp` that fit, the cheapest first."""
    return by_cost(traits, problem, _convolutions(traits))


def choose_gpu(traits: DeviceTraits, problem: Problem) -> GpuKernel:
    """The kernel that was measured to be the fastest, or else the cheapest of those that fit."""
    kernels = _matmuls(traits, problem)
    return take(traits, "matmul", problem, kernels, lambda: _kernels(traits, problem))


@lru_cache(maxsize=1024)
def _matmuls(traits: DeviceTraits, problem: Problem) -> list[GpuKernel]:
    """The kernels for a matmul, the cheapest first."""
    return by_cost(traits, problem, _kernels(traits, problem))


def _least_cost(traits: DeviceTraits, problem: Problem) -> float:
    """That of the cheapest kernel for a matmul."""
    return _matmuls(traits, problem)[0].cost(traits, problem)


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
        for size in sizes
        for choice in candidates(traits, size)
        if choice.splits == 1
        and not isinstance(choice, Dot)
        and (not single or (isinstance(choice, Vector) and choice.rows == 1))
    ]
    return min(found, key=lambda choice: sum(choice.cost(traits, size) for size in sizes))


def _around(rows: int) -> tuple[int, int]:
    """Sizes of groups of so many rows on average."""
    return rows - rows // 5, rows + rows // 5


def choose_few_rows(traits: DeviceTraits, problem: Problem, saved: int = 0) -> Vector | Dot | None:
    """The cheapest `Dot`, or `Vector` of up to 8 rows, or the one that was measured to be the fastest
    in its place; None if another kernel is cheaper by more than the dispatches that it saves take.

    Args:
        saved: how many dispatches before and after the matmul become part of it.
    """
    found = _few_rows(traits, problem, saved)
    if not found:
        return None
    return take(traits, "rows", problem, found, lambda: _kernels(traits, problem))


def prefers_few_rows(traits: DeviceTraits, problem: Problem, saved: int = 0) -> bool:
    """Whether the cost model chooses a `Dot`, or a `Vector` of up to 8 rows, with `saved` as for
    `choose_few_rows`."""
    return bool(_few_rows(traits, problem, saved))


def _few_rows(traits: DeviceTraits, problem: Problem, saved: int) -> list[Vector | Dot]:
    """The kernels of up to 8 rows that read B as it is, the cheapest first; none where another is
    better."""
    if problem.m > 8:
        return []
    kernels, kind = _matmuls(traits, problem), Dot if problem.transposed else Vector
    found = [c for c in kernels if isinstance(c, kind) and c.rows <= 8]
    if not found or isinstance(kernels[0], (Vector, Dot)):
        return found
    # A small dispatch that waits for the one before takes as long as the start of a matmul.
    limit = _least_cost(traits, problem) + saved * traits.profile.matmul.vector.start
    return found if saved and found[0].cost(traits, problem) <= limit else []


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
    kernels = [DotBlocks(rows, columns, slices, steps, pair > 0) for slices, steps in sizes]
    found = by_cost(traits, problem, kernels)
    kind = "pairs of blocks" if pair else "rows of blocks"
    return take(traits, kind, problem, found, lambda: kernels)


def prefers_columns(traits: DeviceTraits, m: int, k: int, half: bool) -> bool:
    """Whether a constant B [k, n] is better dense along k than along n.

    `Dot` needs it, and fragments read both operands along k then. Apart from a short k, the answer
    does not depend on m, so that graphs of few and of many rows share their weights.
    """
    if not half or traits.coopmat_shape is None or k % 8:
        return False
    return m > 8 or k >= 512


def choose_distance(traits: DeviceTraits, metric: int, problem: Problem) -> Distance:
    """The tile for distances between m and n rows of k elements."""
    tiles = (Distance(*sizes, metric=metric) for sizes in traits.profile.tiles.distance)
    return by_cost(traits, problem, tiles)[0]

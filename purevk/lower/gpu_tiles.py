"""Chooses the matmul kernel and its tiles for a GPU: the cheapest of a list, by a cost model.

The model counts what an invocation does in a step along K, and how many steps a multiprocessor runs
one after another:

    start + code + steps * (rounds * latency + load * work) + join

- `rounds`: how often a multiprocessor is filled with workgroups.
- `load`: workgroups per multiprocessor in all.
- `code`: the time to fetch the unrolled loop. Between two runs of a kernel, others have filled the
  instruction cache.
- `join`: the time to add up the parts of a sum.

The coefficients are those of the device's profile (`MatmulCosts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.tuning import DeviceTraits

HALF = 2  # bytes
MAX_SPLIT_OUTPUT = 1 << 22  # elements of a result that is made in parts


class TileBounds(NamedTuple):
    """What tiles must suit that are read without tests of bounds: the least m and n, and a divisor
    of k."""

    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Problem:
    """A matmul to choose a kernel for, by upper bounds of its sizes.

    Attributes:
        m, n, k, batches: sizes.
        half: both operands are float16, as matrix cores need.
        transposed: B is dense along K.
        vectors: whether A and B are read as vec4s.
        window: the rows of A are the windows of a convolution, whose addresses take arithmetic.
        tiles: what is known of them, if rows and batches of A, B and the result start at multiples
            of 8 elements.
    """

    m: int
    n: int
    k: int
    batches: int = 1
    half: bool = False
    transposed: bool = False
    vectors: tuple[bool, bool] = (True, True)
    window: bool = False
    tiles: TileBounds | None = None

    @property
    def large(self) -> bool:
        """Whether its results alone fill a large GPU."""
        return self.m * self.n * self.batches >= 1 << 20


class GpuChoice(ABC):
    """What the choices have in common."""

    splits = 1
    template = "matmul/matmul_tiled.comp"
    subgroup: int | None = None
    takes_vectors = True  # whether buffers may be arrays of vec4s

    @property
    @abstractmethod
    def rows_per_group(self) -> int:
        """Rows of the result that a workgroup makes."""

    @abstractmethod
    def macros(self) -> dict[str, int]:
        """The macros of the template that state the tile."""

    @abstractmethod
    def grid(self, m: Size, n: Size, batches: Size) -> tuple[Size, Size, Size]:
        """The workgroups for `batches` results of [m, n]."""


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _load(traits: DeviceTraits, groups: int, threads: int, shared: int) -> tuple[int, float]:
    """Times that the device is filled, and workgroups a core in all."""
    cores, profile = traits.processors, traits.profile
    shared_memory = profile.shared_memory_ratio * traits.max_shared_memory
    resident = max(
        1, min(profile.max_invocations_per_core // threads, shared_memory // max(shared, 1))
    )
    return _ceil(groups, cores * resident), max(1.0, groups / cores)


class _TileChoice(GpuChoice):
    """What the choices share whose workgroups make `tile_m` x `tile_n` results in steps of
    `tile_k`."""

    tile_m: int
    tile_n: int
    tile_k: int

    @property
    def rows_per_group(self) -> int:
        """Rows of the result that a workgroup makes."""
        return self.tile_m

    def grid(self, m: Size, n: Size, batches: Size) -> tuple[Size, Size, Size]:
        return (
            _dims.ceil_div(n, self.tile_n),
            _dims.ceil_div(m, self.tile_m),
            batches * self.splits,
        )

    @property
    @abstractmethod
    def threads(self) -> int:
        """Invocations of a workgroup."""

    @abstractmethod
    def shared(self, transposed: bool) -> int:
        """Bytes of shared memory."""

    def _loads_evenly(self, traits: DeviceTraits, problem: Problem) -> bool:
        """Whether all invocations load equally many vec4s of both tiles, within the device's
        limits."""
        threads, quads = self.threads, self.tile_k // 4
        return (
            threads <= traits.max_invocations
            and self.shared(problem.transposed) <= traits.max_shared_memory
            and threads % quads == 0
            and self.tile_m * quads % threads == 0
            and self.tile_n * quads % threads == 0
        )

    def _schedule(self, traits: DeviceTraits, problem: Problem) -> tuple[int, int, float]:
        """Steps along K, and how often and how much a multiprocessor is filled with workgroups."""
        tiles = _ceil(problem.m, self.tile_m) * _ceil(problem.n, self.tile_n)
        groups = tiles * problem.batches * self.splits
        steps = _ceil(_ceil(problem.k, self.splits), self.tile_k)
        return steps, *_load(traits, groups, self.threads, self.shared(problem.transposed))

    def _loads(self, problem: Problem) -> int:
        """Loads of both tiles for one element of a vec4 along K."""
        vector_a, vector_b = problem.vectors
        return self.tile_m * (1 if vector_a else 4) + self.tile_n * (1 if vector_b else 4)


@dataclass(frozen=True)
class Tiled(_TileChoice):
    """`matmul_tiled.comp`, `conv2d_tiled.comp`: tiles in shared memory."""

    tile_m: int
    tile_n: int
    tile_k: int
    thread_m: int
    thread_n: int
    slices: int = 1
    splits: int = 1

    def macros(self) -> dict[str, int]:
        return {
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "TILE_K": self.tile_k,
            "THREAD_M": self.thread_m,
            "THREAD_N": self.thread_n,
            "SLICES": self.slices,
        }

    @property
    def threads(self) -> int:
        return self.tile_m // self.thread_m * (self.tile_n // self.thread_n) * self.slices

    def shared(self, transposed: bool) -> int:
        """Bytes of shared memory."""
        sums = self.slices * self.tile_m * self.tile_n // 4 if self.slices > 1 else 0
        pad = max(32 // self.tile_k, 1) * (2 if transposed else 1)
        return 16 * max(self.tile_k * (self.tile_m // 4 + self.tile_n // 4 + pad), sums)

    def fits(self, traits: DeviceTraits, problem: Problem) -> bool:
        """Whether the template's conditions and the device's limits hold."""
        return self.tile_k // 4 % self.slices == 0 and self._loads_evenly(traits, problem)

    def cost(self, traits: DeviceTraits, problem: Problem) -> float:
        """Microseconds, about."""
        costs = traits.profile.matmul.tiled
        steps, rounds, load = self._schedule(traits, problem)
        loads = self._loads(problem)
        fma = self.tile_k // self.slices * self.thread_m * self.thread_n
        # If every multiprocessor is full, the kernel is bound by shared memory, which an invocation
        # with a wide tile reads less often. With thousands of small matmuls, more invocations are
        # worth as much.
        reads = 8 / self.thread_m + 8 / self.thread_n
        if problem.batches > 8 * traits.processors:
            shared_reads = 1 + costs.shared_read * max(reads - 3, 0)
        else:
            shared_reads = 1 + costs.shared_read * (reads - 2) if problem.large else 1
        work = (
            costs.load * loads * self.tile_k / 4
            + costs.multiply_add * fma * self.threads * shared_reads
        )
        latency = costs.latency + (
            costs.window * self.tile_m * self.tile_k / 4 / self.threads if problem.window else 0
        )
        return (
            costs.start
            + costs.code * fma
            + steps * (latency * rounds + load * work)
            + costs.join * (self.slices - 1) * load
        )


@dataclass(frozen=True)
class Distance(Tiled):
    """The same tiles for distances; `metric` as in `matmul_shared.glslh`."""

    metric: int = 2

    def macros(self) -> dict[str, int]:
        return {**super().macros(), "METRIC": self.metric}


@dataclass(frozen=True)
class Coopmat(_TileChoice):
    """The same on matrix cores: a subgroup makes `sub_m` x `sub_n` of fragments of size `shape`."""

    tile_m: int
    tile_n: int
    tile_k: int
    sub_m: int
    sub_n: int
    slices: int = 1
    splits: int = 1
    shape: tuple[int, int, int] = (16, 16, 16)
    subgroup: int = 32

    def macros(self) -> dict[str, int]:
        return {
            "COOPMAT": 1,
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "TILE_K": self.tile_k,
            "SUBGROUP_M": self.sub_m,
            "SUBGROUP_N": self.sub_n,
            "SLICES": self.slices,
            "FRAGMENT_M": self.shape[0],
            "FRAGMENT_N": self.shape[1],
            "FRAGMENT_K": self.shape[2],
            "SG": self.subgroup,
        }

    @property
    def threads(self) -> int:
        return (
            self.subgroup * (self.tile_m // self.sub_m) * (self.tile_n // self.sub_n) * self.slices
        )

    def shared(self, transposed: bool) -> int:
        """Bytes of shared memory."""
        b = self.tile_n * (self.tile_k + 8) if transposed else self.tile_k * (self.tile_n + 8)
        results = self.slices * self.tile_m * self.tile_n
        if self.slices == 1:
            results = self.threads // self.subgroup * self.shape[0] * self.shape[1]
        return HALF * (self.tile_m * (self.tile_k + 8) + b) + 4 * results

    def fits(self, traits: DeviceTraits, problem: Problem) -> bool:
        """Whether the template's conditions and the device's limits hold."""
        return (
            problem.half
            and self.sub_m % self.shape[0] == 0
            and self.sub_n % self.shape[1] == 0
            and self.tile_k % (self.shape[2] * self.slices) == 0
            and self._loads_evenly(traits, problem)
        )

    def cost(self, traits: DeviceTraits, problem: Problem) -> float:
        """Microseconds, about."""
        costs = traits.profile.matmul.coopmat
        steps, rounds, load = self._schedule(traits, problem)
        loads = self._loads(problem)
        multiplications = self.tile_m * self.tile_n * self.tile_k / 4096
        work = costs.load * loads * self.tile_k / 4 + costs.product * multiplications
        latency = costs.latency + (
            costs.window * self.tile_m * self.tile_k / 4 / self.threads if problem.window else 0
        )
        fragments = self.sub_m * self.sub_n / 256
        code = costs.code * fragments * self.tile_k / self.slices / 16
        return (
            costs.start
            + code
            + steps * (latency * rounds + load * work)
            + costs.store * fragments * (1 + load * self.threads / 512)
        )


@dataclass(frozen=True)
class WorkgroupCoopmat(_TileChoice):
    """`matmul_coopmat2.comp`: matrices of a workgroup of `invocations`, on matrix cores. A workgroup
    takes `least_steps` steps along K or more."""

    tile_m: int
    tile_n: int
    tile_k: int
    invocations: int
    least_steps: int = 1
    splits: int = 1
    template = "matmul/matmul_coopmat2.comp"
    takes_vectors = False

    def macros(self) -> dict[str, int]:
        return {
            "COOPMAT": 1,
            "TILE_M": self.tile_m,
            "TILE_N": self.tile_n,
            "TILE_K": self.tile_k,
            "LOCAL": self.invocations,
        }

    @property
    def threads(self) -> int:
        return self.invocations

    def shared(self, transposed: bool) -> int:
        """Bytes of shared memory: the driver's, about."""
        return 2 * HALF * self.tile_k * (self.tile_m + self.tile_n)

    def fits(self, traits: DeviceTraits, problem: Problem) -> bool:
        """Whether the template's conditions and the device's limits hold."""
        return (
            problem.half
            and problem.tiles is not None
            and self.tile_m <= problem.tiles.m
            and self.tile_n <= problem.tiles.n
            and problem.tiles.k % self.tile_k == 0
            and (problem.transposed or self._divides(problem))
            and not problem.window
            and problem.k >= self.least_steps * self.tile_k * self.splits
            and traits.takes_matrices(self.tile_m, self.tile_n, self.tile_k, self.invocations)
        )

    def _divides(self, problem: Problem) -> bool:
        """Whether the columns are a multiple of those of a tile."""
        known = problem.tiles is not None and problem.tiles.n == problem.n
        return known and problem.n % self.tile_n == 0

    def cost(self, traits: DeviceTraits, problem: Problem) -> float:
        """Microseconds, about."""
        costs = traits.profile.matmul.workgroup_coopmat
        steps, rounds, load = self._schedule(traits, problem)
        products = self.tile_m * self.tile_n * self.tile_k / 4096
        work = costs.product * products + costs.load * (self.tile_m + self.tile_n) * self.tile_k / 4
        return (
            costs.start
            + steps * (costs.latency * rounds + load * work)
            + costs.store * self.tile_m * self.tile_n / 256 * load
        )


@dataclass(frozen=True)
class Vector(GpuChoice):
    """`matmul_vec.comp`: a workgroup reads B once for `rows` rows of A, and its invocations share
    K."""

    rows: int
    lanes: int
    slices: int
    chunk: int = 1
    depth: int = 2
    template = "matmul/matmul_vec.comp"

    @property
    def rows_per_group(self) -> int:
        """Rows of the result that a workgroup makes."""
        return self.rows

    def macros(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "LANES": self.lanes,
            "SLICES": self.slices,
            "CHUNK": self.chunk,
            "DEPTH": self.depth,
        }

    def shared(self, transposed: bool) -> int:
        """Bytes of shared memory."""
        staged = 0 if transposed or self.rows <= 8 else self.depth * self.slices * (self.rows + 4)
        return 16 * max(self.chunk * self.threads, staged)

    def grid(self, m: Size, n: Size, batches: Size) -> tuple[Size, Size, Size]:
        return (_dims.ceil_div(n, 4 * self.lanes), _dims.ceil_div(m, self.rows), batches)

    @property
    def threads(self) -> int:
        return self.lanes * self.slices

    def fits(self, traits: DeviceTraits, problem: Problem) -> bool:
        """Whether the template's conditions and the device's limits hold."""
        return (
            not problem.window
            and self.threads <= traits.max_invocations
            and self.rows % self.chunk == 0
            and self.shared(problem.transposed) <= traits.max_shared_memory
        )

    def cost(self, traits: DeviceTraits, problem: Problem) -> float:
        """Microseconds, about."""
        costs = traits.profile.matmul.vector
        groups = _ceil(problem.n, 4 * self.lanes) * _ceil(problem.m, self.rows) * problem.batches
        steps = _ceil(problem.k, 4 * self.slices)
        rounds, load = _load(traits, groups, self.threads, self.shared(problem.transposed))
        loads = (4 if problem.vectors[1] else 16) + self.rows * (1 if problem.vectors[0] else 4)
        work = self.threads * (costs.load * loads + costs.multiply_add * 16 * self.rows)
        code = costs.code * (8 * loads + 16 * self.rows)
        return (
            costs.start
            + code
            + steps * (costs.latency * rounds + load * work)
            + costs.join * self.rows * self.threads * load
        )


GpuKernel: TypeAlias = Tiled | Coopmat | WorkgroupCoopmat | Vector


def candidates(traits: DeviceTraits, problem: Problem) -> Iterator[GpuKernel]:
    """All kernels that fit."""
    sizes = traits.profile.tiles
    tiles: list[Tiled | Coopmat | WorkgroupCoopmat] = [
        Tiled(*each) for each in (*sizes.tiled, *(() if problem.window else sizes.tiled_long))
    ]
    if (
        not problem.window
        and _ceil(problem.m, 64) * _ceil(problem.n, 128) * problem.batches <= 4 * traits.processors
    ):
        tiles.append(Tiled(*sizes.tiled_few))
    if problem.half and traits.coopmat_shape is not None:
        tiles += [
            Coopmat(*each, 1, traits.coopmat_shape, traits.subgroup_size) for each in sizes.coopmat
        ]
    tiles += [WorkgroupCoopmat(*each) for each in sizes.workgroup_coopmat]
    for tile in tiles:
        if tile.fits(traits, problem):
            yield tile
            yield from _split(traits, problem, tile)
    if problem.window:
        return
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


def _split(
    traits: DeviceTraits, problem: Problem, tile: Tiled | Coopmat | WorkgroupCoopmat
) -> Iterator[Tiled | Coopmat | WorkgroupCoopmat]:
    """The same tile with K split among workgroups, where there are too few tiles to fill the
    device."""
    groups = _ceil(problem.m, tile.tile_m) * _ceil(problem.n, tile.tile_n) * problem.batches
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


def _runs(traits: DeviceTraits, problem: Problem, choice: GpuKernel) -> bool:
    """Whether the grid is one that the device takes."""
    grid = choice.grid(problem.m, problem.n, problem.batches)
    return all(size <= limit for size, limit in zip(grid, traits.max_workgroups))


@lru_cache(maxsize=4096)
def choose_gpu(traits: DeviceTraits, problem: Problem) -> GpuKernel:
    """The cheapest kernel of those that fit: a `Tiled`, `Coopmat` or `Vector`."""
    found = list(candidates(traits, problem))
    return min(
        [c for c in found if _runs(traits, problem, c)] or found,
        key=lambda c: _total(traits, problem, c),
    )


@lru_cache(maxsize=4096)
def choose_rows(traits: DeviceTraits, problem: Problem, single: bool) -> GpuKernel:
    """The cheapest kernel for groups of rows, each with a matrix of its own: `problem` is one group
    of the average size, and its batches are the groups.

    Args:
        single: a workgroup can only take a single row.
    """
    found: list[GpuKernel] = [
        choice
        for choice in candidates(traits, problem)
        if choice.splits == 1 and (not single or (isinstance(choice, Vector) and choice.rows == 1))
    ]
    return min(found, key=lambda choice: choice.cost(traits, problem))


@lru_cache(maxsize=4096)
def choose_vector(traits: DeviceTraits, problem: Problem) -> Vector | None:
    """The cheapest `Vector` of up to 8 rows, if no other kernel is cheaper; else None."""
    if problem.m > 8 or not isinstance(choose_gpu(traits, problem), Vector):
        return None
    found = [c for c in candidates(traits, problem) if isinstance(c, Vector) and c.rows <= 8]
    return min(found, key=lambda choice: choice.cost(traits, problem), default=None)


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

"""The kinds of matmul kernels for GPUs, each with its tile: what fits a problem, and what it costs.
Those for matrix cores are in `matrix_core_kernels.py`.

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
from dataclasses import dataclass
from typing import NamedTuple

from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.tuning import DeviceTraits
from purevk.tuning.candidates import Candidate, Needs


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
        half: both operands are float16, or both are bfloat16, as matrix cores need.
        bfloat16: with `half`, they are bfloat16.
        transposed: B is dense along K.
        vectors: whether A and B are read as vec4s.
        window: the rows of A are the windows of a convolution, whose addresses take arithmetic.
        tiles: what is known of them, if rows and batches of A, B and the result start at multiples
            of 8 elements.
        wide: rows of A and rows of B (or columns, if `transposed`) start at multiples of 16 bytes, of
            which they have a whole number.
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
    wide: bool = False
    bfloat16: bool = False

    @property
    def large(self) -> bool:
        """Whether its results alone fill a large GPU."""
        return self.m * self.n * self.batches >= 1 << 20

    def on_matrix_cores(self, traits: DeviceTraits) -> bool:
        """Whether matrix cores of subgroups take these operands."""
        known = traits.bfloat16_fragments or not self.bfloat16
        return self.half and known and traits.coopmat_shape is not None


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


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def _load(
    traits: DeviceTraits,
    groups: int,
    threads: int,
    shared: int,
    most: int = 1 << 30,
    fullest: float = 0.0,
) -> tuple[int, float]:
    """Times that the device is filled, and workgroups a core in all. A core has room for `most`
    workgroups or fewer. `fullest` is the part of the cores' work that counts as that of the core with
    the most workgroups."""
    cores, profile = traits.processors, traits.profile
    shared_memory = profile.shared_memory_ratio * traits.max_shared_memory
    resident = max(
        1, min(most, profile.max_invocations_per_core // threads, shared_memory // max(shared, 1))
    )
    load = max(1.0, groups / cores)
    return ceil(groups, cores * resident), load + fullest * (ceil(groups, cores) - load)


def limits(traits: DeviceTraits, threads: int, shared: int) -> Needs:
    """The device's limits for a workgroup: its invocations, and its bytes of shared memory."""
    yield threads <= traits.max_invocations, lambda: f"{threads} invocations in a workgroup"
    yield shared <= traits.max_shared_memory, lambda: f"{shared} bytes of shared memory"


class MatmulKernel(GpuChoice, Candidate[Problem]):
    """A choice that says what it needs, and what it costs."""

    @abstractmethod
    def time(self, traits: DeviceTraits, problem: Problem) -> float:
        """Microseconds of the kernel, about, without those to add up the parts of a sum."""

    def cost(self, traits: DeviceTraits, problem: Problem) -> float:
        if self.splits == 1:
            return self.time(traits, problem)
        costs = traits.profile.matmul
        elements = problem.m * problem.n * problem.batches * self.splits
        return self.time(traits, problem) + (costs.split_start + costs.split_element * elements)


class RowKernel(MatmulKernel):
    """A choice whose workgroups make `rows` rows each."""

    rows: int

    @property
    def rows_per_group(self) -> int:
        return self.rows


class TileChoice(MatmulKernel):
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

    def _limits(self, traits: DeviceTraits, problem: Problem, width: int = 4) -> Needs:
        """The device's limits, and that all invocations load equally many vectors of `width` elements
        of both tiles."""
        threads, vectors = self.threads, self.tile_k // width
        yield from limits(traits, threads, self.shared(problem.transposed))
        even = threads % vectors == 0
        even = even and self.tile_m * vectors % threads == self.tile_n * vectors % threads == 0
        yield even, "invocations that load equally many vectors"

    def _schedule(
        self, traits: DeviceTraits, problem: Problem, most: int = 1 << 30, fullest: float = 0.0
    ) -> tuple[int, int, float]:
        """Steps along K, and how often and how much a multiprocessor is filled with workgroups; `most`
        and `fullest` as in `_load`."""
        tiles = ceil(problem.m, self.tile_m) * ceil(problem.n, self.tile_n)
        groups = tiles * problem.batches * self.splits
        steps = ceil(ceil(problem.k, self.splits), self.tile_k)
        shared = self.shared(problem.transposed)
        return steps, *_load(traits, groups, self.threads, shared, most, fullest)

    def _loads(self, problem: Problem) -> int:
        """Loads of both tiles for one element of a vec4 along K."""
        vector_a, vector_b = problem.vectors
        return self.tile_m * (1 if vector_a else 4) + self.tile_n * (1 if vector_b else 4)


@dataclass(frozen=True)
class Tiled(TileChoice):
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

    def needs(self, traits: DeviceTraits, problem: Problem) -> Needs:
        yield self.tile_k // 4 % self.slices == 0, "equal slices of a step"
        yield from self._limits(traits, problem)

    def time(self, traits: DeviceTraits, problem: Problem) -> float:
        matmul = traits.profile.matmul
        costs = matmul.window_tiled if problem.window else matmul.tiled
        registers = costs.registers[0] + costs.registers[1] * self.thread_m * self.thread_n
        most = max(int(costs.register_file / min(registers, 255)) // self.threads, 1)
        steps, rounds, load = self._schedule(traits, problem, most, costs.fullest)
        loads = self._loads(problem)
        fma = self.tile_k // self.slices * self.thread_m * self.thread_n
        # The kernel is bound by shared memory, which an invocation with a wide tile reads less often.
        # With thousands of small matmuls, more invocations are worth as much.
        reads = 8 / self.thread_m + 8 / self.thread_n
        shared_reads = 1 + costs.shared_read * (reads - 2)
        if problem.batches > 8 * traits.processors:
            shared_reads = 1 + costs.shared_read * max(reads - 3, 0)
        elif problem.window and not problem.large:
            shared_reads = 1
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
class Vector(RowKernel):
    """`matmul_vec.comp`: a workgroup reads B once for `rows` rows of A, and its invocations share
    K."""

    rows: int
    lanes: int
    slices: int
    chunk: int = 1
    depth: int = 2
    template = "matmul/matmul_vec.comp"

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

    def needs(self, traits: DeviceTraits, problem: Problem) -> Needs:
        yield not problem.window, "no window"
        yield self.rows % self.chunk == 0, "equal chunks of rows"
        yield from limits(traits, self.threads, self.shared(problem.transposed))

    def time(self, traits: DeviceTraits, problem: Problem) -> float:
        costs = traits.profile.matmul.vector
        groups = ceil(problem.n, 4 * self.lanes) * ceil(problem.m, self.rows) * problem.batches
        steps = ceil(problem.k, 4 * self.slices)
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


@dataclass(frozen=True)
class Dot(RowKernel):
    """`matmul_dot.comp`: `lanes` invocations share K, for 4 columns and `rows` rows, and have `steps`
    loads of each column in flight. B is dense along K."""

    rows: int
    lanes: int
    steps: int
    subgroup: int = 32
    template = "matmul/matmul_dot.comp"

    def macros(self) -> dict[str, int]:
        return {"ROWS": self.rows, "LANES": self.lanes, "STEPS": self.steps, "SG": self.subgroup}

    def grid(self, m: Size, n: Size, batches: Size) -> tuple[Size, Size, Size]:
        return (_dims.ceil_div(n, 4), _dims.ceil_div(m, self.rows), batches)

    def needs(self, traits: DeviceTraits, problem: Problem) -> Needs:
        least = self._elements(problem) * self.lanes * self.steps
        yield problem.transposed, "a second operand that is dense along k"
        yield problem.wide, "rows of a multiple of 16 bytes"
        yield not problem.window, "no window"
        yield from limits(traits, self.lanes, 0)
        yield self.lanes % self.subgroup == 0, "whole subgroups"
        yield problem.k >= least, lambda: f"{least} terms"
        features = ("subgroup_arithmetic", "subgroup_size_control")
        yield traits.has(*features), lambda: f"the features {' and '.join(features)}"

    @staticmethod
    def _elements(problem: Problem) -> int:
        """Elements of a load."""
        return 8 if problem.half else 4

    def time(self, traits: DeviceTraits, problem: Problem) -> float:
        costs = traits.profile.matmul.vector
        groups = ceil(problem.n, 4) * ceil(problem.m, self.rows) * problem.batches
        elements = self._elements(problem)
        steps = ceil(problem.k, elements * self.lanes * self.steps)
        rounds, load = _load(traits, groups, self.lanes, 0)
        loads = self.steps * elements // 4 * (4 + self.rows)
        products = 4 * self.steps * elements * self.rows
        work = self.lanes * (costs.load * loads + costs.multiply_add * products)
        code = costs.code * (8 * loads + products)
        join = costs.join * self.rows * self.lanes / self.subgroup * load
        return costs.start + code + steps * (costs.latency * rounds + load * work) + join


@dataclass(frozen=True)
class DotBlocks(RowKernel):
    """`matmul_dot_blocks.comp`: few rows, and a weight in the order of fragments. `slices` groups of
    invocations share K, for `columns` columns and `rows` rows, and read `steps` blocks of 16 terms at
    once. `paired`: it makes one column of two. Without a cost model."""

    rows: int
    columns: int
    slices: int
    steps: int
    paired: bool = False
    template = "matmul/matmul_dot_blocks.comp"

    @property
    def threads(self) -> int:
        """Invocations of a workgroup."""
        return 2 * self.columns * self.slices

    @property
    def shared(self) -> int:
        """Bytes of shared memory, with the squares of a norm."""
        return 4 * self.rows * self.slices * (self.columns * (1 + self.paired) + 1)

    def needs(self, traits: DeviceTraits, problem: Problem) -> Needs:
        least = 16 * self.slices * self.steps
        yield from limits(traits, self.threads, self.shared)
        yield problem.k >= least or self.slices == self.steps == 1, lambda: f"{least} terms"

    def time(self, traits: DeviceTraits, problem: Problem) -> float:
        return 0.0

    def macros(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "SLICES": self.slices,
            "STEPS": self.steps,
        }

    def grid(self, m: Size, n: Size, batches: Size) -> tuple[Size, Size, Size]:
        return (_dims.ceil_div(n, self.columns), _dims.ceil_div(m, self.rows), batches)

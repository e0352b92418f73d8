"""The kinds of matmul kernels for matrix cores, as `gpu_kernels.py` has the others."""

from __future__ import annotations

from dataclasses import dataclass

from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.lower.gpu_kernels import MatmulKernel, Problem, TileBounds, TileChoice, ceil, limits
from purevk.tuning import DeviceTraits
from purevk.tuning.candidates import Needs

HALF = 2  # bytes
LEAST_ROWS = 5  # of `Fragments`
LEAST_PIXELS = 32  # of `FragmentConvolution`
_RESIDENT = 2  # workgroups of `WorkgroupCoopmat` of a multiprocessor, by their registers


@dataclass(frozen=True)
class Coopmat(TileChoice):
    """`matmul_tiled.comp`, `conv2d_tiled.comp`, on matrix cores: a subgroup makes `sub_m` x `sub_n`
    results, by fragments of size `shape`. Operands are read by `width` elements, 4 or 8."""

    tile_m: int
    tile_n: int
    tile_k: int
    sub_m: int
    sub_n: int
    slices: int = 1
    splits: int = 1
    shape: tuple[int, int, int] = (16, 16, 16)
    subgroup: int = 32
    width: int = 4

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
            results = self.threads // self.subgroup * self.shape[0] * (self.sub_n + 4)
        operands = HALF * (self.tile_m * (self.tile_k + 8) + b)
        return max(operands, 4 * results) if self.width == 8 else operands + 4 * results

    def needs(self, traits: DeviceTraits, problem: Problem) -> Needs:
        yield problem.on_matrix_cores(traits), "matrix cores for the dtype of the operands"
        m, n, k = self.shape
        whole = self.sub_m % m == self.sub_n % n == self.tile_k % (k * self.slices) == 0
        yield whole, "tiles of whole fragments"
        yield problem.wide or self.width == 4, "rows of a multiple of 16 bytes"
        # Few large workgroups hide nothing of the start and end of a few steps.
        small = self.width * self.tile_m * self.tile_n < 1 << 17
        yield problem.k >= 256 or small, "256 terms"
        yield from self._limits(traits, problem, self.width)

    def time(self, traits: DeviceTraits, problem: Problem) -> float:
        matmul = traits.profile.matmul
        costs = matmul.window_coopmat if problem.window else matmul.coopmat
        registers = min(costs.registers + self.sub_m * self.sub_n / self.subgroup, 255)
        most = max(int(costs.register_file / registers) // self.threads, 1)
        steps, rounds, load = self._schedule(traits, problem, most, costs.fullest)
        multiplications = self.tile_m * self.tile_n * self.tile_k / 4096
        reads = 16 / self.sub_m + 16 / self.sub_n
        work = (
            costs.load * self._loads(problem) * self.tile_k / self.width
            + costs.product * (1 + costs.shared_read * reads) * multiplications
        )
        latency = costs.latency + (
            costs.window * self.tile_m * self.tile_k / self.width / self.threads
            if problem.window
            else 0
        )
        fragments = self.sub_m * self.sub_n / 256
        return (
            costs.start
            + costs.code * fragments * self.tile_k / self.slices / 16
            + steps * (latency * rounds + load * work)
            + costs.store * fragments * (1 + load * self.threads / 275)
            + costs.result * problem.m * problem.n * problem.batches
        )


@dataclass(frozen=True)
class _FragmentTile(MatmulKernel):
    """What kernels have in common whose invocations load elements of fragments directly: `subs_m` x
    `subs_n` subgroups make `fragments_m` x `fragments_n` fragments of 16 x 16 results each, and
    `slices` times as many share the terms."""

    subs_m: int
    subs_n: int
    fragments_m: int
    fragments_n: int
    slices: int
    subgroup = 32

    @property
    def rows_per_group(self) -> int:
        return 16 * self.subs_m * self.fragments_m

    @property
    def columns_per_group(self) -> int:
        """Columns of the result that a workgroup makes."""
        return 16 * self.subs_n * self.fragments_n

    @property
    def threads(self) -> int:
        """Invocations of a workgroup."""
        return self.subgroup * self.subs_m * self.subs_n * self.slices

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        results = self.subs_m * self.subs_n * self.fragments_m * self.fragments_n
        return (self.slices - 1) * results * 1024

    def macros(self) -> dict[str, int]:
        return {
            "COOPMAT": 1,
            "SUBGROUPS_M": self.subs_m,
            "SUBGROUPS_N": self.subs_n,
            "FRAGMENTS_M": self.fragments_m,
            "FRAGMENTS_N": self.fragments_n,
            "SLICES": self.slices,
        }

    def grid(self, m: Size, n: Size, batches: Size) -> tuple[Size, Size, Size]:
        return (
            _dims.ceil_div(n, self.columns_per_group),
            _dims.ceil_div(m, self.rows_per_group),
            batches,
        )


@dataclass(frozen=True)
class Fragments(_FragmentTile):
    """`matmul_fragments.comp`: operands in the order of fragments, which invocations load directly.
    The numbers are those of `FragmentSizes`."""

    depth: int
    steps: int
    together: int = 1
    template = "matmul/matmul_fragments.comp"

    def macros(self) -> dict[str, int]:
        return {**super().macros(), "DEPTH": self.depth}

    def turn(self, terms: int) -> tuple[int, int]:
        """The macros TURN and REST for so many terms: each slice has a whole turn, if it can."""
        steps, turn = terms // 16, self.steps
        while steps < turn * self.slices and turn % (2 * self.depth) == 0:
            turn //= 2
        return turn, steps % turn

    def needs(self, traits: DeviceTraits, problem: Problem) -> Needs:
        turn, rest = self.turn(problem.k)
        least = 16 * turn * self.slices
        yield problem.k % 16 == problem.n % 16 == 0, "multiples of 16 terms and columns"
        yield not rest or problem.k >= least, lambda: f"{least} terms"
        yield (
            problem.m >= LEAST_ROWS,
            lambda: f"{LEAST_ROWS} rows, which share what is read of the weight",
        )
        yield self.rows_per_group < 2 * max(problem.m, 16), "rows for half a workgroup or more"
        yield from limits(traits, self.threads, self.shared)

    def time(self, traits: DeviceTraits, problem: Problem) -> float:
        costs = traits.profile.matmul.fragments
        fragments = self.threads // self.subgroup * self.fragments_m * self.fragments_n
        groups = ceil(problem.m, self.rows_per_group) * ceil(problem.n, self.columns_per_group)
        most = ceil(groups, traits.processors)
        rounds = ceil(most, self.together)
        fullest, together = costs.product
        product = fullest * most + together * rounds * self.together
        turn, rest = self.turn(problem.k)
        steps = turn * ceil(problem.k // (16 * turn), self.slices) + rest
        join = costs.join * fragments * groups / traits.processors
        return (
            costs.start
            + steps * fragments * product
            + (steps * costs.latency + costs.round) * rounds
            + (join if self.slices > 1 else 0)
            + costs.weight * problem.n * problem.k
        )


@dataclass(frozen=True)
class FragmentConvolution(_FragmentTile):
    """`conv2d_fragments.comp`: a weight in the order of fragments, and channels of pixels, which
    invocations load directly. The numbers are those of `ConvolutionSizes`."""

    together: int = 1
    template = "conv/conv2d_fragments.comp"

    def turn(self, terms: int) -> int:
        """The macro TURN for so many terms: steps that the code of a loop has. More overlap better;
        measured on an NVIDIA GPU."""
        most = 4 if self.fragments_m * self.fragments_n == 8 else 2
        return next(n for n in (most, 2, 1) if terms % (32 * self.slices * n) == 0 or n == 1)

    def reads_extras_early(self, terms: int) -> bool:
        """Whether what the epilogue reads is better read before so many terms are multiplied: the loop
        is as short as the wait for memory, and small tiles have registers for it."""
        return terms <= 64 and self.fragments_m * self.fragments_n <= 4

    def needs(self, traits: DeviceTraits, problem: Problem) -> Needs:
        yield problem.k % 32 == problem.n % 16 == 0, "multiples of 32 terms and 16 channels"
        yield problem.m >= LEAST_PIXELS, lambda: f"{LEAST_PIXELS} pixels"
        columns = self.columns_per_group
        yield columns < 2 * max(problem.n, 32), "channels for half a workgroup or more"
        yield problem.k >= 32 * self.slices, lambda: f"{32 * self.slices} terms"
        yield from limits(traits, self.threads, self.shared)

    def time(self, traits: DeviceTraits, problem: Problem) -> float:
        costs = traits.profile.matmul.convolution
        subgroups, fragments = self.subs_m * self.subs_n, self.fragments_m * self.fragments_n
        groups = ceil(problem.m, self.rows_per_group) * ceil(problem.n, self.columns_per_group)
        most = ceil(groups, traits.processors)
        rounds = ceil(most, self.together)
        even, fullest, together = costs.product
        load = groups / traits.processors
        product = even * load + fullest * most + together * rounds * self.together
        loads = costs.load * (self.fragments_m + self.fragments_n)
        steps = ceil(problem.k // 32, self.slices)
        results = subgroups * fragments * load
        return (
            costs.start
            + costs.code * fragments
            + steps * subgroups * self.slices * (fragments + loads) * product
            + (steps * costs.latency + costs.round) * rounds
            + costs.store * results
            + costs.result * problem.m * problem.n
            + (costs.join * self.slices * results if self.slices > 1 else 0)
        )


@dataclass(frozen=True)
class WorkgroupCoopmat(TileChoice):
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

    def needs(self, traits: DeviceTraits, problem: Problem) -> Needs:
        known, least = problem.tiles, self.least_steps * self.tile_k * self.splits
        takes = problem.half and (traits.bfloat16_matrices or not problem.bfloat16)
        yield takes, "matrix cores for the dtype of the operands"
        yield known is not None, "rows and batches that start at multiples of 8 elements"
        m, n, k = known or TileBounds(0, 0, 0)
        yield self.tile_m <= m and self.tile_n <= n and k % self.tile_k == 0, "whole tiles"
        whole = n == problem.n and n % self.tile_n == 0
        yield problem.transposed or whole, "columns that are a multiple of those of a tile"
        yield not problem.window, "no window"
        yield problem.k >= least, lambda: f"{least} terms"
        sizes = (self.tile_m, self.tile_n, self.tile_k, self.invocations)
        yield traits.takes_matrices(*sizes), "a device with matrices of this size"

    def time(self, traits: DeviceTraits, problem: Problem) -> float:
        costs = traits.profile.matmul.workgroup_coopmat
        steps, rounds, load = self._schedule(traits, problem, _RESIDENT, costs.fullest)
        products = self.tile_m * self.tile_n * self.tile_k / 4096
        work = costs.product * products + costs.load * (self.tile_m + self.tile_n) * self.tile_k / 4
        return (
            costs.start
            + steps * (costs.latency * rounds + load * work)
            + costs.store * self.tile_m * self.tile_n / 256 * load
        )

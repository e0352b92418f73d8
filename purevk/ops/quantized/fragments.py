"""Tiles that multiply int8 by int8 on matrix cores: `qtile_coopmat.glslh`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.lower.gpu_kernels import limits
from purevk.tuning import DeviceTraits
from purevk.tuning.candidates import Candidate, Needs, by_cost, take
from purevk.tuning.tiles import IntegerSizes

DEPTH = 32  # of a fragment
_LEAST_ROWS = 48  # below, the weight is better read by kernels for few rows
_MANY_ROWS = 256  # if there may be so many, these tiles also run for few
_LEAST_COLUMNS = 32
_SUBGROUP = 32


class Products(NamedTuple):
    """`groups` products of [rows, depth] and [depth, columns]; `window`: of a convolution with a
    window."""

    rows: int
    columns: int
    depth: int
    groups: int
    window: bool


@dataclass(frozen=True)
class Fragments(Candidate[Products]):
    """A tile; fragments of sums have `columns` columns."""

    sizes: IntegerSizes
    columns: int
    subgroup: ClassVar[int | None] = _SUBGROUP

    def macros(self) -> dict[str, int]:
        return {
            "FRAGMENTS": 1,
            "COOPMAT": 1,
            "FRAGMENT_N": self.columns,
            "TILE_M": self.sizes.m,
            "TILE_N": self.sizes.n,
            "CHUNKS": self.sizes.chunks,
            "SUBGROUP_M": self.sizes.sub_m,
            "SUBGROUP_N": self.sizes.sub_n,
        }

    @property
    def threads(self) -> int:
        m, n, _, sub_m, sub_n = self.sizes
        return _SUBGROUP * (m // sub_m) * (n // sub_n)

    def grid(self, rows: Size, columns: Size, groups: Size = 1) -> tuple[Size, Size, Size]:
        """The workgroups for `groups` results of [rows, columns]."""
        return (
            _dims.ceil_div(columns, self.sizes.n),
            _dims.ceil_div(rows, self.sizes.m),
            groups,
        )

    def needs(self, traits: DeviceTraits, problem: Products) -> Needs:
        m, n, chunks, sub_m, sub_n = self.sizes
        yield sub_m % 16 == sub_n % self.columns == 0, "tiles of whole fragments"
        yield chunks * 16 % DEPTH == 0, "steps of whole fragments"
        yield from limits(traits, self.threads, 16 * (m + n) * (chunks + 1))
        even = self.threads % chunks == chunks * m % self.threads == chunks * n % self.threads == 0
        yield even, "invocations that load equally many chunks"

    def cost(self, traits: DeviceTraits, problem: Products) -> float:
        costs, (m, n, chunks, _, _) = traits.profile.integers, self.sizes
        rows, columns, depth, groups, window = problem
        workgroups, values = -(-rows // m) * -(-columns // n) * groups, 16 * chunks
        load = max(workgroups / traits.processors, 1.0)
        load += costs.fullest * (-(-workgroups // traits.processors) - load)
        rounds = -(-workgroups // (traits.processors * costs.resident))
        latency = costs.latency + costs.window * window * m * chunks / self.threads
        work = values * (costs.load * (m + n) + costs.product * m * n)
        return costs.start + -(-depth // values) * (rounds * latency + load * work)


def choose_fragments(
    traits: DeviceTraits,
    rows: Size,
    columns: Size,
    depth: Size,
    groups: int = 1,
    window: bool = False,
) -> Fragments | None:
    """The tile for `groups` products of [rows, depth] and [depth, columns]; None where other kernels
    are better, or matrix cores take no int8. `window`: of a convolution with a window."""
    low, high = _dims.range_of(rows)
    if (
        not traits.profile.has_fast_shared_memory
        or not traits.has("subgroup_shuffle")
        or (low < _LEAST_ROWS and high < _MANY_ROWS)
        or _dims.upper(columns) < _LEAST_COLUMNS
    ):
        return None
    found = max(traits.fragment_columns(DType.int8), default=None)
    if found is None:
        return None
    problem = Products(_dims.upper(rows), _dims.upper(columns), _dims.upper(depth), groups, window)
    tiles = [Fragments(size, found) for size in traits.profile.tiles.quantized_integers]
    fitting = by_cost(traits, problem, tiles)
    return take(traits, "int8 tiles", problem, fitting, lambda: tiles) if fitting else None

"""Which tile the register kernels of software devices (`matmul.comp`, `conv2d.comp`) take, by a
model of what each costs."""

from __future__ import annotations

import functools
from typing import NamedTuple

from purevk.tuning.costs import RegisterCosts
from purevk.tuning.tiles import RegisterSizes


class Tile(NamedTuple):
    """The macros LANES_M, TM and TN4 of `matmul_tile.glslh`, for subgroups of `lanes`."""

    lanes: int
    lanes_m: int
    tm: int
    tn4: int

    @property
    def rows(self) -> int:
        """Rows of the output that a subgroup makes."""
        return self.tm * self.lanes if self.lanes_m else self.tm

    @property
    def columns(self) -> int:
        """Columns of the output that a subgroup makes."""
        return 4 * self.tn4 * (1 if self.lanes_m else self.lanes)

    def loads(self) -> tuple[int, int]:
        """Vectors of A and of B that each invocation loads for 4 steps along K."""
        if self.lanes_m:
            return self.tm, -(-4 * self.tn4 // self.lanes)
        return -(-self.tm // self.lanes), 4 * self.tn4


class RatedTile(NamedTuple):
    """A tile, with the subgroups of a workgroup, and the nanoseconds that a matmul takes with it."""

    cost: float
    tile: Tile
    subgroups: int


@functools.lru_cache(maxsize=4096)
def tiles_by_cost(
    costs: RegisterCosts,
    tiles: tuple[RegisterSizes, ...],
    lanes: int,
    cores: int,
    m: int,
    n: int,
    k: int,
    batches: int,
    vector_a: bool = True,
    vector_b: bool = True,
    most: int = 32,
    products: int = 1,
    outputs: int = 1,
) -> tuple[RatedTile, ...]:
    """The tiles for `batches` matmuls [m, k] x [k, n], the fastest first.

    Args:
        costs, tiles: those of the device's profile.
        lanes: the subgroup size. cores: threads that run workgroups.
        vector_a, vector_b: whether the operand is read as vec4s.
        most: vectors of 4 floats that an invocation may sum up.
        products: matmuls of these sizes that a tile makes one after the other.
        outputs: sums of all products that it stores for each element of one.
    """
    found: list[RatedTile] = []
    for sizes in tiles:
        tile = Tile(lanes, *sizes)
        high, wide = -(-m // tile.rows), -(-n // tile.columns)
        vectors = tile.tm * tile.tn4
        if vectors > most:
            continue
        loads_a, loads_b = tile.loads()
        loads = loads_a * (1 if vector_a else costs.scalar_loads) + loads_b * (
            1 if vector_b else costs.scalar_loads
        )
        spilled = max(0, vectors - costs.kept_vectors)
        step = (
            costs.step + costs.multiply_add * vectors + costs.load * loads + costs.spill * spilled
        )
        product = -(-k // 4) * step
        if outputs > 1:
            product += costs.join * outputs * vectors
        work = costs.store * outputs * vectors + products * product
        # Several where starting a workgroup counts.
        per_group = 4 if high >= 64 and products * k <= 128 else 1
        groups = -(-high // per_group) * wide * batches
        cost = -(-groups // cores) * (costs.start + per_group * work)
        found.append(RatedTile(cost, tile, per_group))
    return tuple(sorted(found, key=lambda each: each.cost))

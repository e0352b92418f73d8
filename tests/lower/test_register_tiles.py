"""The choice of tiles for software devices. No device is needed."""

from __future__ import annotations

import itertools

import pytest

from purevk.lower.register_tiles import Tile, tiles_by_cost
from purevk.tuning import SOFTWARE

COSTS, TILES = SOFTWARE.registers, SOFTWARE.tiles.registers
SIZES = (1, 2, 7, 16, 49, 197, 1024)


def test_tiles_cover_what_they_say() -> None:
    wide, high = Tile(8, 0, 16, 2), Tile(8, 1, 3, 6)
    assert (wide.rows, wide.columns, wide.loads()) == (16, 64, (2, 8))
    assert (high.rows, high.columns, high.loads()) == (24, 24, (3, 3))


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
@pytest.mark.parametrize("cores", [1, 2, 64])
def test_every_matmul_gets_a_tile(lanes: int, cores: int) -> None:
    for m, n, k in itertools.product(SIZES, repeat=3):
        for most in (16, 32):
            _, tile, subgroups = tiles_by_cost(
                COSTS, TILES, lanes, cores, m, n, k, 3, k % 4 == 0, n % 4 == 0, most
            )[0]
            assert tile.lanes == lanes
            assert tile.tm * tile.tn4 <= most
            assert subgroups in (1, 4)
            assert m >= 64 * tile.rows - tile.rows or subgroups == 1


@pytest.mark.parametrize(
    ("shape", "lanes_m", "rows"),
    [
        ((1, 1000, 1280), 0, 1),
        ((12544, 16, 32), 1, 32),
        ((3136, 24, 144), 1, 24),
        ((512, 512, 512), 0, 16),
    ],
    ids=str,
)
def test_what_was_measured_to_be_best(shape: tuple[int, int, int], lanes_m: int, rows: int) -> None:
    """One row, few columns, many of both: the fastest of 38 tiles on a core of llvmpipe."""
    _, tile, _ = tiles_by_cost(COSTS, TILES, 8, 1, *shape, 1)[0]
    assert (tile.lanes_m, tile.rows) == (lanes_m, rows)


def test_products_add_up() -> None:
    """16 products cost as much as one of their depth, and more where they have several sums."""
    shape = (784, 64)
    one, *_ = tiles_by_cost(COSTS, TILES, 8, 1, *shape, 16 * 64, 1)[0]
    many, *_ = tiles_by_cost(COSTS, TILES, 8, 1, *shape, 64, 1, products=16)[0]
    sums, *_ = tiles_by_cost(COSTS, TILES, 8, 1, *shape, 64, 1, products=16, outputs=4)[0]
    assert one == pytest.approx(many)
    assert 1.02 * many < sums < 1.5 * many


def test_many_cores_get_smaller_tiles() -> None:
    _, few, _ = tiles_by_cost(COSTS, TILES, 8, 1, 32, 128, 256, 1)[0]
    _, many, _ = tiles_by_cost(COSTS, TILES, 8, 64, 32, 128, 256, 1)[0]
    assert many.rows * many.columns < few.rows * few.columns

"""The tiles of the matmul templates, which convolutions have too, the parameters of a matmul, and the
order of fragments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tests.glsl.harness import ceil_div, subgroup_size


def register_tile(macros: Mapping[str, int]) -> dict[str, int]:
    """The tile of matmul.comp and conv2d.comp for this device: no shuffles where subgroups are not
    of 8."""
    return {
        "SG": 8 if subgroup_size() == 8 else 1,
        "LANES_M": 0,
        "TM": 8,
        "TN4": 1,
        "WY": 4,
        **macros,
    }


def register_grid(macros: Mapping[str, int], m: int, n: int, z: int) -> tuple[int, int, int]:
    """The grid of an m x n result in `z` batches, with the tile of `register_tile`."""
    rows, columns = macros["TM"] * macros["WY"], 4 * macros["TN4"]
    if macros["LANES_M"] and macros["SG"] > 1:
        return ceil_div(n, columns), ceil_div(m, macros["SG"] * rows), z
    return ceil_div(n, columns * (macros["SG"] if macros["SG"] > 1 else 8)), ceil_div(m, rows), z


def tile_macros(tile: Sequence[int]) -> dict[str, int]:
    """The macros of a tile in shared memory."""
    return dict(zip(("TILE_M", "TILE_N", "TILE_K", "THREAD_M", "THREAD_N", "SLICES"), tile))


def dense_matmul(m: int, n: int, k: int, transposed: bool = False) -> dict[str, int]:
    """The parameters of a matmul of dense operands, whose batches follow one another."""
    return {
        "M": m,
        "N": n,
        "K": k,
        "lda": k,
        "ldb": k if transposed else n,
        "ldo": n,
        "batch_a": m * k,
        "batch_b": n * k,
        "batch_o": m * n,
        "inner_batches": 1000,
    }


def left_blocks(a: np.ndarray) -> np.ndarray:
    """A matrix in the order of fragments, as the left operand. Rows that fill a block are NaN."""
    rows, terms = a.shape
    nan = 0x7FC0 if a.dtype == np.uint16 else np.nan
    padded = np.full((ceil_div(rows, 16) * 16, terms), nan, a.dtype)
    padded[:rows] = a
    return (
        padded.reshape(-1, 2, 8, terms // 16, 4, 4).transpose(0, 3, 2, 4, 1, 5).reshape(-1).copy()
    )


def rows_of(blocks: np.ndarray, rows: int, terms: int) -> np.ndarray:
    """The first rows of a left operand."""
    found = blocks.reshape(-1, terms // 16, 8, 4, 2, 4).transpose(0, 4, 2, 1, 3, 5)
    return found.reshape(-1, terms)[:rows]


def right_blocks(b: np.ndarray) -> np.ndarray:
    """A matrix [terms, columns] in the order of fragments, as the right operand."""
    terms, columns = b.shape
    split = b.reshape(terms // 16, 4, 4, columns // 16, 4, 2, 2)
    return split.transpose(3, 0, 4, 6, 1, 5, 2).reshape(-1).copy()

"""Runs the matmul, convolution and attention templates: which macros, parameters and grid a problem
takes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from purevk import api
from tests.glsl.harness import (
    PUSH_WORDS,
    SENTINEL,
    Kernel,
    Out,
    compile_template,
    device,
    numbered,
    subgroup_size,
)

# A sum of products in float, in another order than the reference's.
TOLERANCE = {np.float32: 1e-5, np.float16: 2e-3}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class Texel:
    """An input that is bound as a uniform texel buffer of a format such as "rgba32f"."""

    data: np.ndarray
    format: str


class Heavy(Kernel):
    """A template with its parameters: push constants, but for the names in `constants`. Those left
    out are what an unset constant is.

    `bindings` is how many storage buffers there are, or the kind of each binding ("storage" or
    "texel").
    """

    def __init__(
        self,
        template: str,
        macros: Mapping[str, object],
        params: Mapping[str, int],
        bindings: int | Sequence[str],
        constants: Iterable[str] = (),
    ) -> None:
        macros, words, special = dict(macros), [0] * PUSH_WORDS, {}
        fixed = set(numbered(template, macros, dict.fromkeys(constants, 0)))
        for index, value in numbered(template, macros, params).items():
            if index in fixed:
                special[index] = value
            else:
                macros[f"PUSH_{index}"] = 1
                words[index] = value
        self.push = struct.pack(f"<{PUSH_WORDS}i", *words)
        self.pipeline = api.ComputePipeline(
            device(),
            compile_template(template, macros),
            bindings,
            specialization=special,
            label=template,
        )

    def run_texels(
        self, inputs: Sequence[np.ndarray | Texel], out: Out, grid: tuple[int, int, int]
    ) -> np.ndarray:
        """As `run`, with one output, which comes last, and inputs that may be texel buffers."""
        made, bound, kept = device(), [], []
        for item in inputs:
            data = np.ascontiguousarray(item.data if isinstance(item, Texel) else item)
            usage = api.Usage.DEFAULT | (api.Usage.TEXEL if isinstance(item, Texel) else 0)
            buffer = api.Buffer(made, data.nbytes, api.MemoryKind.READBACK, usage)
            buffer.write(0, data.tobytes())
            kept.append(buffer)
            bound.append(
                api.BufferView(buffer, item.format)
                if isinstance(item, Texel)
                else (buffer, 0, None)
            )
        dtype = np.dtype(out.dtype)
        nbytes = out.count * dtype.itemsize
        result = api.Buffer(made, nbytes + 4096, api.MemoryKind.READBACK)
        result.write(0, bytes([SENTINEL]) * (nbytes + 4096))
        arena, pool = api.DescriptorArena(made), api.CommandPool(made)
        (descriptors,) = arena.make([(self.pipeline.layout, [*bound, (result, 0, None)])])
        commands = pool.buffer()
        commands.begin()
        commands.barrier(api.Access.HOST, api.Access.COMPUTE)
        commands.record_dispatch(self.pipeline, descriptors, self.push, len(self.push), *grid)
        commands.barrier(api.Access.COMPUTE, api.Access.HOST)
        commands.end()
        api.Queue(made).run(commands)
        after = result.read()
        assert after[nbytes:] == bytes([SENTINEL]) * 4096, "the kernel wrote beside its output"
        return np.frombuffer(after[:nbytes], dtype).reshape(out.shape)


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
    rows, columns = macros["TM"] * macros["WY"], 4 * macros["TN4"]
    if macros["LANES_M"] and macros["SG"] > 1:
        return ceil_div(n, columns), ceil_div(m, macros["SG"] * rows), z
    return ceil_div(n, columns * (macros["SG"] if macros["SG"] > 1 else 8)), ceil_div(m, rows), z


def tile_macros(tile: Sequence[int]) -> dict[str, int]:
    return dict(zip(("TILE_M", "TILE_N", "TILE_K", "THREAD_M", "THREAD_N", "SLICES"), tile))


def dense_product(m: int, n: int, k: int, transposed: bool = False) -> dict[str, int]:
    """The parameters of a product of dense operands, in batches that follow one another."""
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


def close(got: np.ndarray, want: np.ndarray, dtype: type) -> None:
    scale = np.abs(want).max()
    error = np.abs(got.astype(np.float64) - want).max() / scale
    assert error < TOLERANCE[dtype], error


def padded(rows: np.ndarray, pitch: int, offset: int) -> np.ndarray:
    """The 2-D array with rows `pitch` elements apart, from element `offset` on; NaN between."""
    out = np.full(offset + rows.shape[0] * pitch, np.nan, rows.dtype)
    out[offset:].reshape(rows.shape[0], pitch)[:, : rows.shape[1]] = rows
    return out

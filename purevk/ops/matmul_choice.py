"""Which matrix product kernel a device runs for given sizes, with which tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.ops.epilogue import Epilogue, gcd4
from purevk.ops.lowering import DeviceTraits, Lowering, Operand
from purevk.ops.register_tiles import choose_tile


@dataclass(frozen=True)
class Tiled:
    """`matmul_tiled.comp`: tiles in shared memory."""

    tile_m: int
    tile_n: int
    tile_k: int
    thread_m: int
    thread_n: int
    splits: int = 1

    def macros(self) -> dict[str, int]:
        return {
            "TILE_M": self.tile_m, "TILE_N": self.tile_n, "TILE_K": self.tile_k, "THREAD_M": self.thread_m,
            "THREAD_N": self.thread_n,
        }  # fmt: skip

    def grid(self, m: Size, n: Size, batches: Size) -> tuple[Size, Size, Size]:
        return (_dims.ceil_div(n, self.tile_n), _dims.ceil_div(m, self.tile_m), batches)

    @property
    def template(self) -> str:
        return "matmul_tiled.comp"

    subgroup: int | None = None

    def emit(self, lowering: Lowering, node: Any, **given: Any) -> None:
        _emit(self, lowering, node, **given)


@dataclass(frozen=True)
class Registers:
    """`matmul.comp`: a register tile an invocation, what a subgroup shares goes by shuffles. For software devices."""

    subgroup_size: int
    lanes_m: int
    tm: int
    tn4: int
    wy: int
    splits: int = 1

    def macros(self) -> dict[str, int]:
        return {"SG": self.subgroup_size, "LANES_M": self.lanes_m, "TM": self.tm, "TN4": self.tn4, "WY": self.wy}

    def grid(self, m: Size, n: Size, batches: Size) -> tuple[Size, Size, Size]:
        lanes = self.subgroup_size if self.subgroup_size > 1 else 8
        if self.lanes_m:
            return (_dims.ceil_div(n, 4 * self.tn4), _dims.ceil_div(m, lanes * self.tm * self.wy), batches)
        return (_dims.ceil_div(n, lanes * 4 * self.tn4), _dims.ceil_div(m, self.tm * self.wy), batches)

    @property
    def template(self) -> str:
        return "matmul.comp"

    @property
    def subgroup(self) -> int | None:
        return self.subgroup_size if self.subgroup_size > 1 else None

    def emit(self, lowering: Lowering, node: Any, **given: Any) -> None:
        _emit(self, lowering, node, **given)


Choice = Tiled | Registers


def choose(
    traits: DeviceTraits, m: Size, n: Size, k: Size, batches: Size, dtype: DType, transposed: bool
) -> Choice:
    """The kernel for a product of [m, k] and [k, n]."""
    if traits.is_cpu:
        return choose_registers(traits, m, n, k, batches, gcd4(k), gcd4(k if transposed else n))
    rows, columns = _dims.upper(m), _dims.upper(n)
    groups = max(traits.cores, 16)
    for tile_m, tile_n, tile_k, thread in ((64, 64, 16, 4), (32, 32, 32, 4), (32, 16, 32, 2)):
        if -(-rows // tile_m) * -(-columns // tile_n) * _dims.upper(batches) >= groups:
            break
    return Tiled(tile_m, tile_n, tile_k, min(thread, 4), 4)


def choose_registers(
    traits: DeviceTraits, m: Size, n: Size, k: Size, batches: Size, vector_a: bool, vector_b: bool, most: int = 32
) -> Registers:
    """The tile of a software device; `most`, `vector_a` and `vector_b` as `choose_tile` takes them."""
    if not traits.has("subgroup_shuffle") or traits.subgroup_size < 2:
        return Registers(1, 0, 8, 1, 1)
    tile, subgroups = choose_tile(
        traits.subgroup_size, max(traits.cores, 1), _dims.upper(m), _dims.upper(n), _dims.upper(k), _dims.upper(batches),
        vector_a, vector_b, most,
    )  # fmt: skip
    return Registers(tile.lanes, tile.lanes_m, tile.tm, tile.tn4, subgroups)


def bind(
    lowering: Lowering, a: Operand, b: Operand, bias: Operand | None, out: Operand, vectors: tuple[bool, bool, bool]
) -> tuple[dict[str, Any], list[tuple[Operand, str]]]:
    """The macros of `matmul_io.glslh` but for the epilogue's, and the bindings up to the output.

    Args:
        vectors: whether A, B and the output are read and written 4 elements at a time.
    """
    texel_a, texel_b = lowering.texel(a, vectors[0]), lowering.texel(b, vectors[1])
    macros: dict[str, Any] = {
        "T_A": a.dtype.glsl, "T_B": b.dtype.glsl, "T_OUT": out.dtype.glsl,
        "VEC4_A": int(vectors[0]), "VEC4_B": int(vectors[1]), "VEC4_OUT": int(vectors[2]), "BIAS": int(bias is not None),
        "TEXEL_A": int(bool(texel_a)), "TEXEL_B": int(bool(texel_b)),
    }  # fmt: skip
    buffers = [(a, "r" + texel_a), (b, "r" + texel_b)]
    if bias is not None:
        texel = lowering.texel(bias, vectors[2]) if not vectors[2] or gcd4(bias.offset) else ""
        macros |= {"T_BIAS": bias.dtype.glsl, "TEXEL_BIAS": int(bool(texel))}
        buffers.append((bias, "r" + texel))
    buffers.append((out, "w"))
    return macros, buffers


def _emit(
    choice: Choice, lowering: Lowering, node: Any, *, a: Operand, b: Operand, bias: Operand | None, out: Operand,
    epilogue: Epilogue, sizes: tuple, strides: tuple, batch: tuple, transposed: bool, vectors: tuple,
) -> None:  # fmt: skip
    (m, n, k), (lda, ldb, ldo) = sizes, strides
    batches, inner, step, outer_step = batch
    macros, buffers = bind(lowering, a, b, bias, out, vectors)
    macros |= {"B_TRANSPOSED": int(transposed), **choice.macros(), **epilogue.macros}
    buffers += epilogue.buffers
    params = [
        m, n, k, lda, ldb, ldo, step[0], step[1], step[2], inner, outer_step[0], outer_step[1], outer_step[2],
        a.offset, b.offset, out.offset, bias.offset if bias is not None else 0,
    ]  # fmt: skip
    lowering.dispatch(
        choice.template, buffers, macros=macros, params=params, grid=choice.grid(m, n, batches),
        subgroup_size=choice.subgroup, flops=2 * m * n * k * batches,
    )  # fmt: skip

"""Which matmul kernel a device runs for given sizes, with which tiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.ir import Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.epilogue import Epilogue
from purevk.lower.gpu_kernels import Dot, Problem, TileBounds, Tiled, Vector
from purevk.lower.gpu_tiles import choose_gpu
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.matrix_core_kernels import Coopmat, WorkgroupCoopmat
from purevk.lower.numbers import gcd4
from purevk.lower.register_tiles import RatedTile, tiles_by_cost
from purevk.tuning import DeviceTraits


@dataclass(frozen=True)
class Registers:
    """`matmul.comp`: each invocation has a tile in registers, and a subgroup shares what it reads by
    shuffles. For software devices."""

    subgroup_size: int
    lanes_m: int
    tm: int
    tn4: int
    wy: int
    splits: int = 1
    takes_vectors = True

    @classmethod
    def of(cls, found: RatedTile) -> Registers:
        tile = found.tile
        return cls(tile.lanes, tile.lanes_m, tile.tm, tile.tn4, found.subgroups)

    def macros(self) -> dict[str, int]:
        return {
            "SG": self.subgroup_size,
            "LANES_M": self.lanes_m,
            "TM": self.tm,
            "TN4": self.tn4,
            "WY": self.wy,
        }

    def grid(self, m: Size, n: Size, batches: Size) -> tuple[Size, Size, Size]:
        lanes = self.subgroup_size if self.subgroup_size > 1 else 8
        if self.lanes_m:
            return (
                _dims.ceil_div(n, 4 * self.tn4),
                _dims.ceil_div(m, lanes * self.tm * self.wy),
                batches,
            )
        return (
            _dims.ceil_div(n, lanes * 4 * self.tn4),
            _dims.ceil_div(m, self.tm * self.wy),
            batches,
        )

    @property
    def rows_per_group(self) -> int:
        """Rows of the result that a workgroup makes."""
        return self.tm * self.wy * (max(self.subgroup_size, 1) if self.lanes_m else 1)

    @property
    def template(self) -> str:
        return "matmul/matmul.comp"

    @property
    def subgroup(self) -> int | None:
        return self.subgroup_size if self.subgroup_size > 1 else None


_LONG = 4096  # terms, from which on their sum is one of parts
Choice = Tiled | Coopmat | WorkgroupCoopmat | Vector | Dot | Registers


@dataclass(frozen=True)
class Batches:
    """The batches of a matmul: number z is the inner one z % inner of the outer one z // inner.

    Attributes:
        count: all of them.
        inner: those of an outer one.
        batch_a, batch_b, batch_o: elements of A, B and the result from one inner batch to the next
            (0 broadcasts).
        outer_a, outer_b, outer_o: the same from one outer batch to the next.
    """

    count: Size = 1
    inner: Size = 1
    batch_a: Size = 0
    batch_b: Size = 0
    batch_o: Size = 0
    outer_a: Size = 0
    outer_b: Size = 0
    outer_o: Size = 0

    @property
    def params(self) -> dict[str, Size]:
        """The parameters of the templates."""
        named = {name: size for name, size in vars(self).items() if "_" in name}
        return {"inner_batches": self.inner, **named}


def choose(
    traits: DeviceTraits,
    m: Size,
    n: Size,
    k: Size,
    batches: Size,
    half: bool,
    transposed: bool,
    vectors: tuple[bool, bool] = (True, True),
    aligned: bool = False,
    wide: bool = False,
    bfloat16: bool = False,
) -> Choice:
    """The kernel for a matmul of [m, k] and [k, n].

    Args:
        half: both operands are float16, or both are bfloat16.
        transposed: the second is dense along k.
        vectors: whether the operands can be read as vectors of 4.
        aligned: rows and batches of both and of the result start at multiples of 8 elements.
        wide: rows of the first, and rows of the second (or columns, if `transposed`), start at
            multiples of 16 bytes, of which they have a whole number.
        bfloat16: with `half`, they are bfloat16.
    """
    if not traits.profile.has_fast_shared_memory:
        return choose_registers(traits, m, n, k, batches, gcd4(k), gcd4(k if transposed else n))
    upper = _dims.upper
    least_m, least_n = (_dims.range_of(size)[0] for size in (m, n))
    tiles = TileBounds(least_m, least_n, _dims.gcd_of(k)) if aligned else None
    problem = Problem(
        upper(m),
        upper(n),
        upper(k),
        upper(batches),
        half,
        transposed,
        vectors,
        tiles=tiles,
        wide=wide,
        bfloat16=bfloat16,
    )
    choice: Choice = choose_gpu(traits, problem)
    return choice


def choose_registers(
    traits: DeviceTraits,
    m: Size,
    n: Size,
    k: Size,
    batches: Size,
    vector_a: bool,
    vector_b: bool,
    most: int = 32,
) -> Registers:
    """The tile of a software device; `most`, `vector_a` and `vector_b` as `tiles_by_cost` takes
    them."""
    if not traits.has("subgroup_shuffle") or traits.subgroup_size < 2:
        return Registers(1, 0, 8, 1, 1)
    upper = _dims.upper
    problem = (upper(m), upper(n), upper(k), upper(batches), vector_a, vector_b, most)
    found = tiles_by_cost(
        traits.profile.registers,
        traits.profile.tiles.registers,
        traits.subgroup_size,
        max(traits.cores, 1),
        *problem,
    )
    return traits.choices.take("registers", problem, map(Registers.of, found))


def vector_macros(
    b: Operand, vector_a: bool, vector_b: bool, vector_out: bool, wide: bool = False
) -> dict[str, str | int]:
    """The macros of `matmul_io.glslh` that say what is read and written as vectors of 4; `wide`: A
    and B are read 16 bytes at a time."""
    macros: dict[str, str | int] = {"VEC4_A": int(vector_a), "VEC4_B": int(vector_b)}
    if wide and b.dtype.itemsize == 2:
        macros = {"VEC4_A": 0, "VEC4_B": 0, "VEC8_A": 1, "VEC8_B": 1}
    return {**macros, "VEC4_OUT": int(vector_out)}


def emit(
    choice: Choice,
    lowering: Lowering,
    *,
    a: Operand,
    b: Operand,
    bias: Operand | None,
    out: Operand,
    epilogue: Epilogue,
    sizes: tuple[Size, Size, Size],
    strides: tuple[Size, Size, Size],
    batches: Batches,
    transposed: bool,
    vectors: tuple[bool, bool, bool],
    flops: Size | None = None,
    panels: bool = False,
) -> None:
    """Appends the dispatches of a matmul.

    Args:
        sizes: m, n, k.
        strides: elements from one row to the next of A, B (or column, if transposed) and the
            result.
        batches: the matmuls of these sizes.
        vectors: whether A, B and the result can be read and written as vectors of 4; the result as
            `stored_vectors` says.
        epilogue: of the dispatch that ends the work.
        flops: None: those of a matmul.
        panels: B is in panels of columns; `Registers` alone.
    """
    (m, n, k), (lda, ldb, ldo) = sizes, strides
    flops = 2 * m * n * k * batches.count if flops is None else flops
    params: dict[str, Size] = {"M": m, "N": n, "K": k, "lda": lda, "ldb": ldb, "ldo": ldo}
    params |= batches.params
    read, stored, target = vectors[:2] if choice.takes_vectors else (False, False), vectors[2], out
    splits = choice.splits > 1
    if isinstance(choice, (Tiled, Coopmat, WorkgroupCoopmat)) and splits:
        target = parts_of(lowering, choice.splits, batches.count, m, n)
        stored = choice.takes_vectors and gcd4(n)
        params |= {"splits": choice.splits, "split_size": split_size(k, choice)}
    macros = vector_macros(b, *read, stored, reads_wide(choice))
    macros |= matrix_macros(choice, a, target, k)
    if not isinstance(choice, Dot):
        macros["B_TRANSPOSED"] = int(transposed)
    if splits:
        macros["SPLIT_K"] = 1
    if panels:
        macros["B_PANELS"] = 1
    lowering.dispatch(
        choice.template,
        {"a": a, "b": b, "bias": None if splits else bias, "out": target},
        params,
        macros,
        form=choice,
        epilogue=None if splits else epilogue,
        grid=choice.grid(m, n, batches.count),
        flops=flops,
    )
    if splits:
        sizes = (m, n, ldo)
        add_parts(lowering, target, bias, out, epilogue, choice.splits, sizes, batches, vectors[2])


def both_half(a: DType, b: DType) -> bool:
    """Whether both operands are float16, or both are bfloat16."""
    return a is b and a in (DType.float16, DType.bfloat16)


def matrix_macros(
    choice: Choice, a: Operand, out: Operand, terms: Size = 0
) -> dict[str, str | int]:
    """The macros that depend on the dtype of the operands, for matrix cores, or on the number of
    terms of an element, for software devices."""
    if isinstance(choice, Registers) and _dims.upper(terms) > _LONG:
        return {"LONG_SUMS": 1}
    if a.dtype is not DType.bfloat16 or not isinstance(choice, (Coopmat, WorkgroupCoopmat)):
        return {}
    macros: dict[str, str | int] = {"BFLOAT16": 1}
    if isinstance(choice, WorkgroupCoopmat):
        macros |= {"T_A": "bfloat16_t", "T_B": "bfloat16_t"}
        if out.dtype is DType.bfloat16:
            macros["T_OUT"] = "bfloat16_t"
    return macros


def may_overlap(lowering: Lowering, out: Operand, extras: Iterable[Value]) -> bool:
    """Whether several tiles may make the same elements of a result: its epilogue reads nothing that
    they overwrite."""
    return all(lowering.operand(extra).storage is not out.storage for extra in extras)


def reads_wide(choice: Choice) -> bool:
    """Whether a kernel reads halves of A and B 16 bytes at a time."""
    return isinstance(choice, Dot) or (isinstance(choice, Coopmat) and choice.width == 8)


def reads_extras_ahead(choice: Choice) -> bool:
    """Whether a kernel can read what its epilogue takes before it has its results."""
    return isinstance(choice, Coopmat) and choice.splits == choice.slices == 1


def stored_vectors(choice: Choice, vectors: bool) -> bool:
    """Whether the dispatch that ends a matmul stores vectors of 4, if its result can be stored so."""
    return vectors and (choice.takes_vectors or choice.splits > 1)


def split_size(k: Size, choice: Tiled | Coopmat | WorkgroupCoopmat) -> Size:
    """K of one part: a multiple of the step."""
    return _dims.ceil_div(_dims.ceil_div(k, choice.splits), choice.tile_k) * choice.tile_k


def parts_of(lowering: Lowering, splits: int, batches: Size, m: Size, n: Size) -> Operand:
    """Temporary memory for the sums of the parts of K."""
    return lowering.temporary(TensorType(DType.float32, (batches, splits, m, n)))


def add_parts(
    lowering: Lowering,
    parts: Operand,
    bias: Operand | None,
    out: Operand,
    epilogue: Epilogue,
    splits: int,
    sizes: tuple[Size, Size, Size],
    batches: Batches,
    vector: bool,
) -> None:
    """The second dispatch of a matmul whose K was split: `sizes` are m, n and the stride of the
    result's rows."""
    m, n, ldo = sizes
    params: dict[str, Size] = {
        **{name: size for name, size in batches.params.items() if not name.endswith(("_a", "_b"))},
        **{"M": m, "N": n, "splits": splits, "ldo": ldo},
    }
    lowering.dispatch(
        "matmul/matmul_reduce.comp",
        {"a": parts, "bias": bias, "out": out},
        params,
        {"VEC4_A": int(gcd4(n)), "VEC4_OUT": int(vector)},
        epilogue=epilogue,
        grid=(_dims.ceil_div(m * _dims.ceil_div(n, 4), 64), 1, batches.count),
    )

"""Pointwise programs and copies on a GPU if inputs have another order in memory than the output:
`transpose.comp`.

J is the innermost dim of the output. K is the innermost dim of such an input. An input that is read
in the order of the output gives one element per cache line. Tiles in shared memory let both sides
access memory in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.lower.declarations import buffer
from purevk.lower.expression import Expression
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import power_of_two
from purevk.lower.pointwise_writer import Writer
from purevk.tuning import DeviceTraits

TILE = 16384  # bytes of shared memory of one input
_SHORT = 32  # elements along J from which on cache lines would be read in pieces
_RAW = {1: "uint8_t", 2: "uint16_t", 4: "uint", 8: "uvec2", 16: "uvec4"}


class Tile(NamedTuple):
    """How a GPU moves elements through shared memory.

    Attributes:
        along: number of K among the dims of the iteration; J is the last.
        inputs: the operands that have tiles.
        item: bytes of their elements.
        k, groups: elements along K, and groups of 16 bytes along J.
        vector: elements per load.
    """

    along: int
    inputs: tuple[int, ...]
    item: int
    k: int
    groups: int
    vector: int


def choose_tile(
    traits: DeviceTraits,
    operands: Sequence[Operand],
    first_output: int,
    loop: Sequence[Size],
    steps: Sequence[Sequence[Size]],
) -> Tile | None:
    """The tile of an iteration over `loop` (outermost first) with `steps` of the operands along
    each; None where reading in the order of the output is as good, or shared memory is slow."""
    last = len(loop) - 1
    dense = all(_is(steps[last][n], 1) for n in range(first_output, len(operands)))
    if not traits.profile.has_fast_shared_memory or not dense:
        return None
    found: dict[int, int] = {}
    for n in range(first_output):
        if not (_is(steps[last][n], 0, 1, -1)):
            along = next((d for d in range(last) if _is(steps[d][n], 1, -1)), None)
            if along is not None:
                found[n] = along
    if not found:
        return None
    first = max(found, key=lambda n: operands[n].dtype.itemsize)
    along, item = found[first], operands[first].dtype.itemsize
    inputs = [n for n, d in found.items() if d == along and operands[n].dtype.itemsize == item]
    inputs = inputs[: traits.max_shared_memory // TILE]
    j, k = (_dims.upper(loop[d]) for d in (last, along))
    tile = _extent(traits, k, j, item, _dims.upper(_dims.product(loop)))
    if not inputs or tile is None:
        return None
    aligned = [operands[n].offset for n in inputs]
    aligned += [
        loop[along],
        *(step[n] for d, step in enumerate(steps) if d != along for n in inputs),
    ]
    vector = 16 // item if all(_is(steps[along][n], 1) for n in inputs) else 1
    while vector > 1 and (vector > tile[0] or any(_dims.gcd_of(size) % vector for size in aligned)):
        vector //= 2
    if 1 < vector * item < 4:
        vector = 1
    return Tile(along, tuple(inputs), item, *tile, vector)


def _is(step: Size, *numbers: int) -> bool:
    return isinstance(step, int) and step in numbers


def _extent(traits: DeviceTraits, k: int, j: int, item: int, count: int) -> tuple[int, int] | None:
    """Elements along K and groups along J: 64 by 16, longer along one dim where the other is
    short."""
    if j < _SHORT or k < 2:
        return None
    groups = power_of_two(-(-j * item // 16))
    most = TILE // 16
    across = min(64, power_of_two(k))
    if across == 64 and groups >= 16 and count * item // TILE < 2 * traits.processors:
        return 32, 8  # few tiles: smaller ones, for more processors
    groups = min(most // across, groups)
    across = min(most // groups, power_of_two(k))
    return (across, groups) if across * groups >= most // 4 else None


def emit_transposed(
    lowering: Lowering,
    expression: Expression,
    operands: Sequence[Operand],
    first_output: int,
    loop: list[Size],
    steps: list[list[Size]],
    scalars: Sequence[Size],
    label: str,
) -> bool:
    """Appends the dispatch of a pointwise program if a tile serves it; says whether it did. See
    `choose_tile`."""
    tile = choose_tile(lowering.traits, operands, first_output, loop, steps)
    if tile is None:
        return False
    writer = _TileWriter(tile, expression, operands, first_output, loop, steps, scalars)
    last = len(loop) - 1
    local = min(256, lowering.traits.max_invocations)
    counts = [_dims.ceil_div(loop[last], writer.width), _dims.ceil_div(loop[tile.along], tile.k)]
    groups = _dims.product(
        (*counts, *(size for d, size in enumerate(loop) if d not in (tile.along, last)))
    )
    per_word = max(4 // tile.item, 1)
    loads = -(-tile.k // tile.vector * tile.groups * (2 if tile.item == 8 else 4) // local)
    macros: dict[str, str | int] = {
        "ITEM": tile.item,
        "KT": tile.k,
        "JG": tile.groups,
        "VECTOR": tile.vector,
        "LOCAL": local,
        "CHUNK": min(loads, 16 // per_word),
        "TILES": len(tile.inputs),
        "J_SIZE": f"d{last}",
        "K_SIZE": f"d{tile.along}",
        "FIND_TILE": writer.find_tile(),
        "STAGE": writer.stage(),
        "LOADED(v)": "v" if tile.vector * tile.item >= 4 else "uint(v)",
    }
    writer.finish(
        lowering,
        "movement/transpose.comp",
        groups,
        local,
        lowering.linear_grid(groups, 1),
        label,
        macros,
    )
    return True


class _TileWriter(Writer):
    """Writes the macros of `transpose.comp`."""

    def __init__(
        self,
        tile: Tile,
        expression: Expression,
        operands: Sequence[Operand],
        first_output: int,
        loop: list[Size],
        steps: list[list[Size]],
        scalars: Sequence[Size],
    ) -> None:
        super().__init__(expression, operands, first_output, loop, steps, False, scalars)
        self.tile = tile
        self.width = 16 // tile.item * tile.groups
        outputs = range(first_output, len(operands))
        # A copy moves bits: words of shared memory go out as they are.
        self.copies = (
            not expression.steps and len(operands) == 2 and operands[0].dtype is operands[-1].dtype
        )
        aligned = [
            loop[-1],
            *(
                size
                for n in outputs
                for size in (operands[n].offset, *(step[n] for step in steps[:-1]))
            ),
        ]
        self.stored = 16 // tile.item  # elements per store of a copy
        while self.stored > 1 and any(_dims.gcd_of(size) % self.stored for size in aligned):
            self.stored //= 2
        if 1 < self.stored * tile.item < 4:
            self.stored = 1
        if not self.copies:
            fits = tile.item < 8 and all(_dims.gcd_of(size) % 4 == 0 for size in aligned)
            self.vector = fits and self.can_store_vectors()
            self.lanes = 4 if self.vector else 1

    def _declare(self, number: int) -> str:
        if number in self.tile.inputs:
            element = _RAW[self.tile.item * self.tile.vector]
        elif self.copies:
            element = _RAW[self.tile.item * self.stored]
        else:
            return super()._declare(number)
        return buffer(number, self._name(number), element, self._access(number))

    def find_tile(self) -> str:
        """Statements that find the tile of a workgroup, and its index along the dims that the tile
        does not span."""
        last, along = len(self.loop) - 1, self.tile.along
        across, down = (
            f"((d{last} + {self.width - 1}) / {self.width})",
            f"((d{along} + {self.tile.k - 1}) / {self.tile.k})",
        )
        out = [f"int j_first = group % {across} * {self.width}; group /= {across};"]
        out.append(f"int k_first = group % {down} * {self.tile.k}; group /= {down};")
        out += [
            f"int i{n} = group % d{n}; group /= d{n};" for n in reversed(range(last)) if n != along
        ]
        return " ".join(out)

    def stage(self) -> str:
        """Statements that fill the tiles. They name no literals: sizes 0 and 1 are names there,
        too."""
        last, along = len(self.loop) - 1, self.tile.along
        out = []
        for number, n in enumerate(self.tile.inputs):
            others = [
                f"i{d} * ({self._number(self.steps[d][n], f's{d}_{n}')})"
                for d in range(last)
                if d != along
            ]
            first = " + ".join([self._number(self.operands[n].offset, f"o{n}"), *others])
            step = self.steps[along][n]
            out.append(f"STAGE_TILE({number}, {self._buffer(n)}, {first}, s{last}_{n}, {step})")
        return " ".join(out)

    def _number(self, size: Size, name: str) -> str:
        return str(size) if isinstance(size, int) and size in (0, 1) else name

    def _statements(self, literal: dict[str, str]) -> str:
        last, along, item = len(self.loop) - 1, self.tile.along, self.tile.item
        span = 16 // item
        if self.copies:
            return self._copied(literal)
        words = " ".join(
            f"uvec4 w{n} = tile[at + {n} * KT * JG];" for n in range(len(self.tile.inputs))
        )
        lane = f"int i{along} = k; UNROLL for (int e = 0; e < {span}; e += {self.lanes}) {{ int i{last} = j + e;"
        return f"{words} {lane} if (i{last} < J_SIZE) {{ {' '.join(self._work(literal))} }} }}"

    def _copied(self, literal: dict[str, str]) -> str:
        last, along, item = len(self.loop) - 1, self.tile.along, self.tile.item
        span, k = 16 // item, len(self.operands) - 1
        out = [
            f"uvec4 w = tile[at]; int i{along} = k, i{last} = j; int x{k} = {self._index(k, literal)};"
        ]
        for e in range(0, span, self.stored):
            word, nbytes = e * item // 4, self.stored * item
            value = {16: "w", 8: f"w.{'xyzw'[word : word + 2]}", 4: f"w.{'xyzw'[word]}"}.get(nbytes)
            if value is None:
                value = f"{_RAW[nbytes]}(pv_opaque(w.{'xyzw'[word]} >> {e * item % 4 * 8}))"
            out.append(
                f"if (j + {e} < J_SIZE) {self._buffer(k)}[(x{k} + {e}) / {self.stored}] = {value};"
            )
        return " ".join(out)

    def _load(self, k: int, literal: dict[str, str], out: list[str]) -> list[str]:
        if k not in self.tile.inputs:
            return super()._load(k, literal, out)
        names = []
        for lane in range(self.lanes):
            names.append(f"v{k}_{lane}")
            out.append(
                f"{self.operands[k].dtype.acc} v{k}_{lane} = {self._element(k, f'e + {lane}')};"
            )
        return names

    def _element(self, k: int, e: str) -> str:
        """Element `e` of a group of a tile, in the type that is computed with."""
        dtype, word = self.operands[k].dtype, f"w{self.tile.inputs.index(k)}"
        if dtype.itemsize == 8:
            pair = f"({e} == 0 ? {word}.xy : {word}.zw)"
            return (
                f"packDouble2x32({pair})" if dtype is DType.float64 else f"packInt2x32(ivec2{pair})"
            )
        each = 4 // dtype.itemsize
        bits = f"{word}[({e}) / {each}]"
        if dtype is DType.float32:
            return f"uintBitsToFloat({bits})"
        if dtype is DType.int32:
            return f"int({bits})"
        shift = f"({e}) % {each} * {8 * dtype.itemsize}"
        if dtype is DType.float16:
            return f"unpackHalf2x16({bits} >> {shift}).x"
        if dtype is DType.bfloat16:
            return f"uintBitsToFloat({bits} >> ({shift}) << 16)"
        if dtype is DType.bool:
            return f"(bitfieldExtract({bits}, {shift}, 8) != 0u)"
        number = f"int({bits})" if dtype is not DType.uint8 else bits
        return f"int(bitfieldExtract({number}, {shift}, {8 * dtype.itemsize}))"

"""How the row kernels (reduce, softmax, norm) spread rows over a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Node, Size
from purevk.ir import dims as _dims
from purevk.lower.declared import Operand
from purevk.lower.numbers import power_of_two
from purevk.tuning import DeviceTraits

# Elements, or vec4s, of a row that one invocation takes where rows are many: else most invocations of
# its subgroup would be idle.
_SHORT = 8
# Iterations in which the invocations of a large workgroup join what they have of a row, and a few.
MOST_JOINS = 320


class RowWork(NamedTuple):
    """Who works on a row, and the workgroups.

    Attributes:
        macros: ROW_PER_SUBGROUP, ROW_PER_INVOCATION, SUBGROUP, LOCAL, CACHE, AHEAD (COLUMN and
            WIDTH of columns).
        local: invocations of a workgroup.
        rows: rows that a workgroup takes together.
        most: workgroups that are worth starting; 0: all. More rows are taken one after the other.
    """

    macros: dict[str, int]
    local: int
    rows: int
    most: int = 0

    def grid(self, rows: Size) -> tuple[Size, Size, Size]:
        groups = _dims.ceil_div(rows, self.rows)
        if self.most:
            groups = _dims.minimum(groups, self.most)
        if _dims.upper(groups) <= 65535:
            return (groups, 1, 1)
        return (_dims.minimum(groups, 65535), _dims.ceil_div(groups, 65535), 1)


def spread(
    traits: DeviceTraits,
    rows: Size,
    columns: Size,
    vector: bool,
    cache: bool = False,
    passes: Size = 1,
    short: bool = False,
) -> RowWork:
    """How `rows` of `columns` elements, `passes` of them, are worked on.

    Args:
        vector: rows are read as vec4.
        cache: the kernel can keep a row in registers.
        short: an invocation of a GPU may take a whole row.
    """
    count = _dims.upper(columns) // (4 if vector else 1)
    lanes = traits.subgroup_size
    shuffles = traits.has("subgroup_arithmetic", "subgroup_basic")
    if not traits.profile.needs_many_invocations and reads_alone(
        traits, (shuffles and -(-count // lanes)) or count, _dims.upper(passes)
    ):
        if shuffles and count >= lanes:
            local = 64 if _dims.upper(rows) >= 256 else 2 * lanes
            each = -(-count // lanes)
            macros = {"ROW_PER_SUBGROUP": 1, "LOCAL": local}
            return RowWork(_cached(macros, each, cache, 4), local, local // lanes)
        return RowWork({"ROW_PER_INVOCATION": 1, "LOCAL": 64}, 64, 64)
    if short and count <= _SHORT and _dims.upper(rows) >= 8 * lanes * traits.processors:
        macros = {"ROW_PER_INVOCATION": 1, "LOCAL": 4 * lanes}
        return RowWork(_cached(macros, count, cache), 4 * lanes, 4 * lanes)
    if shuffles and count <= 8 * lanes:
        # One row a workgroup while there are processors for it.
        each = _dims.upper(rows) // traits.processors
        local = lanes * (4 if each >= 4 else 2 if each >= 2 else 1)
        return RowWork(
            _cached({"ROW_PER_SUBGROUP": 1, "LOCAL": local}, -(-count // lanes), cache),
            local,
            local // lanes,
            traits.profile.max_workgroups_per_core * traits.processors,
        )
    local = min(256, traits.max_invocations)
    # The registers of a larger workgroup may hold a longer row; where rows are few, it has more
    # reads in flight.
    large = min(1024, traits.max_invocations)
    if 8 * local < count and (
        (cache and count <= 8 * large) or _dims.upper(rows) < 4 * traits.processors
    ):
        while local < large and local * 8 < count:
            local *= 2
    macros = {
        "SUBGROUP": int(shuffles),
        "LOCAL": local,
        "AHEAD": min(4, 1 << max(count // local, 1).bit_length() - 1),
    }
    return RowWork(_cached(macros, -(-count // local), cache), local, 1)


@dataclass(frozen=True)
class RowLoops:
    """The rows along a dim.

    Attributes:
        sizes: of the dims that address a row, innermost first.
        x_strides, out_strides: strides of these dims in x and in the result.
        length: elements of a row.
        x_step, out_step: distances of its neighbours in x and in the result.
    """

    sizes: list[Size]
    x_strides: list[Size]
    out_strides: list[Size]
    length: Size
    x_step: Size
    out_step: Size

    @classmethod
    def of(cls, x: Operand, out: Operand, dim: int) -> RowLoops:
        dims = [d for d in range(len(x.dims)) if d != dim]
        sizes, steps = collapse(
            *([numbers[d] for d in dims] for numbers in (x.dims, x.strides, out.strides))
        )
        x_strides, out_strides = (step[::-1] for step in steps)
        last = x.dims[dim], x.strides[dim], out.strides[dim]
        return cls(sizes[::-1], x_strides, out_strides, *last)

    @property
    def count(self) -> Size:
        return _dims.product(self.sizes)


def column_team(width: int, most: int, count: int, most_lanes: int) -> tuple[int, int]:
    """How many of `count` columns a workgroup of up to `most` invocations takes at once, `width` or
    more, and how many invocations, up to `most_lanes`, share each."""
    lanes = 1 << max(most // width, 1).bit_length() - 1
    while lanes > max(most_lanes, 1):
        lanes //= 2
    while width * lanes < 256 and width * lanes * 2 <= most and width < count:
        width *= 2
    return width, lanes


def reads_alone(traits: DeviceTraits, each: int, passes: int) -> bool:
    """Whether an invocation can read `each` elements `passes` times. Each pass has a few iterations
    more: for blocks of elements, for what is left of a batch, and to join with other invocations."""
    return passes * (each + each // 8 + 8) + 32 <= traits.max_iterations


def most_columns(traits: DeviceTraits, passes: int) -> int:
    """How long a row may be that a workgroup reads `passes` times."""
    each = max(traits.max_iterations - MOST_JOINS, 17) // passes
    return each * 8 // 9 * min(256, traits.max_invocations)


def spread_columns(
    traits: DeviceTraits, rows: Size, columns: Size, vector: bool, itemsize: int
) -> RowWork:
    """The same where neighbouring rows have neighbouring elements, for kernels with COLUMN that
    keep the `columns` elements of a row in registers, or else read ahead; of a vec4 each element is
    of another row."""
    each = 4 if vector else 1
    count, depth, bytes_ = -(-_dims.upper(rows) // each), _dims.upper(columns), itemsize * each
    if not traits.profile.has_fast_shared_memory:
        return RowWork(
            _cached({"COLUMN": 1, "ROW_PER_INVOCATION": 1, "LOCAL": 16, "AHEAD": 4}, depth, True),
            16,
            16,
        )
    room = min(1024, traits.max_invocations, traits.max_shared_memory // (8 * each))
    room = 1 << room.bit_length() - 1
    # Half a transaction's rows in registers are as good as a transaction's that are read twice.
    line = max(min(traits.profile.transaction_bytes // bytes_, 32), 1)
    width = line if depth * line <= 8 * room else max(line // 2, 1)
    if depth * width > 8 * room:
        return RowWork({"COLUMN": 1, "WIDTH": line, "LOCAL": room, "AHEAD": 8}, room, line)
    width, lanes = column_team(width, room, count, (2 * depth - 1) // 8)
    macros = {
        "COLUMN": 1,
        "LOCAL": width * lanes,
        **({"WIDTH": width} if lanes > 1 else {"ROW_PER_INVOCATION": 1}),
    }
    return RowWork(_cached(macros, -(-depth // lanes), True), width * lanes, width)


def _cached(macros: dict[str, int], each: int, cache: bool, limit: int = 8) -> dict[str, int]:
    if cache and 0 < each <= limit:
        macros["CACHE"] = power_of_two(each)
    return macros


def by_dim(
    name: str, sizes: Iterable[Size], dims: int | None = None, fill: int = 0
) -> dict[str, Size]:
    """Parameters `name`_0, `name`_1, ...: one for each of `sizes`. Where a template always declares
    `dims` of them, just so many: missing ones are `fill`, and further sizes are left out."""
    given = {f"{name}_{d}": size for d, size in enumerate(islice(sizes, dims))}
    return {f"{name}_{d}": fill for d in range(dims or 0)} | given


def in_one_row(sizes: Sequence[Size], strides: Sequence[Size], offset: Size) -> bool:
    """Whether what has these sizes lies in their order without gaps, so that 4 elements that follow
    one another, in one row of the innermost dim or two, are a vector of 4."""
    count: Size = 1
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if not _dims.same(stride, count):
            return False
        count = count * size
    return all(_dims.gcd_of(number) % 4 == 0 for number in (count, offset))


def next_coordinates(coordinates: Sequence[str], sizes: Sequence[str]) -> str:
    """GLSL that moves coordinates, the innermost last, to the next element."""
    text = ""
    for coordinate, size in zip(coordinates, sizes):
        text = f"{coordinate}++; " + (
            text and f"if ({coordinate} == {size}) {{ {coordinate} = 0; {text}}} "
        )
    return text


def collapse(
    sizes: Sequence[Size], *strides: Sequence[Size]
) -> tuple[list[Size], list[list[Size]]]:
    """Dims joined where they lie densely within one another for all operands, outermost first:
    sizes, and for each operand its strides."""
    merged: list[Size] = []
    steps: list[list[Size]] = [[] for _ in strides]
    for d, size in enumerate(sizes):
        if isinstance(size, int) and size == 1:
            continue
        mine = [stride[d] for stride in strides]
        if merged and all(step[-1] == size * inner for step, inner in zip(steps, mine)):
            merged[-1] = merged[-1] * size
            for step, inner in zip(steps, mine):
                step[-1] = inner
        else:
            merged.append(size)
            for step, inner in zip(steps, mine):
                step.append(inner)
    return merged, steps


def only_floats(node: Node, traits: DeviceTraits) -> str | None:
    """Why a node is refused by kernels of floating point numbers alone; None if it is not."""
    for value in (*node.inputs, *node.results):
        if value.type.dtype not in (DType.float32, DType.float16, DType.bfloat16, DType.float64):
            return f"no kernel for {value.type.dtype.name}"
    return None

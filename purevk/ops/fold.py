"""Statements of `purevk.map` that walk many elements for one of the result. Where a device would end
the loop, parts of it run side by side, and another loop of the same kind joins what they made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from purevk.dtypes import DType
from purevk.ir import Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.elements import acc_of
from purevk.lower.map import coordinates
from purevk.ops.builder import Builder
from purevk.ops.map import MapOptions, mapped_all
from purevk.shaders.code_size import loops_of_functions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SLACK = 32  # iterations of what is around the loops
_MOST_ELEMENTS = 2**20  # of the results of parts, unless a device asks for more parts
_STATE = {each.acc: each for each in (DType.int32, DType.int64, DType.float32, DType.float64)}


@dataclass(frozen=True)
class Loop:
    """A loop over `index`, from `first` on, below `last`.

    Attributes:
        most: iterations, at most.
        count: the same as a declaration of LOOPS.
        enter: statements at the start of each iteration. They may `continue`.
    """

    index: str
    first: str
    last: str
    most: Size
    count: str
    step: str = "1"
    enter: str = ""

    def around(self, text: str) -> str:
        """The loop with statements for each iteration."""
        index = self.index
        step = f"{index}++" if self.step == "1" else f"{index} += {self.step}"
        head = f"for (int {index} = {self.first}; {index} < {self.last}; {step})"
        return f"{head} {{ {self.enter} {text} }}"


@dataclass(frozen=True)
class Fold:
    """What happens to the elements that a result is made of. r, r1, ... are the state.

    Attributes:
        loops: the outermost first.
        step: statements that add the element at the indices of the loops to the state.
        join: statements that add the state v, v1, ... of what comes next.
        start: statements that set the state, before the loops.
        empty: the same for parts of the loops, if it differs: a state that adds nothing.
        before: statements before all of these.
        finish: statements after the loops.
        cost: iterations of a loop in `step`, at most.
    """

    loops: tuple[Loop, ...]
    step: str
    join: str = "r += v;"
    start: str = "r = T_R(0);"
    empty: str = ""
    before: str = ""
    finish: str = ""
    cost: Size = 0

    def text(self, cost: int) -> str:
        """The statements with the whole loops. `cost`: iterations of loops in `step`."""
        nested, text = str(cost), self.step
        for loop in reversed(self.loops):
            nested, text = f"loop({loop.count}, {nested})", loop.around(text)
        return f"{self.before} {self.start} LOOPS({nested}) {text} {self.finish}"

    def iterations(self, cost: int) -> int:
        """How many the loops have, at most."""
        for loop in reversed(self.loops):
            cost = _dims.upper(loop.most) * (1 + cost) + 1
        return cost

    def part(self, index: str, cost: int) -> str:
        """The statements with `each` iterations of the loops, which are counted as one: from number
        `index` times `each` on."""
        counts = [f"count_of_{loop.index}" for loop in self.loops]
        declared = " ".join(
            f"int {name} = STEPS_BETWEEN({loop.first}, {loop.last}, {loop.step});"
            for name, loop in zip(counts, self.loops)
        )
        outer, *inner = self.loops
        indices = " ".join(
            f"NEXT_INDEX({loop.index}, {loop.first}, {loop.step}, {name})"
            for name, loop in reversed([*zip(counts[1:], inner)])
        )
        indices += f" int {outer.index} = {outer.first} + rest * {outer.step};"
        enter = " ".join(loop.enter for loop in self.loops)
        return (
            f"{self.before} {self.empty or self.start} {declared} LOOPS(loop(each, {cost}))"
            f" PART_OF_LOOP({index}, each, {' * '.join(counts)})"
            f" {{ int rest = number; {indices} {enter} {self.step} }}"
        )


def folded(
    builder: Builder,
    fold: Fold,
    inputs: Mapping[str, Value],
    *results: TensorType,
    numbers: Mapping[str, Size] = {},
    **options: Unpack[MapOptions],
) -> tuple[Value, ...]:
    """Emits `purevk.map` for a `Fold`, whose loops may be of any length."""
    wide = any(type.dtype is DType.float64 for type in (*results, *_types(inputs)))
    cost = loops_of_functions(fold.step, double=wide) + _dims.upper(fold.cost)
    limit = builder.traits.max_iterations - _SLACK
    if fold.iterations(cost) <= limit:
        return mapped_all(builder, fold.text(cost), inputs, *results, numbers=numbers, **options)
    total = _dims.product(loop.most for loop in fold.loops)
    type = results[0]
    each = _share(_dims.upper(total), _dims.upper(type.numel), max(limit // (1 + cost) - 1, 1))
    parts = _dims.ceil_div(total, each)
    state = [
        TensorType(DType.float64 if wide and acc.is_float else acc, (*type.dims, parts))
        for acc in (_STATE[acc_of(result.dtype)] for result in results)
    ]
    rank = type.rank
    made = mapped_all(
        builder,
        fold.part(f"i{rank}", cost),
        inputs,
        *state,
        numbers={**numbers, "each": each},
    )
    names = [f"PART{n or ''}" for n in range(len(made))]
    at = coordinates(rank + 1, **{f"d{rank}": "part"})
    values = " ".join(
        f"{acc_of(value.type.dtype)} v{n or ''} = {name}({at});"
        for n, (name, value) in enumerate(zip(names, made))
    )
    count = f"part_size_{rank}"
    join = replace(
        fold,
        loops=(Loop("part", "0", count, parts, count),),
        step=f"{values} {fold.join}",
        cost=0,
    )
    return folded(builder, join, {**inputs, **dict(zip(names, made))}, *results, numbers=numbers)


def _types(inputs: Mapping[str, Value]) -> Sequence[TensorType]:
    return [value.type for value in inputs.values()]


def _share(total: int, results: int, most: int) -> int:
    """How many elements a part has: about as many as there are parts, unless that takes much memory."""
    each = max(math.isqrt(total), total * results // _MOST_ELEMENTS)
    return min(max(each, 1), most)

"""Lowers pointwise programs, and all copies of elements, to the template `pointwise.comp`.

The iteration follows the output's order in memory. Dims that are dense within one another for all
operands become one.

- If the innermost size is a multiple of 4, an invocation makes 4 neighbours.
- A GPU reads and writes one-byte elements as words. If all elements have one byte, an invocation makes
  16 neighbours: they share the index arithmetic, and all accesses have 16 bytes.
- If no vectors fit, an invocation of a GPU makes elements that are a workgroup's width apart.
- Inputs with neighbours along another dim go through tiles in shared memory (`transpose.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.lower.expression import Expression
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.operands import bound_parts, broadcast_strides
from purevk.lower.pointwise_writer import VECTOR, Writer, can_vectorize, is_aligned
from purevk.lower.rows import in_one_row
from purevk.lower.transpose import emit_transposed


def _collapse(
    sizes: Sequence[Size], strides: list[tuple[Size, ...]], output: int
) -> tuple[list[Size], list[list[Size]]]:
    order = [d for d, size in enumerate(sizes) if not _dims.same(size, 1)]
    order.sort(key=lambda d: -_dims.hint(strides[output][d]))
    merged: list[Size] = []
    steps: list[list[Size]] = []  # per loop dim, one stride per operand
    for d in order:
        mine = [operand[d] for operand in strides]
        if merged and all(_dims.same(o, sizes[d] * i) for o, i in zip(steps[-1], mine)):
            merged[-1] = merged[-1] * sizes[d]
            steps[-1] = mine
        else:
            merged.append(sizes[d])
            steps.append(mine)
    if not merged:
        merged, steps = [1], [[1 if n >= output else 0 for n in range(len(strides))]]
    return merged, steps


def emit_pointwise(
    lowering: Lowering,
    expression: Expression,
    inputs: Sequence[Operand],
    scalars: Sequence[Size],
    outputs: Sequence[Operand],
    label: str = "",
) -> None:
    """Appends the dispatch of a pointwise program, or several where a tensor is larger than one binding.
    All outputs have the same dims and strides."""
    sizes = outputs[0].dims
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return
    operands = [*inputs, *outputs]
    if any(map(lowering.is_large, operands)):
        parts = list(bound_parts(lowering, operands, sizes))
        lowering.in_parts = True
        for _, part in parts:
            some, made = part[: len(inputs)], part[len(inputs) :]
            emit_pointwise(lowering, expression, some, scalars, made, label)
        lowering.in_parts = False
        return
    strides = [broadcast_strides(operand, sizes) for operand in operands]
    loop, steps = _collapse(sizes, strides, len(inputs))
    if emit_transposed(lowering, expression, operands, len(inputs), loop, steps, scalars, label):
        return
    vector = can_vectorize(loop, steps, operands, len(inputs))
    follow = (
        not vector
        and lowering.items_per_thread(_dims.product(loop), 4) > 1
        and all(
            output.dtype in VECTOR and in_one_row(loop, [step[-1] for step in steps], output.offset)
            for output in outputs
        )
    )
    small = all(operand.dtype.itemsize <= 2 for operand in operands) and len(expression.steps) <= 8
    apart = (
        1 if vector or follow else lowering.items_per_thread(_dims.product(loop), 8 if small else 4)
    )
    traits = lowering.traits
    words = (vector or follow) and traits.profile.prefers_word_access
    least = traits.profile.min_invocations_per_core
    enough = _dims.upper(_dims.product(loop)) >= 16 * least * traits.processors
    wide = words and vector and enough and _only_bytes(loop, steps, operands, len(inputs))
    writer = Writer(
        expression, operands, len(inputs), loop, steps, vector, scalars, apart, words, wide, follow
    )
    count = _dims.product(loop)
    local = min(traits.profile.workgroup_size, traits.max_invocations)
    work = (
        _dims.ceil_div(count, 16 if wide else 4)
        if vector or follow
        else _dims.ceil_div(count, apart * local) * local
        if apart > 1
        else count
    )
    writer.finish(
        lowering,
        "elementwise/pointwise.comp",
        work,
        local,
        lowering.linear_grid(work, local),
        label,
    )


def _only_bytes(
    loop: list[Size], steps: list[list[Size]], operands: Sequence[Operand], first_output: int
) -> bool:
    """Whether 16 neighbours can be made together, and all that is read and written along the
    innermost dim are bytes."""
    if _dims.gcd_of(loop[-1]) % 16:
        return False
    for number, operand in enumerate(operands):
        inner = steps[-1][number]
        if number < first_output and isinstance(inner, int) and inner == 0:
            continue
        if operand.dtype.itemsize != 1 or not is_aligned(number, steps, operand, 16):
            return False
    return True

"""Functions of scores and masks as an `Expression`, for attention kernels. A second expression bounds the
mask: whether any query of a range may see any key of a range."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from purevk.dtypes import DType
from purevk.ir import Arg, Dim, Size, TensorType, Value
from purevk.lower.expression import Expression, ExpressionBuilder, Term, convert, literal
from purevk.ops import registry
from purevk.ops.attention.functions import (
    FULL,
    GATHER,
    INPUTS,
    SCORE,
    Functions,
    FunctionStep,
    Operand,
)
from purevk.ops.attention.mask_ranges import MaskRanges
from purevk.ops.elementwise.pointwise import expression_of

# A code size of each expression that compiles within seconds also on software devices.
MAX_CODE = 1000


@dataclass(frozen=True)
class ScoreProgram:
    """What an attention kernel computes of a score.

    Attributes:
        expression: of the score, the batch, the head, the query and the key. Its outputs are the new
            score, whether the key is seen, and what `bounds` reads. A step calls `pv_gather0(i, j)` for
            an element of buffer 0.
        bounds: of the first and the last query, the first and the last key, and further outputs of
            `expression`: whether any of these queries may see any of these keys. None: nothing is known.
        scored: whether the score changes.
        masked: whether keys may be unseen.
        exact: `bounds` is false only and always where no key is seen.
    """

    expression: Expression
    bounds: Expression | None
    scored: bool
    masked: bool
    exact: bool

    @property
    def code_size(self) -> int:
        """How much code the larger expression becomes (`shaders/code_size.py`)."""
        parts = (self.expression, self.bounds)
        return max(part.code_size for part in parts if part is not None)


def score_program(functions: Functions) -> tuple[ScoreProgram, tuple[Size, ...]]:
    """The program of a kernel, and the sizes that are its scalars. Positions have to be int32."""
    functions = _forbidden_as_mask(functions)
    builder = ExpressionBuilder()
    values = [
        Value(name, TensorType(functions.dtype(number), ())) for number, name in enumerate(INPUTS)
    ]
    terms = [builder.input(value, value.type.dtype) for value in values]
    for step in functions.steps:
        value = Value(f"step{len(values)}", TensorType(step.dtype, ()))
        terms.append(_term(builder, step, values, terms, value))
        values.append(value)
    score, mask = functions.score, functions.mask
    outputs = [
        terms[SCORE] if score is None else _as(builder, functions, terms, score, DType.float32),
        builder.step("true", [], DType.bool)
        if mask is None
        else _as(builder, functions, terms, mask, DType.bool),
    ]
    ranges = MaskRanges(functions)
    bounds, uniforms = ranges.bounds()
    expression = builder.build([*outputs, *(terms[number] for number in uniforms)])
    program = ScoreProgram(
        expression, bounds, score not in (None, SCORE), mask is not None, ranges.exact
    )
    return program, tuple(builder.scalars)


@functools.cache
def capped_scores(softcap: float) -> tuple[ScoreProgram, tuple[Size, ...]]:
    """The program of scores that become tanh(score / softcap) * softcap, and its sizes."""
    first = len(INPUTS)
    steps = (
        FunctionStep("aten.div.Scalar", DType.float32, (Operand(SCORE), softcap)),
        FunctionStep("aten.tanh.default", DType.float32, (Operand(first),)),
        FunctionStep("aten.mul.Scalar", DType.float32, (Operand(first + 1), softcap)),
    )
    return score_program(Functions(steps, first + 2, None, DType.int32))


def _as(
    builder: ExpressionBuilder,
    functions: Functions,
    terms: Sequence[Term],
    number: int,
    dtype: DType,
) -> Term:
    text = convert("$0", functions.dtype(number), dtype)
    return terms[number] if text == "$0" else builder.step(text, [terms[number]], dtype)


def _term(
    builder: ExpressionBuilder,
    step: FunctionStep,
    values: Sequence[Value],
    terms: Sequence[Term],
    result: Value,
) -> Term:
    if step.op == FULL:
        (number,) = step.args
        if isinstance(number, Dim):
            return builder.scalar(number, step.dtype)
        assert isinstance(number, (bool, int, float))
        return builder.step(literal(number, step.dtype), [], step.dtype)
    if step.op == GATHER:
        number, *indices = step.args
        found = [_index(builder, index, values, terms) for index in indices]
        names = ", ".join(f"${n}" for n in range(len(found)))
        return builder.step(f"pv_gather{number}({names})", found, step.dtype)
    definition = registry.find(step.op)
    assert definition is not None
    args = tuple(values[arg.number] if isinstance(arg, Operand) else arg for arg in step.args)
    made = expression_of(definition, args, [result])
    known = dict(zip(values, terms))
    operands = [known[value] for value in made.inputs]
    operands += [
        builder.scalar(size, dtype) for size, dtype in zip(made.scalars, made.expression.scalars)
    ]
    (term,) = builder.inline(made.expression, operands)
    return term


def _index(
    builder: ExpressionBuilder,
    index: Arg | Operand,
    values: Sequence[Value],
    terms: Sequence[Term],
) -> Term:
    if isinstance(index, Operand):
        text = convert("$0", values[index.number].type.dtype, DType.int32)
        term = terms[index.number]
        return term if text == "$0" else builder.step(text, [term], DType.int32)
    if isinstance(index, Dim):
        return builder.scalar(index, DType.int32)
    assert isinstance(index, int)
    return builder.step(literal(index, DType.int32), [], DType.int32)


def _forbidden_as_mask(functions: Functions) -> Functions:
    """A function of scores that chooses between a score and -inf says which keys are seen."""
    step = None if functions.score is None else functions.step(functions.score)
    if step is None or step.op != "aten.where.self":
        return functions
    condition, *choices = step.args
    forbids = [_is_minus_infinity(functions, choice) for choice in choices]
    if not isinstance(condition, Operand) or forbids not in ([False, True], [True, False]):
        return functions
    steps, count = list(functions.steps), len(INPUTS)
    seen = condition.number
    if forbids[0]:
        steps.append(FunctionStep("aten.logical_not.default", DType.bool, (Operand(seen),)))
        seen = len(steps) - 1 + count
    if functions.mask is not None:
        both = (Operand(functions.mask), Operand(seen))
        steps.append(FunctionStep("aten.logical_and.default", DType.bool, both))
        seen = len(steps) - 1 + count
    return replace(functions, steps=tuple(steps), mask=seen)


def _is_minus_infinity(functions: Functions, arg: object) -> bool:
    if isinstance(arg, Operand):
        step = functions.step(arg.number)
        return step is not None and step.op == FULL and step.args == (-float("inf"),)
    return arg == -float("inf")

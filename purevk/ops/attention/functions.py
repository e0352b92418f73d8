"""Functions of scores and masks, which users give to flex_attention, as programs of attention kernels.

A function is a tuple of steps, as a front end reads it: each is `(operator, dtype, arguments)`. The text
"$n" among the arguments is an operand: the score, the batch, the head, the query, the key, then the
steps. Operators are pointwise ones, and

- "gather": the element of a buffer, `(number of the buffer, index, ...)`, with one index per dim. Negative
  ones count from the end.
- "full": a number, or a size, which is int32.

For GLSL, the steps become an `Expression`. A second expression bounds the mask: whether any query of a
range may see any key of a range. It follows intervals of integers through the steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from purevk.dtypes import DType
from purevk.ir import Arg, Dim, Size, TensorType, Value
from purevk.lower.expression import Expression, ExpressionBuilder, Term, convert, literal
from purevk.ops import registry
from purevk.ops.elementwise.pointwise import expression_of
from purevk.ops.registry import ShapeError

GATHER, FULL = "gather", "full"
SCORE, BATCH, HEAD, QUERY, KEY = range(5)
_INPUTS = ("score", "batch", "head", "query", "key")
_INDICES = (DType.int32, DType.int64)
_DTYPES = (
    DType.bool,
    DType.uint8,
    DType.int8,
    DType.int16,
    *_INDICES,
    DType.float16,
    DType.bfloat16,
    DType.float32,
)
_TEXTS = ("none", "tanh", "floor", "trunc")  # arguments that choose one of several expressions
MAX_STEPS = 64
# A code size of each expression that compiles within seconds also on software devices.
MAX_CODE = 1000


@dataclass(frozen=True)
class FunctionStep:
    """A step of a function.

    Attributes:
        op: a pointwise operator, `GATHER` or `FULL`.
        dtype: of the result.
        args: all arguments of the operator; operands are `Operand`s.
    """

    op: str
    dtype: DType
    args: tuple[Arg | Operand, ...]


@dataclass(frozen=True)
class Operand:
    """The number of an operand: of an input, or of a step, counted from the inputs on."""

    number: int


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
        return max(each.code_size for each in parts if each is not None)


@dataclass(frozen=True)
class Functions:
    """The functions of scores and masks of one call.

    Attributes:
        steps: of both.
        score, mask: the operands that are their results, or None if there is no function.
        positions: the dtype of the batch, the head, the query and the key. Eager torch has int64.
    """

    steps: tuple[FunctionStep, ...]
    score: int | None
    mask: int | None
    positions: DType = DType.int64

    def dtype(self, number: int) -> DType:
        """Of an operand."""
        if number < len(_INPUTS):
            return DType.float32 if number == SCORE else self.positions
        return self.steps[number - len(_INPUTS)].dtype

    def step(self, number: int) -> FunctionStep | None:
        """The step of an operand; None for an input."""
        return self.steps[number - len(_INPUTS)] if number >= len(_INPUTS) else None


def operand(number: int) -> str:
    """An operand among the arguments of a step."""
    return f"${number}"


def read_functions(steps: Arg, score: Arg, mask: Arg, buffers: Sequence[TensorType]) -> Functions:
    """The functions that the arguments of a node have. Files are not trusted.

    Raises:
        ShapeError: a step is not as described above.
    """
    if not isinstance(steps, tuple):
        raise ShapeError("the steps of a function are no list")
    if len(steps) > MAX_STEPS:
        raise ShapeError(f"a function has {len(steps)} steps; {MAX_STEPS} are accepted")
    made: list[FunctionStep] = []
    for number, step in enumerate(steps):
        made.append(_read_step(step, number + len(_INPUTS), made, buffers))
    results: list[int | None] = []
    for name, result in (("score", score), ("mask", mask)):
        found = None if result is None else _reference(result, len(made) + len(_INPUTS))
        if result is not None and found is None:
            raise ShapeError(f"the {name} is {result!r}, which is no step")
        results.append(found)
    return Functions(tuple(made), results[0], results[1])


def _reference(arg: object, count: int) -> int | None:
    """The number of an operand below `count`; None if the argument is none."""
    if not isinstance(arg, str) or not re.fullmatch(r"\$[0-9]{1,4}", arg):
        return None
    number = int(arg[1:])
    if number >= count:
        raise ShapeError(f"a step reads {arg}, which comes after it")
    return number


def _read_step(
    step: Arg, count: int, before: Sequence[FunctionStep], buffers: Sequence[TensorType]
) -> FunctionStep:
    if not isinstance(step, tuple) or len(step) != 3:
        raise ShapeError("a step of a function is no list of three")
    op, dtype, args = step
    if not isinstance(op, str) or not isinstance(dtype, DType) or not isinstance(args, tuple):
        raise ShapeError("a step of a function is no operator, dtype and arguments")
    if dtype not in _DTYPES:
        raise ShapeError(f"{op} gives {dtype}")
    read = tuple(_argument(op, arg, count) for arg in args)
    if op == GATHER:
        inputs = [DType.float32, *(DType.int64,) * KEY]
        dtypes = inputs + [each.dtype for each in before]
        _check_gather(dtype, read, dtypes, buffers)
    elif op == FULL:
        known = len(read) == 1 and isinstance(read[0], (bool, int, float))
        size = len(read) == 1 and isinstance(read[0], Dim) and dtype is DType.int32
        if not known and not size:
            raise ShapeError(f"a function has a number that is {str(args)[:80]}")
    else:
        definition = registry.find(op)
        if definition is None or not isinstance(definition.form, registry.Pointwise):
            raise ShapeError(f"{op} is no pointwise operator")
        if len(read) != len(definition.parameters):
            raise ShapeError(f"{op} has {len(read)} arguments in a function")
    return FunctionStep(op, dtype, read)


def _argument(op: str, arg: Arg, count: int) -> Arg | Operand:
    number = _reference(arg, count)
    if number is not None:
        return Operand(number)
    if arg is None or isinstance(arg, (bool, int, float, Dim, DType)) or arg in _TEXTS:
        return arg
    raise ShapeError(f"{op} has the argument {str(arg)[:80]} in a function")


def _check_gather(
    dtype: DType,
    args: Sequence[Arg | Operand],
    dtypes: Sequence[DType],
    buffers: Sequence[TensorType],
) -> None:
    number, *indices = args or (None,)
    if not isinstance(number, int) or not 0 <= number < len(buffers):
        raise ShapeError(f"a function reads buffer {number!r}", why=f"there are {len(buffers)}")
    buffer = buffers[number]
    if buffer.dtype is not dtype or buffer.rank != len(indices):
        raise ShapeError(f"a function reads {buffer} as {dtype} by {len(indices)} indices")
    for index in indices:
        whole = isinstance(index, (int, Dim)) and not isinstance(index, bool)
        if isinstance(index, Operand):
            whole = dtypes[index.number] in _INDICES
        if not whole:
            raise ShapeError(f"a function has an index that is {index!r}")


# -- the program ---------------------------------------------------------------------------------
def score_program(functions: Functions) -> tuple[ScoreProgram, tuple[Size, ...]]:
    """The program of a kernel, and the sizes that are its scalars. Positions have to be int32."""
    functions = _forbidden_as_mask(functions)
    builder = ExpressionBuilder()
    values = [
        Value(name, TensorType(functions.dtype(number), ())) for number, name in enumerate(_INPUTS)
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
    ranges = _Ranges(functions)
    bounds, uniforms = ranges.bounds()
    expression = builder.build([*outputs, *(terms[number] for number in uniforms)])
    program = ScoreProgram(
        expression, bounds, score not in (None, SCORE), mask is not None, ranges.exact
    )
    return program, tuple(builder.scalars)


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
    steps, count = list(functions.steps), len(_INPUTS)
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


# -- bounds --------------------------------------------------------------------------------------
_Truth = Term | bool
_COMPARISONS = ("ge", "gt", "le", "lt", "eq", "ne")
# Sums of so many coordinates have a range below 2**31, since a tensor has less than 2**28 rows.
_MOST_COORDINATES = 8


@dataclass(frozen=True)
class _Interval:
    """Bounds of an integer, and how many coordinates it is a sum of."""

    low: Term
    high: Term
    dtype: DType
    coordinates: int


class _Ranges:
    """Follows ranges of queries and keys through functions."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self.builder = ExpressionBuilder()
        self.exact = True
        names = ("first_query", "last_query", "first_key", "last_key")
        self._corners = [
            self.builder.input(Value(name, TensorType(DType.int32, ())), DType.int32)
            for name in names
        ]
        self._uniforms: dict[int, Term] = {}
        # A step may read one step twice, which may do so too.
        self._truths: dict[int, tuple[_Truth, _Truth]] = {}
        self._intervals: dict[int, _Interval | None] = {}
        self._sure: _Truth = True
        self._varies = [number in (SCORE, QUERY, KEY) for number in range(len(_INPUTS))]
        for step in functions.steps:
            read = [arg.number for arg in step.args if isinstance(arg, Operand)]
            self._varies.append(any(self._varies[number] for number in read))

    def bounds(self) -> tuple[Expression | None, list[int]]:
        """See `ScoreProgram.bounds`, and the operands that it reads."""
        if self.functions.mask is None:
            return None, []
        may, _ = self._truth(self.functions.mask)
        may = self._or(may, self._not(self._sure))
        if isinstance(may, bool):
            return None, []
        return self.builder.build([may]), list(self._uniforms)

    def _step(self, glsl: str, *operands: Term, dtype: DType = DType.bool) -> Term:
        return self.builder.step(glsl, operands, dtype)

    def _and(self, one: _Truth, other: _Truth) -> _Truth:
        if isinstance(one, bool):
            return other if one else False
        if isinstance(other, bool):
            return one if other else False
        return self._step("($0 && $1)", one, other)

    def _or(self, one: _Truth, other: _Truth) -> _Truth:
        return self._not(self._and(self._not(one), self._not(other)))

    def _not(self, one: _Truth) -> _Truth:
        return not one if isinstance(one, bool) else self._step("(!$0)", one)

    def _uniform(self, number: int) -> Term:
        if number not in self._uniforms:
            dtype = self.functions.dtype(number)
            value = Value(f"uniform{len(self._uniforms)}", TensorType(dtype, ()))
            self._uniforms[number] = self.builder.input(value, dtype)
        return self._uniforms[number]

    def _truth(self, number: int) -> tuple[_Truth, _Truth]:
        """Whether a condition may hold, and whether it must hold."""
        if number not in self._truths:
            self._truths[number] = self._follow_truth(number)
        return self._truths[number]

    def _follow_truth(self, number: int) -> tuple[_Truth, _Truth]:
        step = self.functions.step(number)
        if self.functions.dtype(number) is DType.bool and step is not None:
            name = step.op.split(".")[1] if "." in step.op else step.op
            if step.op == FULL:
                return bool(step.args[0]), bool(step.args[0])
            if not self._varies[number]:
                return self._uniform(number), self._uniform(number)
            operands = [arg.number for arg in step.args if isinstance(arg, Operand)]
            if name in ("bitwise_and", "logical_and", "bitwise_or", "logical_or") and all(
                self.functions.dtype(each) is DType.bool for each in operands
            ):
                join = self._and if name.endswith("and") else self._or
                if len(operands) == 2:
                    (may, must), (other_may, other_must) = map(self._truth, operands)
                    return join(may, other_may), join(must, other_must)
            if name in ("bitwise_not", "logical_not") and (
                self.functions.dtype(operands[0]) is DType.bool
            ):
                may, must = self._truth(operands[0])
                return self._not(must), self._not(may)
            if name in _COMPARISONS:
                ranges = [self._interval(arg) for arg in step.args[:2]]
                if ranges[0] is not None and ranges[1] is not None:
                    return self._compared(name, ranges[0], ranges[1])
        self.exact = False
        return True, False

    def _compared(self, name: str, one: _Interval, other: _Interval) -> tuple[_Truth, _Truth]:
        if name == "ne":
            may, must = self._compared("eq", one, other)
            return self._not(must), self._not(may)
        dtype = DType.int64 if DType.int64 in (one.dtype, other.dtype) else DType.int32
        low, high = self._wide(one.low, one.dtype, dtype), self._wide(one.high, one.dtype, dtype)
        first, last = (self._wide(each, other.dtype, dtype) for each in (other.low, other.high))
        if name == "eq":
            return (
                self._step("($0 <= $3 && $2 <= $1)", low, high, first, last),
                self._step("($0 == $1 && $2 == $3 && $0 == $2)", low, high, first, last),
            )
        sign = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}[name]
        text = f"($0 {sign} $1)"
        if sign[0] == ">":
            return self._step(text, high, first), self._step(text, low, last)
        return self._step(text, low, last), self._step(text, high, first)

    def _wide(self, term: Term, source: DType, target: DType) -> Term:
        text = convert("$0", source, target)
        return term if text == "$0" else self._step(text, term, dtype=target)

    def _interval(self, arg: Arg | Operand) -> _Interval | None:
        """Bounds of an integer; None if they are not known."""
        if isinstance(arg, int) and not isinstance(arg, bool):
            dtype = DType.int32 if -(2**31) < arg < 2**31 else DType.int64
            term = self._step(literal(arg, dtype), dtype=dtype)
            return _Interval(term, term, dtype, 0)
        if not isinstance(arg, Operand):
            return None
        if arg.number not in self._intervals:
            self._intervals[arg.number] = self._follow_interval(arg.number)
        return self._intervals[arg.number]

    def _follow_interval(self, number: int) -> _Interval | None:
        dtype = self.functions.dtype(number)
        if dtype not in _INDICES:
            return None
        if not self._varies[number]:
            term = self._uniform(number)
            return _Interval(term, term, dtype, 0)
        if number in (QUERY, KEY):
            at = 2 * (number - QUERY)
            return _Interval(self._corners[at], self._corners[at + 1], dtype, 1)
        step = self.functions.step(number)
        if step is None or "." not in step.op:
            return None
        name = step.op.split(".")[1]
        ranges = [self._interval(each) for each in step.args[:2]]
        if not ranges or ranges[0] is None:
            return None
        if name == "_to_copy":
            low, high = (
                self._wide(each, ranges[0].dtype, dtype) for each in (ranges[0].low, ranges[0].high)
            )
            narrows = dtype is DType.int32 and ranges[0].dtype is DType.int64
            return None if narrows else replace(ranges[0], low=low, high=high, dtype=dtype)
        if name == "abs" and dtype is DType.int32:
            low = self._step(
                "max(0, max($0, -$1))", ranges[0].low, ranges[0].high, dtype=DType.int32
            )
            high = self._step("max(-$0, $1)", ranges[0].low, ranges[0].high, dtype=DType.int32)
            # -(-2**31) wraps around.
            sure = self._step("($0 > -2147483647)", ranges[0].low)
            self._sure = self._and(self._sure, sure)
            return _Interval(low, high, dtype, _MOST_COORDINATES)
        if len(ranges) < 2 or ranges[1] is None:
            return None
        if name in ("add", "sub") and step.args[2] == 1:
            return self._sum(ranges[0], ranges[1], dtype, "+" if name == "add" else "-")
        floors = name == "floor_divide" or (name == "div" and step.args[2:] == ("floor",))
        divisor = step.args[1]
        if floors and isinstance(divisor, int) and divisor > 0:
            ends = []
            for each in (ranges[0].low, ranges[0].high):
                end = self._wide(each, ranges[0].dtype, dtype)
                by = self._step(literal(divisor, dtype), dtype=dtype)
                ends.append(self._step("pv_floor_divide($0, $1)", end, by, dtype=dtype))
            return _Interval(ends[0], ends[1], dtype, ranges[0].coordinates)
        return None

    def _sum(self, one: _Interval, other: _Interval, dtype: DType, sign: str) -> _Interval | None:
        coordinates = one.coordinates + other.coordinates
        if coordinates > _MOST_COORDINATES:
            return None
        first, last = (other.low, other.high) if sign == "+" else (other.high, other.low)
        low, high = (
            self._step(
                f"($0 {sign} $1)",
                self._wide(mine, one.dtype, dtype),
                self._wide(its, other.dtype, dtype),
                dtype=dtype,
            )
            for mine, its in ((one.low, first), (one.high, last))
        )
        # Sums wrap around. Bounds of which only one has wrapped say nothing.
        self._sure = self._and(self._sure, self._step("($0 <= $1)", low, high))
        return _Interval(low, high, dtype, coordinates)

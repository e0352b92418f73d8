"""Functions of scores and masks, which users give to flex_attention, as steps.

A function is a tuple of steps, as a front end reads it: each is `(operator, dtype, arguments)`. The text
"$n" among the arguments is an operand: the score, the batch, the head, the query, the key, then the
steps. Operators are pointwise ones, and

- "gather": the element of a buffer, `(number of the buffer, index, ...)`, with one index per dim. Negative
  ones count from the end.
- "full": a number, or a size, which is int32.

`score_program.py` makes an `Expression` of the steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.ir import Arg, Dim, TensorType
from purevk.ops import registry
from purevk.ops.registry import ShapeError

GATHER, FULL = "gather", "full"
SCORE, BATCH, HEAD, QUERY, KEY = range(5)
INPUTS = ("score", "batch", "head", "query", "key")
INDICES = (DType.int32, DType.int64)
_DTYPES = (
    DType.bool,
    DType.uint8,
    DType.int8,
    DType.int16,
    *INDICES,
    DType.float16,
    DType.bfloat16,
    DType.float32,
)
_TEXTS = ("none", "tanh", "floor", "trunc")  # arguments that choose one of several expressions
MAX_STEPS = 64


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
        if number < len(INPUTS):
            return DType.float32 if number == SCORE else self.positions
        return self.steps[number - len(INPUTS)].dtype

    def step(self, number: int) -> FunctionStep | None:
        """The step of an operand; None for an input."""
        return self.steps[number - len(INPUTS)] if number >= len(INPUTS) else None


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
        made.append(_read_step(step, number + len(INPUTS), made, buffers))
    results: list[int | None] = []
    for name, result in (("score", score), ("mask", mask)):
        found = None if result is None else _reference(result, len(made) + len(INPUTS))
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
            whole = dtypes[index.number] in INDICES
        if not whole:
            raise ShapeError(f"a function has an index that is {index!r}")

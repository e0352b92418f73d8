"""Numbers of a program: arithmetic on sizes, and numbers that operators give.

A number is a Python number, a `Dim`, a `Relation` of sizes, or a tensor of one element that an
operator gives (`Importer.numbers`). An integer in such a tensor is a symbol where its value is
needed. Nothing here asks Python for the truth of a number that is known only at a call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from purevk.dtypes import DType
from purevk.errors import UnsupportedProgramError
from purevk.frontends.importer import Importer
from purevk.ir import Arg, Dim, Relation, TensorType, Value, polynomials
from purevk.ir import dims as _dims
from purevk.ir.relations import as_size


class _Operator(NamedTuple):
    """What a step of arithmetic is: on sizes, and on tensors of one element."""

    of_sizes: Callable[..., Any]
    of_tensors: str = ""


def _power(base: Any, exponent: Any) -> Any:
    is_fraction = isinstance(exponent, int) and exponent < 0 and not isinstance(base, Dim)
    if is_fraction or isinstance(base, float) or isinstance(exponent, float):
        return base**exponent
    return _dims.power(base, exponent)


_OPERATORS = {
    "+": _Operator(operator.add, "aten.add.Tensor"),
    "-": _Operator(operator.sub, "aten.sub.Tensor"),
    "*": _Operator(operator.mul, "aten.mul.Tensor"),
    "//": _Operator(operator.floordiv, "aten.floor_divide.default"),
    "%": _Operator(operator.mod, "aten.remainder.Tensor"),
    "/": _Operator(operator.truediv, "aten.div.Tensor"),
    "**": _Operator(_power, "aten.pow.Tensor_Tensor"),
    "<<": _Operator(lambda left, right: left * _dims.power(2, right)),
    ">>": _Operator(lambda left, right: left // _dims.power(2, right)),
    "neg": _Operator(operator.neg, "aten.neg.default"),
    "abs": _Operator(lambda size: _dims.maximum(size, -size), "aten.abs.default"),
    "max": _Operator(_dims.maximum, "aten.maximum.default"),
    "min": _Operator(_dims.minimum, "aten.minimum.default"),
    "&": _Operator(_dims.bitwise_and, "aten.logical_and.default"),
    "|": _Operator(_dims.bitwise_or, "aten.logical_or.default"),
    "^": _Operator(lambda a, b: _dims.bitwise_or(a, b) - _dims.bitwise_and(a, b)),
    "not": _Operator(operator.not_, "aten.logical_not.default"),
    "==": _Operator(operator.eq, "aten.eq.Tensor"),
    "!=": _Operator(operator.ne, "aten.ne.Tensor"),
    "<": _Operator(operator.lt, "aten.lt.Tensor"),
    "<=": _Operator(operator.le, "aten.le.Tensor"),
    ">": _Operator(operator.gt, "aten.gt.Tensor"),
    ">=": _Operator(operator.ge, "aten.ge.Tensor"),
}
RELATIONS = ("==", "!=", "<", "<=", ">", ">=")
_LOGIC = ("&", "|", "not")
# The types of numbers that operators give.
NUMBERS = {
    bool: TensorType(DType.bool, ()),
    int: TensorType(DType.int64, ()),
    float: TensorType(DType.float64, ()),
}
_AT_CALL = (Dim, Relation)


def kind_of(example: Any) -> type | None:
    """bool, int or float for a number, symbolic ones included; None for a tensor."""
    import torch

    for kind, symbolic in ((bool, torch.SymBool), (int, torch.SymInt), (float, torch.SymFloat)):
        if isinstance(example, (kind, symbolic)):
            return kind
    return None


def leaves(examples: Any) -> Iterator[Any]:
    """The results that are not None, in order, also those in lists."""
    if isinstance(examples, (list, tuple)):
        for example in examples:
            yield from leaves(example)
    elif examples is not None:
        yield examples


def of_sizes(op: str, *args: Any) -> Any:
    """One step of arithmetic on sizes and truth values. Raises `ShapeError` if the result is larger
    than numbers of programs are."""
    if op == "same":
        return args[0]
    if not any(isinstance(arg, _AT_CALL) for arg in args):
        if not all(isinstance(arg, (int, float, complex)) for arg in args):
            raise TypeError(f"{op} takes numbers, and there are {args!r}")
        result = _OPERATORS[op].of_sizes(*args)
        return polynomials.bounded(result) if isinstance(result, int) else result
    if op == "not":
        return ~args[0] if isinstance(args[0], Relation) else Relation(args[0], "==", 0)
    sizes = [as_size(arg) for arg in args]
    if op in RELATIONS:
        return Relation(sizes[0], op, sizes[1])
    if op in _LOGIC and all(isinstance(arg, (bool, Relation)) for arg in args):
        join = _dims.minimum if op == "&" else _dims.maximum
        return Relation(join(*sizes), "!=", 0)
    return _OPERATORS[op].of_sizes(*sizes)


def item(
    importer: Importer,
    tensor: Value,
    source: str,
    lower: int | None = None,
    upper: int | None = None,
) -> Value | Dim | int:
    """The number in a tensor of one element: a symbol for an integer, else the tensor without dims.

    Args:
        lower, upper: bounds of the integer, see `Importer.element`.
    """
    if tensor.type.dtype is DType.bool:
        lower, upper = 0, 1
    if not tensor.type.dtype.is_float:
        return importer.element(tensor, 0, lower, upper)
    if tensor.type.rank:
        tensor = importer.emit("aten.view.default", (tensor, ()), [], [], source)[0]
    importer.numbers.add(tensor)
    return tensor


def arithmetic(importer: Importer, op: str, args: Sequence[Any], source: str) -> Any:
    """One step of arithmetic on numbers."""
    fractional = op == "/" or any(isinstance(arg, float) for arg in args)
    fractional |= op == "**" and isinstance(args[1], int) and args[1] < 0
    at_call = any(isinstance(arg, (Value, *_AT_CALL)) for arg in args)
    if op == "same" or not at_call:
        return of_sizes(op, *args)
    if not fractional and not any(isinstance(arg, Value) for arg in args):
        return of_sizes(op, *args)
    name = _OPERATORS[op].of_tensors
    if not name:
        raise UnsupportedProgramError(
            f"{op} of {args[0]!r} and {args[-1]!r} cannot be followed",
            where=f"{importer.where}, {source}",
            why="it takes integers, and one of them is another number",
        )
    if fractional or op in _LOGIC or not isinstance(args[0], Value):
        args = [as_tensor(importer, arg, source) for arg in args]
    result = importer.emit(name, tuple(args), [], [], source)[0]
    importer.numbers.add(result)
    return result


def selected(importer: Importer, condition: Any, if_true: Any, if_false: Any, source: str) -> Any:
    """`if_true` if the condition holds, else `if_false`."""
    if isinstance(condition, (bool, int)):
        return if_true if condition else if_false
    if not any(isinstance(branch, (float, Value)) for branch in (if_true, if_false)):
        if isinstance(condition, Value):
            condition = importer.element(condition, 0, 0, 1)
        sizes = as_size(condition), as_size(if_true), as_size(if_false)
        size = sizes[2] + sizes[0] * (sizes[1] - sizes[2])
        truths = all(isinstance(branch, (bool, Relation)) for branch in (if_true, if_false))
        return Relation(size, "!=", 0) if truths else size
    args = [as_tensor(importer, operand, source) for operand in (condition, if_true, if_false)]
    result = importer.emit("aten.where.self", tuple(args), [], [], source)[0]
    importer.numbers.add(result)
    return result


def as_tensor(importer: Importer, number: Any, source: str) -> Value:
    """A number as a tensor of one element: a truth value in bool, others in float64."""
    if isinstance(number, Value):
        return number
    kind = bool if isinstance(number, (bool, Relation)) else float
    return importer.number(as_size(number), NUMBERS[kind], source)


def whole(
    importer: Importer,
    op: str,
    number: Value,
    source: str,
    lower: int | None = None,
    hint: int | None = None,
) -> Dim | int:
    """A float, rounded to an integer by an operator such as "aten.trunc.default".

    Args:
        lower: its least value, if it has one. hint: what it was in the trace.
    """
    rounded = importer.emit(op, (number,), [], [], source)[0]
    integer = importer.cast(rounded, DType.int64, source)
    lower = -_dims.UNBOUNDED if lower is None else lower
    return importer.element(integer, 0, lower, hint=hint)


def function(importer: Importer, op: str, number: Arg, source: str) -> Value:
    """A function of a number, such as its square root."""
    tensor = as_tensor(importer, number, source)
    converted = importer.emit(op, (tensor,), [NUMBERS[float]], [False], source)[0]
    importer.numbers.add(converted)
    return converted


def steps(importer: Importer, start: Any, end: Any, step: Any, source: str) -> Value:
    """How many steps there are between two numbers, as a float."""
    span = arithmetic(importer, "-", (end, start), source)
    return as_tensor(importer, arithmetic(importer, "/", (span, step), source), source)


def in_steps(importer: Importer, start: Any, step: Any, type: TensorType, source: str) -> Value:
    """Numbers from `start` on by `step`, of which one is a number that an operator gives."""
    floats = type.dtype.is_float
    wide = type.with_dtype(DType.float64 if floats else DType.int64)
    counted = importer.emit(
        "aten.arange.default", (type.dims[0],), [type.with_dtype(DType.int64)], [False], source
    )[0]
    for name, number, neutral in (("aten.mul.Tensor", step, 1), ("aten.add.Tensor", start, 0)):
        if isinstance(number, (int, float)) and number == neutral:
            continue
        number = importer.cast(as_tensor(importer, number, source), wide.dtype, source)
        counted = importer.emit(name, (counted, number), [wide], [False], source)[0]
    return importer.cast(counted, type.dtype, source)

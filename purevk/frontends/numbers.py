"""Numbers of a program: arithmetic on sizes, and numbers that operators give.

A number that an operator gives is a tensor of one element in the graph (`Importer.numbers`). An
integer in such a tensor is a symbol where its value is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.errors import UnsupportedProgramError
from purevk.frontends.importer import Importer
from purevk.ir import Arg, Dim, TensorType, Value
from purevk.ir import dims as _dims

_SIZES: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "neg": operator.neg, "same": lambda value: value, "max": _dims.maximum, "min": _dims.minimum,
    "/": operator.truediv, "**": operator.pow,
}  # fmt: skip
_TENSORS = {
    "+": "aten.add.Tensor",
    "-": "aten.sub.Tensor",
    "*": "aten.mul.Tensor",
    "/": "aten.div.Tensor",
    "==": "aten.eq.Tensor",
    "!=": "aten.ne.Tensor",
    "<": "aten.lt.Tensor",
    "<=": "aten.le.Tensor",
    ">": "aten.gt.Tensor",
    ">=": "aten.ge.Tensor",
    "//": "aten.floor_divide.default",
    "%": "aten.remainder.Tensor",
    "neg": "aten.neg.default",
    "max": "aten.maximum.default",
    "min": "aten.minimum.default",
    "**": "aten.pow.Tensor_Tensor",
}
RELATIONS = ("==", "!=", "<", "<=", ">", ">=")
# The types of numbers that operators give.
NUMBERS = {
    bool: TensorType(DType.bool, ()),
    int: TensorType(DType.int64, ()),
    float: TensorType(DType.float64, ()),
}


def of_sizes(op: str, *args: Any) -> Any:
    """One step of arithmetic on sizes."""
    return _SIZES[op](*args)


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
    """One step of arithmetic on numbers: sizes, or tensors of one element."""
    if op == "same" or not any(isinstance(arg, (Value, Dim)) for arg in args):
        return of_sizes(op, *args)
    if op == "**" and isinstance(args[1], int) and args[1] >= 0 and isinstance(args[0], Dim):
        return _dims.product([args[0]] * args[1])
    fractional = op in ("/", "**") or any(isinstance(arg, float) for arg in args)
    if not fractional and not any(isinstance(arg, Value) for arg in args):
        return of_sizes(op, *args)
    if op == "**" and isinstance(args[1], Dim):
        raise UnsupportedProgramError(
            f"a power of {args[1]} cannot be followed", where=f"{importer.where}, {source}"
        )
    if fractional or not isinstance(args[0], Value):
        args = [as_tensor(importer, arg, source) for arg in args]
    result = importer.emit(_TENSORS[op], tuple(args), [], [], source)[0]
    importer.numbers.add(result)
    return result


def as_tensor(importer: Importer, number: Arg, source: str) -> Value:
    """A number as a tensor of one element. A size or a float is float64."""
    if isinstance(number, Value):
        return number
    made = importer.emit(
        "aten.full.default",
        ((), number, DType.float64, None, None, None),
        [NUMBERS[float]],
        [False],
        source,
    )[0]
    importer.numbers.add(made)
    return made


def function(importer: Importer, op: str, number: Arg, source: str) -> Value:
    """A function of a number, such as its square root."""
    tensor = as_tensor(importer, number, source)
    made = importer.emit(op, (tensor,), [NUMBERS[float]], [False], source)[0]
    importer.numbers.add(made)
    return made

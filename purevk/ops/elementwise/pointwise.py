"""Pointwise operators. Each has a name and an expression of GLSL.

`x`, `y` and `z` are tensors (or numbers), other names are parameters. `ACC(c)` is a literal of the
computing type. What GLSL lacks, or has with fewer digits (`pv_erf`, `pv_exp`, ...), is in
`glsl/core/math.glslh`. Booleans are computed as the integers 0 and 1, and integers of 8 and 16 bits as
32-bit ones, whose result is wrapped around.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from purevk.dtypes import DType
from purevk.errors import GraphError
from purevk.ir import Arg, Dim, Scalar, Size, TensorType, Value
from purevk.lower.expression import (
    ROUND,
    Expression,
    ExpressionBuilder,
    Term,
    convert,
    literal,
)
from purevk.lower.numbers import rounded
from purevk.ops.facts import Moves
from purevk.ops.promotion import float_type, real_dtype, result_type
from purevk.ops.registry import Operator, Pointwise, register
from purevk.ops.shapes import broadcast_of

NAME = "purevk.pointwise"

Params = Mapping[str, Scalar | str | None]  # names and defaults
# "promote", "float", "first", "result" or "as is" (see `Pointwise`), a dtype, or a function of the
# arguments that gives one of these.
Compute = str | DType | Callable[..., str | DType]


def _define(
    name: str,
    glsl: str | Callable[..., str],
    tensors: str,
    params: Params,
    compute: Compute,
    out: DType | str | None,
    names: Sequence[str],
    arithmetic: str,
    moves: Moves | None = None,
) -> None:
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(tensor, keyword) for tensor in tensors]
    parameters += [
        inspect.Parameter(each, keyword, default=default) for each, default in params.items()
    ]
    register(pointwise_operator(name, glsl, parameters, compute, out, names, arithmetic, moves))


def pointwise_operator(
    name: str,
    glsl: str | Callable[..., str],
    parameters: Sequence[inspect.Parameter],
    compute: Compute,
    out: DType | str | None,
    names: Sequence[str],
    arithmetic: str = "",
    moves: Moves | None = None,
) -> Operator:
    """The definition of a pointwise operator. Of its parameters `x`, `y` and `z` are tensors (or
    numbers).

    `out`: the result's dtype; None for the computing type, "dtype" for that of the parameter of
    this name, "real" for that of the parts of complex numbers. `arithmetic`: see `Pointwise`.
    """
    tensors = [parameter.name for parameter in parameters if parameter.name in "xyz"]
    params = [parameter.name for parameter in parameters if parameter.name not in "xyz"]

    def shape(**arguments: Any) -> TensorType:
        operands = [arguments[name] for name in tensors]
        sizes = broadcast_of(operands)
        if isinstance(out, DType):
            return TensorType(out, sizes)
        if out == "dtype" and arguments.get("dtype") is not None:
            return TensorType(arguments["dtype"], sizes)
        # Tensors among the parameters are promoted too, such as the bounds of clamp.
        further = [arguments[name] for name in params if isinstance(arguments[name], TensorType)]
        made = _computing(compute, [*operands, *further], operands, arguments)
        return TensorType(real_dtype(made) if out == "real" else made, sizes)

    shape.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    form = Pointwise(glsl, compute, arithmetic)
    return Operator(name, shape, form, names=tuple(names), moves=moves)


def _computing(
    compute: Compute,
    promoted: Sequence[Any],
    tensors: Sequence[Any],
    arguments: Mapping[str, Any],
) -> DType:
    """The dtype in which an operator computes.

    Args:
        compute: as the definition says it.
        promoted: the operands of the type promotion.
        tensors: operands, the first tensor of which gives the dtype for "first".
        arguments: all arguments, by name.
    """
    if callable(compute):
        compute = compute(**arguments)
    if isinstance(compute, DType):
        return compute
    if compute == "first":
        return next(operand.dtype for operand in tensors if isinstance(operand, TensorType))
    dtype = result_type(promoted)
    return float_type(dtype) if compute == "float" else dtype


def unary(
    name: str,
    glsl: str | Callable[..., str],
    *names: str,
    params: Params | None = None,
    compute: Compute = "promote",
    out: DType | str | None = None,
    arithmetic: str = "",
    moves: Moves | None = None,
) -> None:
    """A function of `x`; `arithmetic` as in `Pointwise`, `moves` as in `Operator`."""
    _define(name, glsl, "x", params or {}, compute, out, names, arithmetic, moves)


def binary(
    name: str,
    glsl: str | Callable[..., str],
    *names: str,
    params: Params | None = None,
    compute: Compute = "promote",
    out: DType | str | None = None,
    arithmetic: str = "",
) -> None:
    """A function of `x` and `y`, either of which may be a number; `arithmetic` as in `Pointwise`."""
    _define(name, glsl, "xy", params or {}, compute, out, names, arithmetic)


class PointwiseProgram(NamedTuple):
    """A pointwise program, the tensors that it reads, and its numbers that only a call knows."""

    expression: Expression
    inputs: tuple[Value, ...]
    scalars: tuple[Size, ...]


def expression_of(
    definition: Operator, args: tuple[Arg, ...], results: Sequence[Value]
) -> PointwiseProgram:
    """The program of one application of a pointwise operator."""
    form = definition.form
    if not isinstance(form, Pointwise):
        raise GraphError(f"{definition.name} is no pointwise operator")
    arguments = definition.bind(args)
    types = {name: arg.type if isinstance(arg, Value) else arg for name, arg in arguments.items()}
    out = results[0].type.dtype
    if form.compute == "result":
        computing = out
    else:
        operands = [types[name] for name in definition.parameters if name in "xyz"]
        extra = [
            value
            for name, value in types.items()
            if name not in "xyz" and isinstance(value, TensorType)
        ]
        computing = _computing(
            form.compute, [*operands, *extra], [value for value in types.values()], arguments
        )
    text = (
        form.glsl if isinstance(form.glsl, str) else form.glsl(**{**arguments, "dtype": computing})
    )
    if computing is DType.bool and not re.fullmatch(r"[\w ?:()]*", text):
        computing = DType.int32
    builder = ExpressionBuilder()
    terms: dict[str, Term] = {}
    texts: dict[str, str] = {}
    for name, arg in arguments.items():
        keep = name == "cond" or form.compute == "as is"
        if isinstance(arg, Value):
            source = arg.type.dtype
            joined = name in form.arithmetic and source is computing
            term = builder.input(arg, source) if joined else builder.rounded_input(arg)
        elif isinstance(arg, Dim):
            terms[name] = (
                builder.scalar(arg, DType.int32) if keep else builder.number(arg, computing)
            )
            continue
        else:
            if isinstance(arg, (int, float, bool)):
                if computing in ROUND and name in "xyz" and name not in form.arithmetic:
                    arg = rounded(arg, computing)  # as torch does, for comparisons and the like
                texts[name] = literal(arg, computing)
            continue
        terms[name] = term if keep else _converted(builder, term, source, computing)
    text = re.sub(r"\bACC\(([^()]*)\)", lambda match: _acc(match[1], arguments, computing), text)
    operands_used: list[Term] = []

    def substitute(match: re.Match[str]) -> str:
        name = match[0]
        if name not in terms:
            if name in arguments and name not in texts:
                raise GraphError(
                    f"{definition.name} is given {arguments[name]!r} for {name!r}",
                    why="its expression needs a tensor or a number",
                )
            return texts.get(name, name)
        if terms[name] not in operands_used:
            operands_used.append(terms[name])
        return f"${operands_used.index(terms[name])}"

    text = re.sub(r"\b[A-Za-z_]\w*\b", substitute, text)
    # A file may declare another dtype for a condition.
    is_condition = _is_bool_text(text) and (
        out is DType.bool or definition.infer(args)[0].dtype is DType.bool
    )
    native = DType.bool if is_condition else computing
    if text == "$0":
        result = operands_used[0]
    else:
        if definition.of_user:  # an error of the compiler shows the operator beside its text
            text = f"{text} /* {definition.name} */"
        result = builder.step(text, operands_used, native, definition.name.split(".")[1])
    if text != "$0" and native in (DType.uint8, DType.int8, DType.int16):
        result = builder.step(convert("$0", DType.int32, native), [result], native)
    if native is not out:
        result = _converted(builder, result, native, out)
    if form.compute == "as is" and out in ROUND:
        result = builder.rounded(result, out)
    return PointwiseProgram(builder.build([result]), tuple(builder.inputs), tuple(builder.scalars))


def _acc(text: str, arguments: Mapping[str, Any], dtype: DType) -> str:
    """The GLSL of `ACC(text)`: a number, or the argument of this name."""
    if text in arguments:
        at_call = isinstance(arguments[text], (Value, Dim))
        return text if at_call else literal(arguments[text], dtype)
    return literal(float(text) if dtype.is_float else int(float(text)), dtype)


def _is_bool_text(text: str) -> bool:
    """Whether an expression of GLSL is a condition by itself."""
    return "?" not in text and bool(
        re.search(r"[<>=!]=|[<>]|&&|\|\||\^\^|\bpv_is(nan|inf)\b|^!|^(true|false)$", text)
    )


def _converted(builder: ExpressionBuilder, term: Term, source: DType, target: DType) -> Term:
    text = convert("$0", source, target)
    made = term if text == "$0" else builder.step(text, [term], target)
    # Integers of 8 bits are numbers of both.
    return builder.rounded(made, target) if source.is_int and source.itemsize > 1 else made

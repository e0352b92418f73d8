"""Operators on one element at a time: a name and an expression of GLSL each.

`x`, `y` and `z` are tensors (or numbers), other names are parameters. `ACC(c)` is a literal of the
computing type. What GLSL lacks, or has with fewer digits (`pv_erf`, `pv_exp`, ...), is in
`glsl/core/math.glslh`. Booleans are computed as the integers 0 and 1, and integers of 8 and 16 bits as
32-bit ones, whose result is wrapped around.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Dim, TensorType, Value
from purevk.lower.expression import Expression, ExpressionBuilder, convert, literal
from purevk.ops.promotion import float_type, result_type
from purevk.ops.registry import Operator, Pointwise, register
from purevk.ops.shapes import broadcast_of

NAME = "purevk.pointwise"


def _row(
    name: str,
    glsl: str | Callable[..., str],
    tensors: str,
    params: dict[str, Any],
    compute: str | DType,
    out: DType | str | None,
    names: Sequence[str],
) -> None:
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(each, keyword) for each in tensors]
    parameters += [
        inspect.Parameter(each, keyword, default=default) for each, default in params.items()
    ]
    register(operator_row(name, glsl, parameters, compute, out, names))


def operator_row(
    name: str,
    glsl: str | Callable[..., str],
    parameters: Sequence[inspect.Parameter],
    compute: str | DType,
    out: DType | str | None,
    names: Sequence[str],
) -> Operator:
    """The row of a pointwise operator. Of its parameters `x`, `y` and `z` are tensors (or numbers).

    `out`: the result's dtype; None for the computing type, "dtype" for that of the parameter of
    this name.
    """
    tensors = [each.name for each in parameters if each.name in "xyz"]
    params = [each.name for each in parameters if each.name not in "xyz"]

    def shape(**arguments: Any) -> TensorType:
        operands = [arguments[name] for name in tensors]
        sizes = broadcast_of(operands)
        if isinstance(out, DType):
            return TensorType(out, sizes)
        if out == "dtype" and arguments.get("dtype") is not None:
            return TensorType(arguments["dtype"], sizes)
        return TensorType(
            _computing(compute, [*operands, *_numbers(arguments, params)], operands, arguments),
            sizes,
        )

    shape.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    return Operator(name, shape, Pointwise(glsl, compute), names=tuple(names))


def _numbers(arguments: dict[str, Any], params: Sequence[str]) -> list[Any]:
    """Parameters that take part in type promotion: the tensors and numbers of clamp, say, but no
    rounding mode."""
    return [arguments[name] for name in params if isinstance(arguments[name], TensorType)]


def _computing(
    compute: Any, promoted: Sequence[Any], tensors: Sequence[Any], arguments: dict[str, Any]
) -> DType:
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
    params: dict[str, Any] | None = None,
    compute: str | DType = "promote",
    out: DType | str | None = None,
) -> None:
    """A function of `x`."""
    _row(name, glsl, "x", params or {}, compute, out, names)


def binary(
    name: str,
    glsl: str | Callable[..., str],
    *names: str,
    params: dict[str, Any] | None = None,
    compute: str | DType = "promote",
    out: DType | str | None = None,
) -> None:
    """A function of `x` and `y`, either of which may be a number."""
    _row(name, glsl, "xy", params or {}, compute, out, names)


def expression_of(
    row: Operator, args: tuple[Any, ...], results: Sequence[Value]
) -> tuple[Expression, tuple, tuple]:
    """The expression of one application of a pointwise row, with its tensors and its scalars known
    at a call."""
    form = row.form
    assert isinstance(form, Pointwise)
    arguments = row.bind(args)
    types = {name: arg.type if isinstance(arg, Value) else arg for name, arg in arguments.items()}
    out = results[0].type.dtype
    if form.compute == "result":
        computing = out
    else:
        operands = [types[name] for name in row.parameters if name in "xyz"]
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
    refs: dict[str, tuple] = {}
    texts: dict[str, str] = {}
    for name, arg in arguments.items():
        if isinstance(arg, Value):
            source = arg.type.dtype
            ref = builder.input(arg, source)
        elif isinstance(arg, Dim):
            source = DType.int32
            ref = builder.scalar(arg, source)
        else:
            if isinstance(arg, (int, float, bool)):
                texts[name] = literal(arg, computing)
            continue
        keep = name == "cond" or form.compute == "as is"
        refs[name] = ref if keep else _converted(builder, ref, source, computing)
    text = re.sub(r"\bACC\(([^()]*)\)", lambda match: _acc(match[1], arguments, computing), text)
    order: list[tuple] = []

    def place(match: re.Match) -> str:
        name = match[0]
        if name in refs:
            if refs[name] not in order:
                order.append(refs[name])
            return f"${order.index(refs[name])}"
        return texts.get(name, name)

    text = re.sub(r"\b[A-Za-z_]\w*\b", place, text)
    native = DType.bool if out is DType.bool and _is_bool_text(text) else computing
    result = builder.step(text, order, native, row.name.split(".")[1]) if text != "$0" else order[0]
    if text != "$0" and native in (DType.uint8, DType.int8, DType.int16):
        result = builder.step(convert("$0", DType.int32, native), [result], native)
    if native is not out:
        result = _converted(builder, result, native, out)
    expression = builder.build([result])
    return expression, tuple(builder.inputs), tuple(builder.scalars)


def _acc(text: str, arguments: dict[str, Any], dtype: DType) -> str:
    value = (
        arguments[text]
        if text in arguments
        else float(text)
        if dtype.is_float
        else int(float(text))
    )
    return literal(value, dtype)


def _is_bool_text(text: str) -> bool:
    """Whether an expression of GLSL is a condition by itself."""
    return "?" not in text and bool(
        re.search(r"[<>=!]=|[<>]|&&|\|\||\^\^|\bpv_is(nan|inf)\b|^!|^(true|false)$", text)
    )


def _converted(builder: ExpressionBuilder, ref: tuple, source: DType, target: DType) -> tuple:
    text = convert("$0", source, target)
    return ref if text == "$0" else builder.step(text, [ref], target)


# -- functions of real numbers -------------------------------------------------------------------
for _name, _glsl in {
    "exp": "pv_exp(x)", "expm1": "pv_expm1(x)", "log": "pv_log(x)", "log2": "pv_log2(x)", "log1p": "pv_log1p(x)",
    "log10": "pv_log10(x)", "sqrt": "sqrt(x)", "rsqrt": "inversesqrt(x)", "reciprocal": "(ACC(1) / x)",
    "sigmoid": "pv_sigmoid(x)", "tanh": "pv_tanh(x)", "sin": "pv_sin(x)", "cos": "pv_cos(x)", "tan": "pv_tan(x)",
    "asin": "pv_asin(x)", "acos": "pv_acos(x)", "atan": "pv_atan(x)", "sinh": "pv_sinh(x)", "cosh": "pv_cosh(x)",
    "asinh": "pv_asinh(x)", "acosh": "pv_acosh(x)", "atanh": "pv_atanh(x)", "erf": "pv_erf(x)",
}.items():  # fmt: skip
    unary(f"aten.{_name}.default", _glsl, compute="float")


def _gelu(approximate: str, **_: Any) -> str:
    return "pv_gelu_tanh(x)" if approximate == "tanh" else "pv_gelu(x)"


unary("aten.gelu.default", _gelu, params={"approximate": "none"})
unary("aten.silu.default", "pv_silu(x)")
unary(
    "aten.softplus.default",
    "pv_softplus(x, ACC(beta), ACC(threshold))",
    params={"beta": 1.0, "threshold": 20.0},
)
unary(
    "aten.elu.default",
    "pv_elu(x, ACC(alpha), ACC(scale), ACC(input_scale))",
    params={"alpha": 1.0, "scale": 1.0, "input_scale": 1.0},
)

# -- functions of any number ----------------------------------------------------------------------


def _only_float(text: str, otherwise: str = "x") -> Callable[..., str]:
    return lambda dtype, **_: text if dtype.is_float else otherwise


unary(
    "aten.abs.default",
    lambda dtype, **_: "(x < ACC(0) ? -x : x)" if dtype is DType.int64 else "abs(x)",
)
unary("aten.neg.default", "(-x)")
unary("aten.sign.default", "(x > ACC(0) ? ACC(1) : x < ACC(0) ? ACC(-1) : ACC(0))")
unary("aten.floor.default", _only_float("floor(x)"))
unary("aten.ceil.default", _only_float("ceil(x)"))
unary("aten.trunc.default", _only_float("trunc(x)"))
unary("aten.round.default", _only_float("roundEven(x)"))
unary(
    "aten.square.default",
    "(x * x)",
    compute=lambda x, **_: result_type((x if isinstance(x, TensorType) else x.type, 2)),
)
unary("aten.relu.default", "pv_max(x, ACC(0))")
unary("aten.relu6.default", "pv_clamp(x, ACC(0), ACC(6))")
unary(
    "aten.hardtanh.default",
    "pv_clamp(x, ACC(min_val), ACC(max_val))",
    params={"min_val": -1.0, "max_val": 1.0},
)
unary("aten.hardsigmoid.default", "(pv_clamp(x + ACC(3), ACC(0), ACC(6)) / ACC(6))")
unary("aten.hardswish.default", "(x * pv_clamp(x + ACC(3), ACC(0), ACC(6)) / ACC(6))")
unary(
    "aten.hardshrink.default",
    "(x >= ACC(-0.0) - ACC(lambd) && x <= ACC(lambd) ? ACC(0) : x)",
    params={"lambd": 0.5},
)
unary(
    "aten.leaky_relu.default",
    "(x > ACC(0) ? x : x * ACC(negative_slope))",
    params={"negative_slope": 0.01},
)
unary("aten.isnan.default", _only_float("pv_isnan(x)", "false"), out=DType.bool)
unary("aten.isinf.default", _only_float("pv_isinf(x)", "false"), out=DType.bool)
unary("aten.logical_not.default", "(x == ACC(0))", out=DType.bool)
unary("aten.bitwise_not.default", lambda dtype, **_: "(1 - x)" if dtype is DType.bool else "(~x)")
unary(
    "aten.alias.default",
    "x",
    "aten.alias_copy.default",
    "aten.clone.default",
    "aten.detach.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
    "dim_order_ops._clone_dim_order.default",
    params={"memory_format": None, "dim_order": None},
)


def _copy_shape(
    x: TensorType,
    dtype: DType | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: Any = False,
    memory_format: Any = None,
) -> TensorType:
    return x.with_dtype(dtype or x.dtype)


register(
    Operator(
        "aten._to_copy.default",
        _copy_shape,
        Pointwise("x", "as is"),
        names=("dim_order_ops._to_dim_order_copy.default", "aten.to.dtype"),
    )
)

# -- two operands ---------------------------------------------------------------------------------


def _scaled(sign: str) -> Callable[..., str]:
    return lambda alpha, **_: f"(x {sign} y)" if alpha == 1 else f"(x {sign} y * ACC(alpha))"


def _divide(rounding_mode: str | None, dtype: DType, **_: Any) -> str:
    if rounding_mode == "floor":
        return "pv_floor_divide(x, y)"
    if rounding_mode == "trunc":
        return "pv_trunc_divide(x, y)"
    return "pv_quotient(x, y)"


binary("aten.add.Tensor", _scaled("+"), "aten.add.Scalar", params={"alpha": 1})
binary("aten.sub.Tensor", _scaled("-"), "aten.sub.Scalar", params={"alpha": 1})
binary(
    "aten.rsub.Scalar",
    lambda alpha, **_: "(y - x)" if alpha == 1 else "(y - x * ACC(alpha))",
    "aten.rsub.Tensor",
    params={"alpha": 1},
)


def _multiply(x: Any, y: Any, dtype: DType, **_: Any) -> str:
    # Compilers take x * 0 for 0, also where x is infinite or NaN.
    vanishes = dtype.is_float and isinstance(y, (int, float)) and y == 0
    return (
        "(pv_isnan(x) || pv_isinf(x) ? PV_NAN : pv_copysign(ACC(0), x))" if vanishes else "(x * y)"
    )


binary("aten.mul.Tensor", _multiply, "aten.mul.Scalar")
binary(
    "aten.div.Tensor",
    "pv_quotient(x, y)",
    "aten.div.Scalar",
    "aten.true_divide.Tensor",
    compute="float",
)
binary(
    "aten.div.Tensor_mode",
    _divide,
    "aten.div.Scalar_mode",
    params={"rounding_mode": None},
    compute=lambda rounding_mode, **_: "promote" if rounding_mode else "float",
)
binary("aten.floor_divide.default", lambda dtype, **_: _divide("floor", dtype))
binary("aten.fmod.Tensor", "pv_fmod(x, y)", "aten.fmod.Scalar")
binary("aten.remainder.Tensor", "pv_remainder(x, y)", "aten.remainder.Scalar")
binary("aten.maximum.default", "pv_max(x, y)")
binary("aten.minimum.default", "pv_min(x, y)")
binary("aten.atan2.default", "pv_atan2(x, y)", compute="float")


def _pow(y: Any, dtype: DType, **_: Any) -> str:
    known = {
        2: "(x * x)",
        3: "(x * x * x)",
        1: "x",
        0.5: "sqrt(x)",
        -1: "(ACC(1) / x)",
        -0.5: "inversesqrt(x)",
    }
    if (
        isinstance(y, (int, float))
        and not isinstance(y, bool)
        and y in known
        and (dtype.is_float or y in (1, 2, 3))
    ):
        return known[y]
    return "pv_pow(x, y)"


binary("aten.pow.Tensor_Tensor", _pow, "aten.pow.Tensor_Scalar", "aten.pow.Scalar")

for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    binary(f"aten.{_name}.Tensor", f"(x {_sign} y)", f"aten.{_name}.Scalar", out=DType.bool)
for _name, _sign in {"and": "&&", "or": "||", "xor": "^^"}.items():
    binary(
        f"aten.logical_{_name}.default", f"((x != ACC(0)) {_sign} (y != ACC(0)))", out=DType.bool
    )
for _name, _sign in {"and": "&", "or": "|", "xor": "^"}.items():
    binary(f"aten.bitwise_{_name}.Tensor", f"(x {_sign} y)", f"aten.bitwise_{_name}.Scalar")


def _clamp(min: Any, max: Any, dtype: DType, **_: Any) -> str:
    text = "x" if min is None else "pv_max(x, min)"
    return text if max is None else f"pv_min({text}, max)"


def _clamp_shape(x: TensorType, min: Any = None, max: Any = None) -> TensorType:
    operands = [operand for operand in (x, min, max) if operand is not None]
    return TensorType(result_type(operands), broadcast_of(operands))


register(
    Operator(
        "aten.clamp.default",
        _clamp_shape,
        Pointwise(_clamp, "result"),
        names=("aten.clamp.Tensor",),
    )
)


def _where_shape(cond: TensorType, x: Any, y: Any) -> TensorType:
    return TensorType(result_type((x, y)), broadcast_of((cond, x, y)))


register(
    Operator(
        "aten.where.self",
        _where_shape,
        Pointwise("(cond ? x : y)", "result"),
        names=("aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar"),
    )
)


def _masked_fill_shape(x: TensorType, cond: TensorType, y: Any) -> TensorType:
    return TensorType(x.dtype, broadcast_of((x, cond)))


register(
    Operator(
        "aten.masked_fill.Scalar",
        _masked_fill_shape,
        Pointwise("(cond ? y : x)", "result"),
        names=("aten.masked_fill.Tensor",),
    )
)

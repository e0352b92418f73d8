"""The pointwise operators of torch, by a name and an expression of GLSL; see `pointwise`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeGuard

from purevk.dtypes import DType
from purevk.ir import Arg, Scalar, TensorType, Value
from purevk.lower.expression import (
    ROUND,
    is_zero,
    literal,
    times_zero,
)
from purevk.lower.numbers import rounded
from purevk.ops.elementwise.pointwise import binary, unary
from purevk.ops.facts import Moves
from purevk.ops.promotion import result_type
from purevk.ops.registry import Pointwise, define
from purevk.ops.shapes import broadcast_of
from purevk.ops.signatures import signature

# -- functions of real numbers -------------------------------------------------------------------
for _name, _glsl in {
    "exp": "pv_exp(x)", "expm1": "pv_expm1(x)", "log": "pv_log(x)", "log2": "pv_log2(x)", "log1p": "pv_log1p(x)",
    "log10": "pv_log10(x)", "sqrt": "pv_sqrt(x)", "rsqrt": "pv_rsqrt(x)", "reciprocal": "pv_quotient(ACC(1), x)",
    "tanh": "pv_tanh(x)", "sin": "pv_sin(x)", "cos": "pv_cos(x)", "tan": "pv_tan(x)",
    "asin": "pv_asin(x)", "acos": "pv_acos(x)", "atan": "pv_atan(x)", "sinh": "pv_sinh(x)", "cosh": "pv_cosh(x)",
    "asinh": "pv_asinh(x)", "acosh": "pv_acosh(x)", "atanh": "pv_atanh(x)", "erf": "pv_erf(x)",
}.items():  # fmt: skip
    unary(f"aten.{_name}.default", _glsl, compute="float", arithmetic="x")


def _gelu(approximate: str, dtype: DType, **_: object) -> str:
    if approximate == "tanh":
        return "pv_gelu_tanh(x)"
    return "pv_gelu_half(x)" if dtype.itemsize == 2 else "pv_gelu(x)"


unary("aten.gelu.default", _gelu, params={"approximate": "none"}, arithmetic="x")


def _of_16_bits(name: str) -> Callable[..., str]:
    """A function that has a faster form for results of 16 bits."""
    return lambda dtype, **_: f"pv_{name}{'_half' * (dtype.itemsize == 2)}(x)"


unary("aten.sigmoid.default", _of_16_bits("sigmoid"), compute="float", arithmetic="x")
unary("aten.silu.default", _of_16_bits("silu"), arithmetic="x")
unary(
    "aten.softplus.default",
    "pv_softplus(x, ACC(beta), ACC(threshold))",
    params={"beta": 1.0, "threshold": 20.0},
    arithmetic="x",
)
unary(
    "aten.elu.default",
    "pv_elu(x, ACC(alpha), ACC(scale), ACC(input_scale))",
    params={"alpha": 1.0, "scale": 1.0, "input_scale": 1.0},
    arithmetic="x",
)

# -- functions of any number ----------------------------------------------------------------------


def _only_float(text: str, otherwise: str = "x") -> Callable[..., str]:
    return lambda dtype, **_: text if dtype.is_float else otherwise


unary(
    "aten.abs.default",
    lambda dtype, **_: "(x < ACC(0) ? -x : x)" if dtype is DType.int64 else "abs(x)",
    out="real",
    arithmetic="x",
)
unary("aten.neg.default", "(-x)", arithmetic="x")
unary("aten.sign.default", "(x > ACC(0) ? ACC(1) : x < ACC(0) ? ACC(-1) : ACC(0))")
unary("aten.floor.default", _only_float("floor(x)"))
unary("aten.ceil.default", _only_float("ceil(x)"))
unary("aten.trunc.default", _only_float("pv_trunc(x)"))
unary("aten.round.default", _only_float("pv_round(x)"))
unary(
    "aten.square.default",
    "(x * x)",
    compute=lambda x, **_: result_type((x if isinstance(x, TensorType) else x.type, 2)),
    arithmetic="x",
)
unary("aten.relu.default", _only_float("pv_relu(x)", "pv_max(x, ACC(0))"), arithmetic="x")
unary("aten.relu6.default", "pv_clamp(x, ACC(0), ACC(6))", arithmetic="x")
unary(
    "aten.hardtanh.default",
    "pv_clamp(x, ACC(min_val), ACC(max_val))",
    params={"min_val": -1.0, "max_val": 1.0},
    arithmetic="x",
)
unary(
    "aten.hardsigmoid.default",
    "(pv_clamp(x + ACC(3), ACC(0), ACC(6)) / ACC(6))",
    arithmetic="x",
)
unary(
    "aten.hardswish.default",
    "(x * pv_clamp(x + ACC(3), ACC(0), ACC(6)) / ACC(6))",
    arithmetic="x",
)


def _hardshrink(lambd: Arg, dtype: DType, **_: object) -> str:
    edge = "lambd"
    if isinstance(lambd, (int, float)):
        edge = literal(rounded(lambd, dtype) if dtype in ROUND else lambd, dtype)
    return f"(x >= ACC(-0.0) - {edge} && x <= {edge} ? ACC(0) : x)"


unary("aten.hardshrink.default", _hardshrink, params={"lambd": 0.5})
unary(
    "aten.leaky_relu.default",
    "(x > ACC(0) ? x : x * ACC(negative_slope))",
    params={"negative_slope": 0.01},
    arithmetic="x",
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
    arithmetic="x",
    moves=Moves.IN_ORDER,
)


@signature(
    "x, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, "
    "memory_format=None"
)
def _copy_shape(x: TensorType, dtype: DType | None) -> TensorType:
    return x.with_dtype(dtype or x.dtype)


define(
    "aten._to_copy.default",
    _copy_shape,
    Pointwise("x", "as is"),
    names=("dim_order_ops._to_dim_order_copy.default", "aten.to.dtype"),
)

# -- two operands ---------------------------------------------------------------------------------


def is_factor_zero(factor: Arg, dtype: DType) -> TypeGuard[float]:
    """Whether a product with a number is 0 or NaN, which compilers take for 0 alone."""
    return dtype.is_float and isinstance(factor, (int, float)) and is_zero(factor, dtype)


def zero_times(dtype: DType, operand: str, zero: float = 0.0) -> str:
    """GLSL for 0 times an operand, which is NaN if that is infinite or NaN."""
    text = times_zero(dtype).replace("$0", operand)
    return f"(-{text})" if math.copysign(1.0, zero) < 0 else text


def _scaled(sign: str, x: str = "x", y: str = "y") -> Callable[..., str]:
    """`x + alpha * y`, or `-`."""

    def write(alpha: Arg, dtype: DType, **_: object) -> str:
        if is_factor_zero(alpha, dtype):
            return f"({x} {sign} {zero_times(dtype, y, alpha)})"
        is_one = isinstance(alpha, (int, float)) and alpha == 1
        return f"({x} {sign} {y})" if is_one else f"({x} {sign} {y} * ACC(alpha))"

    return write


_HALVES = {DType.float16: "float16", DType.bfloat16: "bfloat16"}


def _divide(rounding_mode: str | None, dtype: DType, y: Arg, **_: object) -> str:
    """In half precision, torch rounds each step of a division by a tensor, and none of a division
    by a number."""
    half = _HALVES.get(dtype) if isinstance(y, Value) and y.type.rank else None
    divisor = literal(y, dtype) if isinstance(y, (int, float)) else "y"
    if rounding_mode == "floor":
        return f"fn_floor_divide_{half}(x, y)" if half else f"pv_floor_divide(x, {divisor})"
    if rounding_mode == "trunc":
        if half:
            return f"pv_trunc(pv_round_{half}(pv_quotient(x, y)))"
        return f"pv_trunc_divide(x, {divisor})"
    return f"pv_quotient(x, {divisor})"


binary("aten.add.Tensor", _scaled("+"), "aten.add.Scalar", params={"alpha": 1}, arithmetic="xy")
binary("aten.sub.Tensor", _scaled("-"), "aten.sub.Scalar", params={"alpha": 1}, arithmetic="xy")
binary(
    "aten.rsub.Scalar",
    _scaled("-", "y", "x"),
    "aten.rsub.Tensor",
    params={"alpha": 1},
    arithmetic="xy",
)


def _multiply(x: Arg, y: Arg, dtype: DType, **_: object) -> str:
    if not is_factor_zero(y, dtype):
        return "(x * y)"
    return zero_times(dtype, "x", y)


binary("aten.mul.Tensor", _multiply, "aten.mul.Scalar", arithmetic="xy")
binary(
    "aten.div.Tensor",
    "pv_quotient(x, y)",
    "aten.div.Scalar",
    "aten.true_divide.Tensor",
    compute="float",
    arithmetic="xy",
)
binary(
    "aten.div.Tensor_mode",
    _divide,
    "aten.div.Scalar_mode",
    params={"rounding_mode": None},
    compute=lambda rounding_mode, **_: "promote" if rounding_mode else "float",
)
binary("aten.floor_divide.default", lambda y, dtype, **_: _divide("floor", dtype, y))
binary("aten.fmod.Tensor", "pv_fmod(x, y)", "aten.fmod.Scalar")
binary(
    "aten.remainder.Tensor",
    "pv_remainder(x, y)",
    "aten.remainder.Scalar",
    "aten.remainder.Scalar_Tensor",
)
# Of two zeros, torch takes the second.
binary("aten.maximum.default", "pv_max(y, x)", arithmetic="xy")
binary("aten.minimum.default", "pv_min(y, x)", arithmetic="xy")
binary("aten.atan2.default", "pv_atan2(x, y)", compute="float", arithmetic="xy")


def _pow(x: Arg, y: Arg, dtype: DType, **_: object) -> str:
    if dtype in ROUND and isinstance(x, (int, float)):
        return f"pv_pow({literal(rounded(x, dtype), dtype)}, y)"
    known = {
        2: "(x * x)",
        3: "(x * x * x)",
        1: "x",
        0.5: "pv_sqrt(x)",
        -1: "pv_quotient(ACC(1), x)",
        -0.5: "pv_rsqrt(x)",
    }
    if (
        isinstance(y, (int, float))
        and not isinstance(y, bool)
        and y in known
        and (dtype.is_float or y in (1, 2, 3))
    ):
        return known[y]
    return "pv_pow(x, y)"


# A base below 0 has a power only if the exponent is a whole number.
binary("aten.pow.Tensor_Tensor", _pow, "aten.pow.Tensor_Scalar", "aten.pow.Scalar", arithmetic="x")

for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    binary(f"aten.{_name}.Tensor", f"(x {_sign} y)", f"aten.{_name}.Scalar", out=DType.bool)
for _name, _sign in {"and": "&&", "or": "||", "xor": "^^"}.items():
    binary(
        f"aten.logical_{_name}.default", f"((x != ACC(0)) {_sign} (y != ACC(0)))", out=DType.bool
    )
for _name, _sign in {"and": "&", "or": "|", "xor": "^"}.items():
    _names = [f"aten.bitwise_{_name}.{each}" for each in ("Tensor", "Scalar", "Scalar_Tensor")]
    binary(_names[0], f"(x {_sign} y)", *_names[1:])


def _clamp(min: Arg, max: Arg, dtype: DType, **_: object) -> str:
    text = "x" if min is None else "pv_max(x, min)"
    return text if max is None else f"pv_min({text}, max)"


def _clamp_shape(
    x: TensorType, min: TensorType | Scalar | None = None, max: TensorType | Scalar | None = None
) -> TensorType:
    operands = [operand for operand in (x, min, max) if operand is not None]
    return TensorType(result_type(operands), broadcast_of(operands))


define(
    "aten.clamp.default",
    _clamp_shape,
    Pointwise(_clamp, "result", "x"),
    names=("aten.clamp.Tensor",),
)


def _where_shape(cond: TensorType, x: TensorType | Scalar, y: TensorType | Scalar) -> TensorType:
    return TensorType(result_type((x, y)), broadcast_of((cond, x, y)))


define(
    "aten.where.self",
    _where_shape,
    Pointwise("(cond ? x : y)", "result", "xy"),
    moves=Moves.TENSORS,
    names=("aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar"),
)


def _masked_fill_shape(x: TensorType, cond: TensorType, y: TensorType | Scalar) -> TensorType:
    return TensorType(x.dtype, broadcast_of((x, cond)))


define(
    "aten.masked_fill.Scalar",
    _masked_fill_shape,
    Pointwise("(cond ? y : x)", "result", "xy"),
    names=("aten.masked_fill.Tensor",),
)

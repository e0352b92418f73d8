"""Less common pointwise operators."""

from __future__ import annotations

from collections.abc import Callable

from purevk.dtypes import DType
from purevk.ir import Arg, Node, Scalar, TensorType, Value
from purevk.lower.expression import ROUND, literal
from purevk.lower.numbers import rounded
from purevk.ops.builder import Builder
from purevk.ops.elementwise.operators import is_factor_zero, zero_times
from purevk.ops.elementwise.pointwise import binary, unary
from purevk.ops.promotion import float_type, result_type
from purevk.ops.registry import Pointwise, ShapeError, define, rewrite
from purevk.ops.shapes import broadcast_of, wrap

ROUNDED = "purevk.rounded"  # x as memory holds it, see `passes/rounding.py`
DIVIDED, ROOT = "purevk.divided", "purevk.root"  # to the nearest float32 on every device

# -- functions of real numbers --------------------------------------------------------------------
for _name, (_glsl, *_names) in {
    "erfc": ("pv_erfc(x)", "aten.special_erfc.default"), "erfinv": ("pv_erfinv(x)", "aten.special_erfinv.default"),
    "lgamma": ("pv_lgamma(x)", "aten.special_gammaln.default"),
    "digamma": ("pv_digamma(x)", "aten.special_digamma.default", "aten.special_psi.default"),
    "exp2": ("pv_exp2(x)", "aten.special_exp2.default"), "sinc": ("pv_sinc(x)", "aten.special_sinc.default"),
    "deg2rad": ("(x * ACC(0.017453292519943295))",), "rad2deg": ("(x * ACC(57.29577951308232))",),
}.items():  # fmt: skip
    unary(f"aten.{_name}.default", _glsl, *_names, compute="float", arithmetic="x")


def _logit(eps: float | None, dtype: DType, **_: object) -> str:
    if eps is None:
        return "pv_logit(x)"
    low, high = "ACC(eps)", "ACC(1) - ACC(eps)"
    if dtype in ROUND:
        least = rounded(eps, dtype)
        low, high = (literal(each, dtype) for each in (least, rounded(1 - least, dtype)))
    return f"pv_logit(pv_clamp(x, {low}, {high}))"


unary(
    "aten.logit.default",
    _logit,
    "aten.special_logit.default",
    params={"eps": None},
    compute="float",
    arithmetic="x",
)

# -- activations ----------------------------------------------------------------------------------
unary(
    "aten.selu.default",
    "pv_elu(x, ACC(1.6732632423543772), ACC(1.0507009873554805), ACC(1))",
    arithmetic="x",
)
unary(
    "aten.celu.default",
    "pv_elu(x, ACC(alpha), ACC(1), pv_quotient(ACC(1), ACC(alpha)))",
    params={"alpha": 1.0},
    arithmetic="x",
)
unary("aten.mish.default", "pv_mish(x)", arithmetic="x")
unary(
    "aten.log_sigmoid.default",
    "(min(x, ACC(0)) - pv_log1p(pv_exp(-abs(x))))",
    arithmetic="x",
)
unary(
    "aten.softshrink.default",
    "(x > ACC(lambd) ? x - ACC(lambd) : x < -ACC(lambd) ? x + ACC(lambd) : pv_isnan(x) ? x : ACC(0))",
    params={"lambd": 0.5},
    arithmetic="x",
)
unary(
    "aten.threshold.default",
    "(x <= ACC(threshold) ? ACC(value) : x)",
    params={"threshold": 0, "value": 0},
)


def _prelu_shape(x: TensorType, weight: TensorType) -> TensorType:
    return x


@rewrite("aten.prelu.default", _prelu_shape, "aten._prelu_kernel.default")
def _prelu(builder: Builder, node: Node, x: Value, weight: Value) -> Value:
    rank = x.type.rank
    if weight.type.rank == 1 and rank > 1:
        weight = builder.aten.view(weight, (1, weight.type.dims[0], *([1] * (rank - 2))))
    elif weight.type.rank == 1 and not rank:
        weight = builder.aten.view(weight, ())
    positive = builder.aten.gt.Tensor(x, y=0)
    return builder.aten.where.self(positive, x, builder.aten.mul.Tensor(x, weight))


def _glu_shape(x: TensorType, dim: int = -1) -> TensorType:
    at = wrap(dim, x.rank)
    if x.dims[at] % 2 != 0:
        raise ShapeError(f"glu halves dim {dim} of {x}")
    return x.with_dims([size // 2 if d == at else size for d, size in enumerate(x.dims)])


@rewrite("aten.glu.default", _glu_shape)
def _glu(builder: Builder, node: Node, x: Value, dim: int) -> Value:
    at = wrap(dim, x.type.rank)
    middle = x.type.dims[at] // 2
    left = builder.aten.slice.Tensor(x, at, start=0, end=middle)
    right = builder.aten.slice.Tensor(x, at, middle, x.type.dims[at])
    return builder.aten.mul.Tensor(left, builder.aten.sigmoid(right))


# -- functions of any number ----------------------------------------------------------------------


def _float_or(text: str, otherwise: str) -> Callable[..., str]:
    return lambda dtype, **_: text if dtype.is_float else otherwise


unary("aten.sgn.default", "(x > ACC(0) ? ACC(1) : x < ACC(0) ? ACC(-1) : ACC(0))")
unary(
    "aten.signbit.default",
    _float_or("(pv_copysign(ACC(1), x) < ACC(0))", "(x < ACC(0))"),
    out=DType.bool,
)
unary("aten.frac.default", "(x - pv_trunc(x))")
unary("aten.positive.default", "x", arithmetic="x")
unary(ROUNDED, "x")
binary(DIVIDED, "pv_divide(x, y)", compute="float", arithmetic="xy")
unary(ROOT, "pv_root(x)", arithmetic="x")
unary(
    "aten.isfinite.default",
    _float_or("(!(pv_isnan(x) || pv_isinf(x)))", "true"),
    out=DType.bool,
)
unary("aten.isposinf.default", _float_or("(x == PV_INF)", "false"), out=DType.bool)
unary("aten.isneginf.default", _float_or("(x == -PV_INF)", "false"), out=DType.bool)

_LARGEST = {
    DType.float16: 65504.0,
    DType.bfloat16: 3.3895313892515355e38,
    DType.float32: 3.4028234663852886e38,
}


def _nan_to_num(
    nan: float | None, posinf: float | None, neginf: float | None, dtype: DType, **_: object
) -> str:
    if not dtype.is_float:
        return "x"
    largest = _LARGEST.get(dtype, 1.7976931348623157e308)
    texts = [
        literal(value if value is not None else other, dtype)
        for value, other in ((nan, 0.0), (posinf, largest), (neginf, -largest))
    ]
    return f"(pv_isnan(x) ? {texts[0]} : pv_isinf(x) ? (x > ACC(0) ? {texts[1]} : {texts[2]}) : x)"


unary("aten.nan_to_num.default", _nan_to_num, params={"nan": None, "posinf": None, "neginf": None})


def _polygamma_shape(n: int, x: TensorType) -> TensorType:
    return x.with_dtype(float_type(x.dtype))


define(
    "aten.polygamma.default",
    _polygamma_shape,
    Pointwise(lambda n, **_: f"pv_polygamma({int(n)}, x)", "result"),
    names=("aten.special_polygamma.default",),
)

# -- two operands ---------------------------------------------------------------------------------
for _name, (_glsl, *_names) in {
    "copysign.Tensor": ("pv_copysign(x, y)", "aten.copysign.Scalar"), "logaddexp.default": ("pv_logaddexp(x, y)",), "logaddexp2.default": ("pv_logaddexp2(x, y)",),  # noqa: E501
    "hypot.default": ("pv_hypot(x, y)",),
}.items():  # fmt: skip
    binary(f"aten.{_name}", _glsl, *_names, compute="float", arithmetic="xy")


def _times_log(function: str, root: int) -> Callable[..., str]:
    """x times the logarithm of a number. Where that is known to be 0, compilers take the product for 0,
    and it is NaN or -0.0."""

    def text(y: Arg, dtype: DType, **_: object) -> str:
        if isinstance(y, (int, float)) and y == root:
            return f"(x == ACC(0) ? ACC(0) : {zero_times(dtype, 'x')})"
        return f"{function}(x, y)"

    return text


binary(
    "aten.xlogy.Tensor",
    _times_log("pv_xlogy", 1),
    "aten.xlogy.Scalar_Self",
    "aten.xlogy.Scalar_Other",
    "aten.special_xlogy.default",
    compute="float",
    arithmetic="xy",
)
binary(
    "aten.special_xlog1py.default",
    _times_log("pv_xlog1py", 0),
    *(f"aten.special_xlog1py.{each}_scalar" for each in ("self", "other")),
    compute="float",
    arithmetic="xy",
)


def _nextafter(dtype: DType, **_: object) -> str:
    return (
        "pv_nextafter(x, y)"
        if dtype is DType.float64
        else f"(pv_isnan(x) || pv_isnan(y) ? PV_NAN : {_next_bits(dtype)})"
    )


def _next_bits(dtype: DType) -> str:
    if dtype is DType.float16:
        return "unpackHalf2x16(uint(pv_step(int(packHalf2x16(vec2(x, 0.0))), int(packHalf2x16(vec2(y, 0.0))), 15)))[0]"
    if dtype is DType.bfloat16:
        return "intBitsToFloat(pv_step(int(floatBitsToUint(x) >> 16), int(floatBitsToUint(y) >> 16), 15) << 16)"
    return "intBitsToFloat(pv_step(floatBitsToInt(x), floatBitsToInt(y), 31))"


binary("aten.nextafter.default", _nextafter, compute="float")
binary(
    "aten.fmax.default",
    _float_or("pv_max(pv_isnan(x) ? y : x, pv_isnan(y) ? x : y)", "pv_max(x, y)"),
    arithmetic="xy",
)
binary(
    "aten.fmin.default",
    _float_or("pv_min(pv_isnan(x) ? y : x, pv_isnan(y) ? x : y)", "pv_min(x, y)"),
    arithmetic="xy",
)


def _bound(function: str) -> Callable[..., str]:
    """Of two zeros, the result is the second in torch if that is a tensor, and else the first."""
    return lambda y, **_: (
        f"{function}(x, y)" if isinstance(y, (int, float)) else f"{function}(y, x)"
    )


binary("aten.clamp_min.default", _bound("pv_max"), "aten.clamp_min.Tensor", arithmetic="xy")
binary("aten.clamp_max.default", _bound("pv_min"), "aten.clamp_max.Tensor", arithmetic="xy")
binary("aten.max.other", "pv_max(y, x)", arithmetic="xy")
binary("aten.min.other", "pv_min(y, x)", arithmetic="xy")
binary("aten.heaviside.default", "(x == ACC(0) ? y : x > ACC(0) ? ACC(1) : ACC(0))")


def _gcd(dtype: DType, **_: object) -> str:
    lowest = 0 if dtype is DType.uint8 else -(2 ** (8 * dtype.itemsize - 1))
    return f"pv_gcd(x, y, {literal(lowest, dtype)})"


binary("aten.gcd.default", _gcd)
binary("aten.lcm.default", "pv_lcm(x, y)")
for _name, _way in {"left": "l", "right": "r"}.items():
    binary(
        f"aten.bitwise_{_name}_shift.Tensor",
        lambda dtype, way=_name, **_: f"pv_shift_{way}(x, y, {8 * dtype.itemsize})",
        f"aten.bitwise_{_name}_shift.Tensor_Scalar",
        f"aten.bitwise_{_name}_shift.Scalar_Tensor",
        f"aten.__{_way}shift__.Scalar",
        f"aten.__{_way}shift__.Tensor",
    )

# -- three operands -------------------------------------------------------------------------------


def _lerp_shape(x: TensorType, y: TensorType, z: TensorType | Scalar) -> TensorType:
    return TensorType(result_type((x, y)), broadcast_of((x, y, z)))


def _lerp(z: Arg, dtype: DType, **_: object) -> str:
    if is_factor_zero(z, dtype):
        return f"(x + {zero_times(dtype, '(y - x)')})"
    if isinstance(z, (int, float)) and z == 1:
        return f"(y - {zero_times(dtype, '(y - x)')})"
    return "(z < ACC(0.5) ? x + z * (y - x) : y - (y - x) * (ACC(1) - z))"


define(
    "aten.lerp.Scalar", _lerp_shape, Pointwise(_lerp, "result", "xyz"), names=("aten.lerp.Tensor",)
)


def _three_shape(x: TensorType, y: TensorType, z: TensorType, value: Scalar = 1) -> TensorType:
    return TensorType(result_type((x, y, z)), broadcast_of((x, y, z)))


def _three_float_shape(
    x: TensorType, y: TensorType, z: TensorType, value: Scalar = 1
) -> TensorType:
    made = _three_shape(x, y, z, value)
    return made.with_dtype(float_type(made.dtype))


def _add_product(value: Arg, dtype: DType, **_: object) -> str:
    if is_factor_zero(value, dtype):
        return f"(x + {zero_times(dtype, 'y')} + {zero_times(dtype, 'z')})"
    return "(x + ACC(value) * y * z)"


def _add_quotient(value: Arg, dtype: DType, **_: object) -> str:
    if is_factor_zero(value, dtype):
        return f"(x + pv_quotient({zero_times(dtype, 'y')}, z))"
    return "(x + pv_quotient(ACC(value) * y, z))"


define("aten.addcmul.default", _three_shape, Pointwise(_add_product, "result", "xyz"))
define("aten.addcdiv.default", _three_float_shape, Pointwise(_add_quotient, "result", "xyz"))

# -- losses ---------------------------------------------------------------------------------------
_REDUCED = {0: None, 1: "aten.mean.default", 2: "aten.sum.default"}


def _loss_shape(x: TensorType, y: TensorType, reduction: int = 1) -> TensorType:
    return TensorType(result_type((x, y)), broadcast_of((x, y)) if reduction == 0 else ())


def _finish(builder: Builder, x: Value, reduction: int) -> Value:
    operator = _REDUCED[reduction]
    return x if operator is None else builder.emit(operator, x)


@rewrite("aten.mse_loss.default", lambda x, y, reduction=1: _loss_shape(x, y, reduction))
def _mse(builder: Builder, node: Node, x: Value, y: Value, reduction: int) -> Value:
    difference = builder.aten.sub.Tensor(x, y)
    return _finish(builder, builder.aten.mul.Tensor(difference, difference), reduction)


@rewrite("aten.l1_loss.default", lambda x, y, reduction=1: _loss_shape(x, y, reduction))
def _l1(builder: Builder, node: Node, x: Value, y: Value, reduction: int) -> Value:
    return _finish(
        builder,
        builder.aten.abs(builder.aten.sub.Tensor(x, y)),
        reduction,
    )


@rewrite(
    "aten.huber_loss.default", lambda x, y, reduction=1, delta=1.0: _loss_shape(x, y, reduction)
)
@rewrite(
    "aten.smooth_l1_loss.default", lambda x, y, reduction=1, beta=1.0: _loss_shape(x, y, reduction)
)
def _huber(builder: Builder, node: Node, x: Value, y: Value, reduction: int, delta: float) -> Value:
    scale = delta if node.op == "aten.huber_loss.default" else 1.0
    distance = builder.aten.abs(builder.aten.sub.Tensor(x, y))
    if delta == 0:
        return _finish(builder, distance, reduction)
    square = builder.aten.mul.Tensor(
        builder.aten.mul.Tensor(distance, distance), 0.5 * scale / delta
    )
    line = builder.aten.mul.Tensor(builder.aten.sub.Tensor(distance, 0.5 * delta), scale)
    near = builder.aten.lt.Tensor(distance, delta)
    return _finish(builder, builder.aten.where.self(near, square, line), reduction)


def _isclose_shape(
    x: TensorType, y: TensorType, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> TensorType:
    return TensorType(DType.bool, broadcast_of((x, y)))


@rewrite("aten.isclose.default", _isclose_shape)
def _isclose(
    builder: Builder, node: Node, x: Value, y: Value, rtol: float, atol: float, equal_nan: bool
) -> Value:
    # All of it is one comparison.
    x, y = (builder.emit(ROUNDED, v) if v.type.dtype in ROUND else v for v in (x, y))
    equal = builder.aten.eq.Tensor(x, y)
    if not x.type.dtype.is_float:
        x, y = (builder.aten._to_copy(value, DType.float32) for value in (x, y))
    if equal_nan:
        both = [builder.aten.isnan(value) for value in (x, y)]
        equal = builder.aten.logical_or(equal, builder.aten.logical_and(*both))
    allowed = builder.aten.add.Tensor(
        builder.aten.mul.Tensor(builder.aten.abs(y), rtol),
        atol,
    )
    distance = builder.aten.abs(builder.aten.sub.Tensor(x, y))
    near = builder.aten.logical_and(
        builder.aten.isfinite(distance),
        builder.aten.le.Tensor(distance, allowed),
    )
    return builder.aten.logical_or(equal, near)

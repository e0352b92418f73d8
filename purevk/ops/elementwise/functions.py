"""Functions of mathematics that few models call (`glsl/core/functions.glslh`)."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Arg, Node, TensorType, Value
from purevk.lower.expression import ROUND
from purevk.ops.builder import Builder
from purevk.ops.elementwise.pointwise import binary, unary
from purevk.ops.promotion import float_type
from purevk.ops.registry import rewrite

for _name, (_glsl, *_names) in {
    "i0": ("fn_i0(x)", "aten.special_i0.default", "aten.special_modified_bessel_i0.default"), "special_i0e": ("fn_i0e(x)",), "special_i1": ("fn_i1(x)", "aten.special_modified_bessel_i1.default"),  # noqa: E501
    "special_i1e": ("fn_i1e(x)",), "special_erfcx": ("fn_erfcx(x)",), "special_ndtri": ("fn_ndtri(x)",),
    "special_spherical_bessel_j0": ("fn_spherical_j0(x)",),
    "special_bessel_j0": ("bf_j0(x)",), "special_bessel_j1": ("bf_j1(x)",), "special_bessel_y0": ("bf_y0(x)",),
    "special_bessel_y1": ("bf_y1(x)",), "special_modified_bessel_k0": ("bf_k(x, 0, false)",),
    "special_modified_bessel_k1": ("bf_k(x, 1, false)",), "special_scaled_modified_bessel_k0": ("bf_k(x, 0, true)",),
    "special_scaled_modified_bessel_k1": ("bf_k(x, 1, true)",), "special_airy_ai": ("bf_airy(x)",),
}.items():  # fmt: skip
    unary(f"aten.{_name}.default", _glsl, *_names, compute="float")

for _name, (_glsl, *_names) in {
    "igamma": ("fn_igamma(x, y)", "aten.special_gammainc.default"), "igammac": ("fn_igammac(x, y)", "aten.special_gammaincc.default"),  # noqa: E501
    "special_zeta": ("pv_zeta(x, y)", "aten.special_zeta.self_scalar", "aten.special_zeta.other_scalar"),
}.items():  # fmt: skip
    binary(f"aten.{_name}.default", _glsl, *_names, compute="float")
unary(
    "aten.angle.default",
    "(pv_isnan(x) ? x : x < ACC(0) ? ACC(3.141592653589793) : ACC(0))",
    compute="float",
    out="real",
)


def _ldexp(x: Arg, y: Arg, dtype: DType, **_: object) -> str:
    base, kind = (each.type.dtype if isinstance(each, Value) else dtype for each in (x, y))
    if kind.is_float or not base.is_float:
        return f"(x * {ROUND.get(kind, '$0').replace('$0', 'pv_exp2(y)')})"
    return (
        "pv_ldexp(x, y, 1023.0lf, 969.0lf)"
        if dtype is DType.float64
        else "pv_ldexp(x, y, 127.0, 102.0)"
    )


binary("aten.ldexp.Tensor", _ldexp, compute="float")

# Polynomials: the number of their kind in functions.glslh, and their argument.
for _name, (_kind, _at) in {
    "chebyshev_polynomial_t": (0, "x"), "chebyshev_polynomial_u": (1, "x"), "chebyshev_polynomial_v": (2, "x"),
    "chebyshev_polynomial_w": (3, "x"), "hermite_polynomial_h": (4, "x"), "hermite_polynomial_he": (5, "x"),
    "laguerre_polynomial_l": (6, "x"), "legendre_polynomial_p": (7, "x"),
    "shifted_chebyshev_polynomial_t": (0, "(x + x - ACC(1))"), "shifted_chebyshev_polynomial_u": (1, "(x + x - ACC(1))"),  # noqa: E501
    "shifted_chebyshev_polynomial_v": (2, "(x + x - ACC(1))"), "shifted_chebyshev_polynomial_w": (3, "(x + x - ACC(1))"),  # noqa: E501
}.items():  # fmt: skip
    binary(
        f"aten.special_{_name}.default",
        f"fn_polynomial({_kind}, {_at}, y)",
        f"aten.special_{_name}.x_scalar",
        f"aten.special_{_name}.n_scalar",
        compute="float",
    )


def _round(decimals: int, dtype: DType, **_: object) -> str:
    if not dtype.is_float:
        return "x"
    scale = float(10 ** abs(decimals))
    return (
        f"(pv_round(x * ACC({scale!r})) / ACC({scale!r}))"
        if decimals >= 0
        else f"(pv_round(x / ACC({scale!r})) * ACC({scale!r}))"
    )


unary("aten.round.decimals", _round, params={"decimals": 0})

unary("purevk.mantissa", "fn_mantissa(x)")
unary("purevk.exponent", "fn_exponent(x)", out=DType.int32)


def _frexp_shape(x: TensorType) -> tuple[TensorType, TensorType]:
    return x.with_dtype(float_type(x.dtype)), x.with_dtype(DType.int32)


@rewrite("aten.frexp.Tensor", _frexp_shape)
def _frexp(builder: Builder, node: Node, x: Value) -> tuple[Value, Value]:
    return builder.purevk.mantissa(x), builder.purevk.exponent(x)

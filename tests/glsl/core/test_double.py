"""The functions of double.glslh and composed.glslh in double precision, against torch and exact
references."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.glsl.core.harness import evaluate

pytestmark = pytest.mark.device

torch = pytest.importorskip("torch")
mpmath = pytest.importorskip("mpmath")

NAN, INF = np.nan, np.inf
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, INF, -INF, NAN])
gelu = torch.nn.functional.gelu


def double(expression, *arguments):
    return evaluate(expression, *arguments, dtype=np.float64, glsl="double")


def spread(low, high, n=3001):
    """Numbers from low to high, many near 0, with the special ones."""
    small = np.geomspace(1e-20, 1, 400)
    x = np.concatenate([np.linspace(low, high, n), small, -small])
    return np.concatenate([x[(x >= low) & (x <= high)], SPECIAL])


UNARY = {
    "pv_exp": (torch.exp, -744, 709),
    "pv_exp2": (torch.exp2, -1070, 1023),
    "pv_expm1": (torch.expm1, -40, 709),
    "pv_log": (torch.log, 0, 1e9),
    "pv_log1p": (torch.log1p, -1, 1e9),
    "pv_log2": (torch.log2, 0, 1e9),
    "pv_log10": (torch.log10, 0, 1e9),
    "pv_tanh": (torch.tanh, -40, 40),
    "pv_sinh": (torch.sinh, -700, 700),
    "pv_cosh": (torch.cosh, -700, 700),
    "pv_asinh": (torch.asinh, -1e12, 1e12),
    "pv_acosh": (torch.acosh, 1, 1e12),
    "pv_atanh": (torch.atanh, -1, 1),
    "pv_sin": (torch.sin, -1e4, 1e4),
    "pv_cos": (torch.cos, -1e4, 1e4),
    "pv_tan": (torch.tan, -1e4, 1e4),
    "pv_atan": (torch.atan, -1e3, 1e3),
    "pv_asin": (torch.asin, -1, 1),
    "pv_acos": (torch.acos, -1, 1),
    "pv_erf": (torch.erf, -7, 7),
    "pv_erfc": (torch.erfc, -7, 26),
    "pv_erfinv": (torch.erfinv, -1, 1),
    "pv_gelu": (gelu, -30, 30),
    "pv_gelu_tanh": (lambda x: gelu(x, approximate="tanh"), -12, 12),
    "pv_sigmoid": (torch.sigmoid, -700, 700),
    "pv_silu": (torch.nn.functional.silu, -700, 700),
    "pv_mish": (torch.nn.functional.mish, -30, 30),
    "fn_i0": (torch.special.i0, -700, 700),
    "fn_i0e": (torch.special.i0e, -1e3, 1e3),
    "fn_i1": (torch.special.i1, -700, 700),
    "fn_i1e": (torch.special.i1e, -1e3, 1e3),
    "fn_ndtri": (torch.special.ndtri, 0, 1),
    "fn_erfcx": (torch.special.erfcx, -26, 1e3),
    "fn_mantissa": (lambda x: torch.frexp(x)[0], -1e3, 1e3),
    "fn_spherical_j0": (torch.special.spherical_bessel_j0, -50, 50),
    "pv_lgamma": (torch.lgamma, -20, 200),
    "pv_digamma": (torch.digamma, -20, 200),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    function, low, high = UNARY[name]
    x = spread(low, high)
    if name in ("fn_i0", "fn_i1"):  # torch has NaN for infinity
        x = x[~np.isinf(x)]
    wanted = function(torch.from_numpy(x)).numpy()
    out = double(f"{name}(v)", x)
    # Near the roots of the gamma functions digits are lost, as torch loses them in gelu's tail.
    atol = {
        "fn_spherical_j0": 1e-15,
        "pv_lgamma": 4e-14,
        "pv_digamma": 4e-14,
        "pv_gelu_tanh": 1e-15,
        "pv_gelu": 1e-15,
    }.get(name, 0)
    np.testing.assert_allclose(out, wanted, rtol=2e-13, atol=max(atol, 1e-307))


@pytest.mark.parametrize(
    "name, function", [("pv_sin", mpmath.sin), ("pv_cos", mpmath.cos), ("pv_tan", mpmath.tan)]
)
def test_trigonometry_of_large_numbers(name, function):
    random = np.random.default_rng(0)
    x = np.concatenate(
        [
            10.0 ** random.uniform(0, 308, 400) * random.choice([-1, 1], 400),
            math.pi * random.integers(1, 1 << 40, 100),
        ]
    )
    with mpmath.workprec(1300):
        wanted = np.array([float(function(mpmath.mpf(float(v)))) for v in x])
    np.testing.assert_allclose(double(f"{name}(v)", x), wanted, rtol=1e-13)


PAIRS = {
    "pv_pow": torch.pow,
    "pv_atan2": torch.atan2,
    "pv_hypot": torch.hypot,
    "pv_fmod": torch.fmod,
    "pv_remainder": torch.remainder,
    "pv_floor_divide": torch.floor_divide,
    "pv_nextafter": torch.nextafter,
    "pv_xlogy": torch.xlogy,
    "pv_xlog1py": torch.special.xlog1py,
    "pv_logaddexp": torch.logaddexp,
    "pv_logaddexp2": torch.logaddexp2,
    "pv_copysign": torch.copysign,
    "pv_zeta": torch.special.zeta,
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    random = np.random.default_rng(1)
    usual = random.normal(size=(2, 2000)) * np.exp(random.normal(size=(2, 2000)) * 3)
    odd = np.array(np.meshgrid(SPECIAL, [*SPECIAL, 3.0, -2.0, 1e300, 1e-300])).reshape(2, -1)
    a, b = np.concatenate([usual, odd], 1)
    if name == "pv_zeta":
        a, b = 1 + np.abs(usual[0]), usual[1]
    if (
        name == "pv_floor_divide"
    ):  # division by zero gives inf, and NaN for infinity, as the result of a float's division
        a, b = a[np.isfinite(a)], b[np.isfinite(a)]
    wanted = PAIRS[name](torch.from_numpy(a), torch.from_numpy(b)).numpy()
    out = double(f"{name}(v, w)", a, b)
    np.testing.assert_allclose(
        out,
        wanted,
        rtol=2e-12 if name in ("pv_pow", "pv_zeta") else 1e-13,
        atol=1e-16 if "logadd" in name else 1e-307,
    )


@pytest.mark.parametrize("n", [1, 2, 5])
def test_polygamma(n):
    x = np.concatenate([np.linspace(-7.9, 60, 331), [1e-8, 1e6]])
    wanted = [float(mpmath.polygamma(n, mpmath.mpf(float(v)))) for v in x]
    np.testing.assert_allclose(double(f"pv_polygamma({n}, v)", x), wanted, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("name", ["igamma", "igammac"])
def test_incomplete_gamma(name):
    random = np.random.default_rng(2)
    a, x = np.concatenate(
        [
            random.uniform(0, 2, (2, 1000)),
            random.uniform(0, 100, (2, 1000)),
            10.0 ** random.uniform(-3, 3, (2, 1000)),
        ],
        1,
    )
    wanted = getattr(torch, name)(torch.from_numpy(a), torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(
        double(f"fn_{name}(v, w)", a, x), wanted, rtol=1e-8, atol=1e-290
    )  # torch's error for a > 20
    wrong = np.array(
        [
            [-1.0, 1.0],
            [1.0, -1.0],
            [0.0, 0.0],
            [NAN, 1.0],
            [1.0, NAN],
            [INF, INF],
            [0.0, 1.0],
            [1.0, 0.0],
            [INF, 1.0],
            [1.0, INF],
        ]
    ).T
    expected = getattr(torch, name)(*torch.from_numpy(wrong)).numpy()
    np.testing.assert_array_equal(double(f"fn_{name}(v, w)", *wrong), expected)

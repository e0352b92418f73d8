"""The functions of math.glslh against torch in double precision."""

from __future__ import annotations

import numpy as np
import pytest

from tests.glsl.core.harness import evaluate

pytestmark = pytest.mark.device

torch = pytest.importorskip("torch")

NAN, INF = np.nan, np.inf
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, INF, -INF, NAN]


def spread(low, high, n=4001):
    """Numbers from low to high, many near 0, with the special ones."""
    linear = np.linspace(low, high, n)
    small = np.geomspace(1e-12, 1, 500)
    x = np.concatenate([linear, small, -small])
    return np.concatenate([x[(x >= low) & (x <= high)], SPECIAL]).astype(np.float32)


gelu = torch.nn.functional.gelu
UNARY = {
    "pv_exp": (torch.exp, -103, 88.7, 5e-7, 1e-44),
    "pv_expm1": (torch.expm1, -20, 88.7, 5e-7, 0),
    "pv_log1p": (torch.log1p, -1, 1e6, 2e-6, 0),
    "pv_log": (torch.log, 0, 1e6, 1e-6, 0),
    "pv_log2": (torch.log2, 0, 1e6, 1e-6, 0),
    "pv_log10": (torch.log10, 0, 1e6, 1e-6, 0),
    "pv_tanh": (torch.tanh, -100, 100, 1e-6, 0),
    "pv_sinh": (torch.sinh, -89, 89, 2e-6, 0),
    "pv_cosh": (torch.cosh, -89, 89, 2e-6, 0),
    "pv_asinh": (torch.asinh, -1e4, 1e4, 2e-6, 0),
    "pv_acosh": (torch.acosh, 1, 1e4, 2e-6, 0),
    "pv_atanh": (torch.atanh, -1, 1, 2e-6, 0),
    "pv_atan": (torch.atan, -1e3, 1e3, 5e-7, 0),
    "pv_asin": (torch.asin, -1, 1, 1e-6, 0),
    "pv_acos": (torch.acos, -1, 1, 1e-6, 2e-7),
    "pv_erf": (torch.erf, -7, 7, 1e-6, 1e-7),
    "pv_erfc": (torch.erfc, -7, 7, 1e-6, 2e-7),
    "pv_gelu": (gelu, -12, 12, 1e-6, 3e-7),
    "pv_gelu_tanh": (lambda x: gelu(x, approximate="tanh"), -12, 12, 5e-6, 3e-7),
    "pv_sigmoid": (torch.sigmoid, -80, 80, 1e-6, 0),
    "pv_silu": (torch.nn.functional.silu, -80, 80, 1e-6, 0),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    function, low, high, rtol, atol = UNARY[name]
    x = spread(low, high)
    wanted = function(torch.from_numpy(x).double()).numpy()
    out = evaluate(f"{name}(v)", x)
    usual = np.abs(wanted) < 3.4e38
    # Devices may take subnormal numbers for 0.
    np.testing.assert_allclose(out[usual], wanted[usual], rtol=rtol, atol=max(atol, 1.2e-38))
    np.testing.assert_array_equal(out[~usual], wanted[~usual].astype(np.float32))


@pytest.mark.parametrize(
    "name, function",
    [("pv_erf(v)", torch.erf), ("pv_expm1(v)", torch.expm1), ("pv_tanh(v)", torch.tanh)],
)
def test_small_numbers_keep_their_digits(name, function):
    x = np.geomspace(1e-30, 1, 3001).astype(np.float32)
    wanted = function(torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(evaluate(name, x), wanted, rtol=1e-6)
    np.testing.assert_allclose(
        evaluate(name, -x), function(-torch.from_numpy(x).double()).numpy(), rtol=1e-6
    )


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_trigonometry_of_large_numbers(name):
    random = np.random.default_rng(0)
    far = 2.0 ** random.uniform(12, 33, 20000) * random.choice([-1, 1], 20000)
    x = np.concatenate(
        [far, np.arange(8000, 8400), np.pi / 2 * random.integers(1, 1 << 31, 5000)]
    ).astype(np.float32)
    wanted = getattr(torch, name)(torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(
        evaluate(f"pv_{name}(v)", x), wanted, rtol=1e-6, atol=2e-7 if name != "tan" else 1e-7
    )


@pytest.mark.parametrize("beta, threshold", [(1.0, 20.0), (2.5, 3.0)])
def test_softplus(beta, threshold):
    x = spread(-90, 90)
    wanted = torch.nn.functional.softplus(torch.from_numpy(x).double(), beta, threshold).numpy()
    # exp(x beta) has the rounding of x beta, up to 128 units in the last place; half of the
    # smallest normal number may be 0.
    np.testing.assert_allclose(
        evaluate(f"pv_softplus(v, {beta}, {threshold})", x), wanted, rtol=8e-6, atol=2.5e-38
    )


def test_elu():
    x = spread(-90, 90)
    wanted = torch.ops.aten.elu(torch.from_numpy(x).double(), 1.7, 1.1, 0.6).numpy()
    np.testing.assert_allclose(evaluate("pv_elu(v, 1.7, 1.1, 0.6)", x), wanted, rtol=1e-6)


def test_clamp_max_min():
    x = spread(-3, 3)
    t = torch.from_numpy(x)
    np.testing.assert_array_equal(
        evaluate("pv_clamp(v, -0.5, 1.25)", x), t.clamp(-0.5, 1.25).numpy()
    )
    np.testing.assert_array_equal(evaluate("pv_clamp(v, 1.0, -1.0)", x), t.clamp(1.0, -1.0).numpy())
    a, b = np.meshgrid(SPECIAL, SPECIAL)
    a, b = torch.from_numpy(a.reshape(-1)), torch.from_numpy(b.reshape(-1))
    np.testing.assert_array_equal(
        evaluate("pv_max(v, w)", a.numpy(), b.numpy()), torch.maximum(a, b).numpy()
    )
    np.testing.assert_array_equal(
        evaluate("pv_min(v, w)", a.numpy(), b.numpy()), torch.minimum(a, b).numpy()
    )


def test_pow_of_special_numbers():
    values = [
        *SPECIAL,
        2,
        -2,
        3,
        -3,
        0.3,
        -0.3,
        1e30,
        -1e30,
        2.0**25,
        -(2.0**25),
        7,
        33,
        -33,
        1e-30,
    ]
    a, b = (g.reshape(-1).astype(np.float32) for g in np.meshgrid(values, values))
    wanted = torch.pow(torch.from_numpy(a).double(), torch.from_numpy(b).double()).float().numpy()
    out = evaluate("pv_pow(v, w)", a, b)
    subnormal = (wanted != 0) & (np.abs(wanted) < 1.2e-38)
    np.testing.assert_allclose(out[~subnormal], wanted[~subnormal], rtol=2e-6)
    np.testing.assert_array_equal(np.signbit(out[wanted == 0]), np.signbit(wanted[wanted == 0]))


def test_pow():
    rng = np.random.default_rng(1)
    a = np.exp(rng.uniform(-20, 20, 5000)).astype(np.float32)
    b = rng.uniform(-6, 6, 5000).astype(np.float32)
    wanted = torch.pow(torch.from_numpy(a).double(), torch.from_numpy(b).double()).numpy()
    usual = (wanted < 3e38) & (wanted > 1.2e-38)
    np.testing.assert_allclose(evaluate("pv_pow(v, w)", a, b)[usual], wanted[usual], rtol=3e-6)


def floats_for_division():
    rng = np.random.default_rng(2)
    a = np.concatenate(
        [
            rng.uniform(-10, 10, 3000),
            np.exp(rng.uniform(-60, 60, 3000)),
            rng.integers(-50, 50, 3000),
        ]
    )
    b = np.concatenate(
        [rng.uniform(-3, 3, 3000), -np.exp(rng.uniform(-60, 60, 3000)), rng.integers(-9, 9, 3000)]
    )
    c, d = np.meshgrid(SPECIAL, SPECIAL)
    a, b = np.concatenate([a, c.reshape(-1)]), np.concatenate([b, d.reshape(-1)])
    return a.astype(np.float32), b.astype(np.float32)


@pytest.mark.parametrize("name", ["fmod", "remainder", "floor_divide"])
def test_division_of_floats(name):
    a, b = floats_for_division()
    if name == "floor_divide":
        wanted = torch.floor_divide(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    else:
        # torch's own gives NaN for quotients beyond float32 where C's fmod, which numpy calls, is
        # exact.
        with np.errstate(invalid="ignore"):
            wanted = getattr(np, name)(a, b)
    out = evaluate(f"pv_{name}(v, w)", a, b)
    if name == "floor_divide":
        # torch rounds a - remainder; where that is not exact, quotients of 2^24 and more may differ
        # in the last bit.
        np.testing.assert_allclose(out, wanted, rtol=2e-7)
    else:
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("dtype, glsl", [(np.int32, "int"), (np.int64, "int64_t")])
@pytest.mark.parametrize("name", ["fmod", "remainder", "floor_divide", "maximum", "minimum"])
def test_integers(dtype, glsl, name):
    rng = np.random.default_rng(3)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    a = np.concatenate(
        [rng.integers(low, high, 2000), rng.integers(-50, 50, 2000), [low, low, high, high, low]]
    )
    b = np.concatenate(
        [rng.integers(low, high, 2000), rng.integers(-9, 9, 2000), [1, 7, -1, low, low]]
    )
    b[b == 0] = 3
    a, b = a.astype(dtype), b.astype(dtype)
    wanted = getattr(torch, name)(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    short = {"maximum": "max", "minimum": "min"}.get(name, name)
    np.testing.assert_array_equal(
        evaluate(f"pv_{short}(v, w)", a, b, dtype=dtype, glsl=glsl), wanted
    )


@pytest.mark.parametrize("dtype, glsl", [(np.int32, "int"), (np.int64, "int64_t")])
def test_powers_of_integers(dtype, glsl):
    rng = np.random.default_rng(4)
    a, n = rng.integers(-9, 9, 3000).astype(dtype), rng.integers(0, 40, 3000).astype(dtype)
    wanted = torch.pow(torch.from_numpy(a), torch.from_numpy(n)).numpy()
    np.testing.assert_array_equal(evaluate("pv_pow(v, w)", a, n, dtype=dtype, glsl=glsl), wanted)
    a, n = np.array([1, -1, -1, 2, -7], dtype), np.array([-3, -3, -4, -1, -2], dtype)
    np.testing.assert_array_equal(
        evaluate("pv_pow(v, w)", a, n, dtype=dtype, glsl=glsl), [1, -1, 1, 0, 0]
    )


def test_division_by_zero_does_no_harm():
    a, b = np.arange(-8, 8, dtype=np.int32), np.zeros(16, np.int32)
    for name in ("fmod", "remainder", "floor_divide", "trunc_divide"):
        assert (evaluate(f"pv_{name}(v, w)", a, b, dtype=np.int32, glsl="int") == 0).all()


def test_atan2():
    rng = np.random.default_rng(5)
    c, d = np.meshgrid([*SPECIAL, 1e30, -1e-30], [*SPECIAL, 1e30, -1e-30])
    y = np.concatenate([rng.standard_normal(2000), c.reshape(-1)]).astype(np.float32)
    x = np.concatenate([rng.standard_normal(2000), d.reshape(-1)]).astype(np.float32)
    wanted = torch.atan2(torch.from_numpy(y).double(), torch.from_numpy(x).double()).float().numpy()
    np.testing.assert_allclose(evaluate("pv_atan2(v, w)", y, x), wanted, rtol=1e-6, atol=1.2e-38)

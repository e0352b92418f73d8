"""Every pointwise row, in every dtype that torch takes, against torch."""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import purevk.ops  # noqa: F401
from purevk.ops import registry
from tests.ops.harness import (
    Case,
    aten,
    check,
    flushed,
    keeps_subnormal_numbers,
    program_of,
    tensor,
    works,
)

pytestmark = pytest.mark.device

FLOATS = (torch.float32, torch.float16)
INTS = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16)
ALL = (*FLOATS, *INTS, torch.bool)
SPECIAL = torch.tensor(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        2.5,
        3.5,
        -2.5,
        math.inf,
        -math.inf,
        math.nan,
        1e-3,
        60000.0,
        -60000.0,
    ],
)
# 32 numbers where functions go wrong; those of float16 and bfloat16 become other ones of their kind.
EDGES = (
    *SPECIAL.tolist(), 1e-40, -1e-40, 1.5e-45, 2e-38, -2e-38, 3.4e38, -3.4e38, 6e-8, -6e-8, 2.0**24 + 1, -(2.0**24) - 1,
    2.0**53 + 1, 80.0, -80.0, 1e-310, -5e-324, 1.7e308,
)  # fmt: skip
INTEGER_EDGES = (
    0, 1, -1, 2, -2, 3, 7, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3, -(2**24) - 1, 2**31 - 1, -(2**31), 2**53 + 1,
    2**53 - 1, -(2**53) - 1, 2**63 - 1, -(2**63), 100, 127, -128, 255, 10, 11, 12, 13, 14, 15, 16, 17, 18,
)  # fmt: skip

# Where a function of one real number is looked at; elsewhere it is NaN, infinite, or loses all
# digits in float32.
DOMAIN = {
    "acos": (-1, 1), "acosh": (1, 50), "asin": (-1, 1), "atanh": (-0.999, 0.999), "log": (1e-3, 50), "log2": (1e-3, 50),
    "log10": (1e-3, 50), "log1p": (-0.99, 50), "sqrt": (0, 50), "rsqrt": (1e-3, 50), "exp": (-20, 20),
    "sinh": (-20, 20), "cosh": (-20, 20), "tan": (-1.5, 1.5), "expm1": (-5, 5), "erf": (-4, 4),
}  # fmt: skip
# Vulkan asks 2^-11 absolute of sin and cos, on [-pi, pi]; what lavapipe gives is better. Relative
# error is lost near their zeros whatever the device.
LOOSE = {
    "sin": (1e-5, 1e-5),
    "cos": (1e-5, 1e-5),
    "tan": (1e-4, 1e-5),
    "tanh": (1e-5, 1e-6),
    "lgamma": (1e-5, 1e-5),
    "special_gammaln": (1e-5, 1e-5),
}


def rows(form, *parameters):
    return [
        row
        for row in registry.definitions()
        if isinstance(row.form, form) and row.parameters[: len(parameters)] == parameters
    ]


# Infinity gives NaN from torch's float32 vector code of gelu and inf from its other code. Of -0.0, it
# makes the odd functions of Bessel 0.0.
NO_INFINITY = ("gelu",)
NO_MINUS_ZERO = ("special_i1", "special_i1e", "special_modified_bessel_i1")


def edges(dtype: torch.dtype, name: str = "") -> torch.Tensor:
    """4 x 8 numbers where functions go wrong."""
    if dtype is torch.bool:
        return tensor(4, 8, dtype=dtype)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        held = [n if info.min <= n <= info.max else n % 19 for n in INTEGER_EDGES]
        return torch.tensor(held, dtype=dtype).reshape(4, 8)
    x = torch.tensor(EDGES, dtype=torch.float64).reshape(4, 8).to(dtype)
    if not keeps_subnormal_numbers():
        x = x.where(x.abs() >= torch.finfo(dtype).tiny, x.sign() * 3)
    if name in NO_INFINITY:
        x = x.where(x.abs() < 1e38, 3)
    return x.where(x.ne(0) | ~x.signbit(), 1) if name in NO_MINUS_ZERO else x


def specials(name):
    """The special values that a function is looked at with. None where torch's results are
    accidents of its algorithm: a polynomial's degree is cast to an integer whatever it is,
    igamma(nan, inf) is 1."""
    if "polynomial" in name or name.startswith(("igamma", "special_gammainc")):
        return None
    return SPECIAL[~SPECIAL.isinf()] if name in NO_INFINITY else SPECIAL


def overloads(row):
    """The overloads of torch that a row stands for."""
    found = []
    for name in (row.name, *row.names):
        if name.startswith("aten."):
            _, op, overload = name.split(".")
            found.append(getattr(getattr(aten, op), overload))
    return found


EXTRA = {  # arguments after the tensor
    "gelu": [{}, {"approximate": "tanh"}],
    "softplus": [(), (2.0, 3.0), (0.5,)],
    "elu": [(), (0.7,), (1.6732632423543772, 1.0507009873554805), (1.0, 2.0, 0.5)],
    "hardtanh": [(), (-0.25, 2.0), (0, 6)],
    "hardshrink": [(), (1.0,)],
    "leaky_relu": [(), (0.2,), (-0.5,)],
    "to": [(torch.float16,)],
    "lift_fresh_copy": [()],
    "threshold": [(0.5, 2), (-1, -3)],
    "nan_to_num": [(), (1.0, 2.0, -3.0)],
    "logit": [(), (0.1,)],
    "special_logit": [(0.1,)],
    "celu": [(), (0.5,)],
    "softshrink": [(), (1.5,)],
    "round": [(), {"decimals": 2}, {"decimals": -1}],
}
OTHERS = {
    "aten.addcdiv.default", "aten.addcmul.default", "aten.lerp.Scalar", "aten.polygamma.default", "aten.clamp.default",
    "aten.where.self", "aten.masked_fill.Scalar", "aten._to_copy.default",
}  # fmt: skip
# Bessel functions take seconds to compile: test_bessel.py has a few cases of each.
ELSEWHERE = tuple(
    f"aten.special_{name}"
    for name in ("bessel", "modified_bessel_k", "scaled_modified_bessel", "airy")
)
UNARY = [
    row
    for row in rows(registry.Pointwise, "x")
    if row.parameters[1:2] != ("y",)
    and row.name not in OTHERS
    and overloads(row)
    and not row.name.startswith(ELSEWHERE)
]


@pytest.mark.parametrize("row", UNARY, ids=lambda row: row.name)
def test_unary(row):
    cases = []
    for overload in overloads(row):
        name = overload.overloadpacket.__name__
        low, high = DOMAIN.get(name, (-4, 4))
        rtol, atol = LOOSE.get(name, (None, None))
        for dtype, extra in itertools.product(ALL, EXTRA.get(name, [()])):
            args, kwargs = ((), extra) if isinstance(extra, dict) else (extra, {})
            x = tensor(5, 13, dtype=dtype, low=low, high=high)
            if works(overload, x, *args, **kwargs) is None:
                continue
            if dtype is torch.float16:
                rtol = atol = None
            cases.append(Case(overload, (x, *args), kwargs, rtol=rtol, atol=atol))
            cases.append(
                Case(
                    overload, (edges(dtype, name), *args), kwargs, rtol=rtol, atol=atol, zeros=True
                )
            )
            cases.append(
                Case(
                    overload,
                    (tensor(dtype=dtype, low=low, high=high), *args),
                    kwargs,
                    rtol=rtol,
                    atol=atol,
                )
            )
    check(cases)


NUMBERS = (2, -3, 0.5, True)


def takes_two(row):
    return all(
        sum(not a.has_default_value() for a in overload._schema.arguments) <= 2
        or "alpha" in str(overload._schema)
        or "rounding_mode" in str(overload._schema)
        for overload in overloads(row)
    )


BINARY = [row for row in rows(registry.Pointwise, "x", "y") if overloads(row) and takes_two(row)]


@pytest.mark.parametrize("row", BINARY, ids=lambda row: row.name)
def test_binary(row):
    cases = []
    for overload in overloads(row):
        kinds = [str(argument.type) for argument in overload._schema.arguments[:2]]
        extras = [{}]
        names = [argument.name for argument in overload._schema.arguments]
        if "alpha" in names:
            extras = [{}, {"alpha": 3}]
        if "rounding_mode" in names:
            extras = [{"rounding_mode": mode} for mode in (None, "floor", "trunc")]
        for a, b in itertools.product(ALL, ALL):
            same = a is b
            if not same and (a, b) not in MIXED:
                continue
            for extra in extras:
                for x, y in operands(kinds, a, b, same, overload.overloadpacket.__name__):
                    if works(overload, x, y, **extra) is None:
                        continue
                    half = "alpha" in extra and torch.float16 in (a, b)
                    if half and x.numel() == len(SPECIAL):
                        continue  # torch rounds alpha * y to float16, to infinity for the large ones
                    cases.append(Case(overload, (x, y), extra, atol=1e-2 if half else None))
    check(cases)


# Where torch ends the process for the lowest integer: its own division by -1.
DIVIDES = ("remainder", "fmod", "floor_divide", "div", "lcm")
# torch gives NaN where a quotient in between overflows.
REMAINDERS = ("fmod", "remainder")


@pytest.mark.parametrize("row", BINARY, ids=lambda row: row.name)
def test_binary_at_special_values(row):
    """All pairs of the numbers where functions go wrong, and numbers in Python beside them."""
    cases = []
    for overload, dtype in itertools.product(overloads(row), ALL):
        kinds = [str(argument.type) for argument in overload._schema.arguments[:2]]
        name = overload.overloadpacket.__name__
        if specials(name) is None or name == "special_zeta":
            continue  # torch's results are accidents
        x = edges(dtype, name).flatten()
        if name in DIVIDES and dtype in INTS:
            x = x.where(x != torch.iinfo(dtype).min, 5)
        if name in REMAINDERS and dtype in FLOATS:
            x = x.where((x == 0) | x.isinf() | ~((x.abs() < 1e-30) | (x.abs() > 1e30)), 3)
        if kinds == ["Tensor", "Tensor"]:
            pairs = [(x[:, None], x)]
        elif kinds[0] == "Tensor":
            pairs = [(x, number) for number in (1, 0, -1, 2.5, True)]
        else:
            pairs = [(number, x) for number in (1, 0, -1, 2.5)]
        cases += [
            Case(overload, pair, zeros=True, name=f"{overload} {dtype} {pair}"[:70])
            for pair in pairs
            if works(overload, *pair) is not None
        ]
    if cases:
        check(cases)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.bfloat16], ids=str)
def test_ldexp_of_any_exponent(dtype):
    """With an integer, no power of 2 overflows or vanishes, and the result is rounded once."""
    numbers = [0.0, -0.0, 1.0, 1.5, -1.0000001, math.inf, math.nan, 3e38, 1e-30]
    x = torch.cat([torch.tensor(numbers), tensor(7)]).to(dtype)
    if keeps_subnormal_numbers():
        x = torch.cat([x, torch.tensor([1e-45, -3e-42], dtype=dtype)])
    sizes = (1, 24, 126, 127, 128, 129, 149, 150, 200, 277, 1023, 1074, 1500, 2098, 2**31 - 1)
    exponents = torch.tensor([sign * size for size in sizes for sign in (1, -1)])
    check(
        [
            Case(
                aten.ldexp.Tensor,
                (x[:, None], exponents.to(kind)),
                rtol=0,
                atol=flushed(),
                zeros=not flushed(),
            )
            for kind in (torch.int32, torch.int64)
        ]
    )


def test_logit_with_a_bound():
    """1 - eps is rounded to the dtype."""
    x = torch.tensor([0.0, 1.0, 0.5, 0.999, 0.9995, 1e-4, 5e-4, math.nan])
    check(
        [
            Case(aten.logit.default, (x.to(dtype), eps))
            for dtype in (*FLOATS, torch.bfloat16)
            for eps in (1e-3, 1e-4, 1e-6, 0.1)
        ]
    )


MIXED = {
    (torch.float32, torch.int32),
    (torch.int64, torch.float16),
    (torch.float16, torch.float32),
    (torch.int32, torch.int64),
    (torch.uint8, torch.int8),
    (torch.bool, torch.float32),
    (torch.int64, torch.bool),
    (torch.int16, torch.uint8),
}


def operands(kinds, a, b, same, name):
    """Pairs of operands: equal shapes, broadcast both ways, 0-d, numbers."""
    integer_divisor = ("floor_divide", "div", "fmod", "remainder")
    low = 0 if "pow" in name else -4

    def right(*shape, seed=1):
        y = tensor(*shape, dtype=b, low=low, seed=seed)
        if name in integer_divisor and not b.is_floating_point:
            y = torch.where(y == 0, torch.ones((), dtype=b), y)
        return y

    if kinds == ["Tensor", "Tensor"]:
        yield tensor(3, 7, dtype=a, low=low), right(3, 7)
        if same:
            yield tensor(2, 8, dtype=a, low=low), right(2, 8)
            yield tensor(3, 1, 5, dtype=a, low=low), right(4, 1)
            yield tensor(4, dtype=a, low=low), right(3, 4)
        yield tensor(3, 7, dtype=a, low=low), right()
        yield tensor(dtype=a, low=low, seed=3), right(5)
        if (
            same
            and a.is_floating_point
            and specials(name) is not None
            and name not in ("pow", "remainder", "fmod", "floor_divide", "div")
        ):
            yield SPECIAL.to(a)[:, None], SPECIAL.to(b)
    elif kinds[0] == "Tensor":
        for number in NUMBERS:
            yield tensor(3, 7, dtype=a, low=low), number
            if same:
                yield tensor(dtype=a, low=low), number
    elif same:
        for number in NUMBERS:
            yield number, right(3, 7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_floats(dtype):
    """Double precision keeps its digits, on the device; bfloat16 is rounded once, from float32."""
    cases = []
    tolerance = (
        {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1.6e-2, "atol": 1e-2}
    )
    for row in (*UNARY, *BINARY):
        for overload in overloads(row):
            name = overload.overloadpacket.__name__
            low, high = DOMAIN.get(name, (-4, 4))
            tensors = [tensor(3, 7, dtype=dtype, low=low, high=high, seed=n) for n in (1, 2)][
                : 2 if row in BINARY else 1
            ]
            if name in ("nextafter",) or works(overload, *tensors) is None:
                continue
            if dtype is torch.bfloat16 and name in (
                "tan",
                "floor_divide",
                "fmod",
                "remainder",
                "pow",
                "nextafter",
                "digamma",
            ):
                continue  # a rounding of the argument moves the result by more than its own
            cases.append(
                Case(overload, tuple(tensors), host=dtype is not torch.float64, **tolerance)
            )
    x = tensor(3, 7, dtype=dtype)
    cases += [
        Case(aten._to_copy.default, (x,), {"dtype": target}, host=True)
        for target in (torch.float32, torch.float16, torch.int64, torch.bool, torch.int8)
    ]
    cases += [
        Case(aten._to_copy.default, (tensor(3, 7, dtype=source),), {"dtype": dtype}, host=True)
        for source in (torch.float32, torch.float16, torch.int64, torch.bool)
    ]
    cases += [
        Case(
            lambda x: (x * 2 + 1).float().sum(),
            (x,),
            host=True,
            rtol=1e-2,
            atol=1e-2 if dtype is torch.bfloat16 else 1e-4,
        ),
        Case(lambda x: torch.where(x > 0, x, x * 2).t(), (x,), host=True, **tolerance),
    ]
    check(cases)


def test_dropout_is_nothing_but_in_training():
    check([Case(aten.dropout.default, (tensor(3, 5, dtype=dtype), 0.5, False)) for dtype in FLOATS])
    with program_of(
        lambda x: torch.ops.aten.dropout(x, 0.25, True), (tensor(100, 50).abs() + 1,)
    ) as program:
        x = tensor(100, 50).abs() + 1
        ratio = program.forward(x) / x
    kept = ratio != 0
    torch.testing.assert_close(ratio[kept], torch.full_like(ratio[kept], 1 / 0.75))
    assert 0.70 < kept.float().mean() < 0.80


def test_specials_times_zero():
    x = torch.tensor([math.inf, -math.inf, math.nan, -2.0, 3.0])
    check(
        [
            Case(aten.mul.Scalar, (x.to(dtype), 0.0))
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ]
    )


# No denormal numbers: GPUs may take them for 0.
SPECIAL_FLOATS = torch.tensor([math.inf, -math.inf, math.nan, -2.0, 0.0, -0.0, 3e38, 1e-30])


@pytest.mark.parametrize("zero", (0.0, -0.0))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_division_by_a_zero_that_the_compiler_knows(dtype, zero):
    """Compilers give any number for x / 0 where they know the 0, and 0 for 0 / x."""
    x, known = SPECIAL_FLOATS.to(dtype), torch.full((8,), zero, dtype=dtype)
    functions = (
        lambda x: x / zero,
        lambda x: x / torch.full((8,), zero, dtype=dtype),
        lambda x: torch.full((8,), zero, dtype=dtype) / x,
        lambda x: zero / x,
        lambda x: x // zero,
        lambda x: torch.div(x, zero, rounding_mode="trunc"),
        lambda x: torch.fmod(x, zero),
        lambda x: torch.remainder(x, zero),
        lambda x: torch.addcdiv(x, x, torch.full((8,), zero, dtype=dtype)),
        lambda x: torch.reciprocal(torch.full((8,), zero, dtype=dtype)) * x,
    )
    check([Case(function, (x,), name=str(n)) for n, function in enumerate(functions)])
    check([Case(torch.div, (x, known), constants=(1,))])


def test_no_step_is_simplified_for_finite_numbers_alone():
    """x * 0, x - x and 0 * x are NaN where x is infinite or NaN, also in the middle of a chain."""
    functions = (
        lambda x: (x - x) * 2,
        lambda x: (x * 0.5 + 0.5 * x) - x,
        lambda x: torch.zeros(8) * x,
        lambda x: torch.zeros(8) * torch.zeros(8) * x + 1,
        lambda x: (x * -0.0) + 1,
        lambda x: x * 1e-46,  # 0 as a float32
        lambda x: torch.add(torch.ones(8), x, alpha=0),
        lambda x: torch.sub(torch.ones(8), x, alpha=1e-46),
        lambda x: torch.lerp(torch.ones(8), x, 0.0),
        lambda x: torch.lerp(x, torch.ones(8), 1.0),
        lambda x: torch.addcmul(torch.ones(8), torch.ones(8), x, value=0),
        lambda x: torch.addcmul(torch.ones(8), x, x, value=0.0),
        lambda x: torch.addcdiv(torch.ones(8), x, torch.ones(8), value=0),
        lambda x: torch.zeros(8).half() * x.half(),
        lambda x: x / x,
    )
    check([Case(function, (SPECIAL_FLOATS,), name=str(n)) for n, function in enumerate(functions)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_signs_of_roots_within_a_chain(dtype):
    """Compilers take roots for positive."""
    x = torch.cat([SPECIAL_FLOATS, tensor(20)]).to(dtype)
    chains = (
        lambda x: 1 / x.rsqrt(),
        lambda x: x.rsqrt().sign(),
        lambda x: x.rsqrt() < 0,
        lambda x: x.rsqrt().abs().copysign(x.sqrt()),
        lambda x: 1 / x.sqrt(),
        lambda x: x.rsqrt().clamp(max=5.0),
    )
    check([Case(chain, (x,), zeros=True, name=str(n)) for n, chain in enumerate(chains)])


def test_trigonometry_of_any_number():
    """Up to the largest float32, in steps of its exponent, and random bits."""
    bits = torch.randint(
        0x46000000, 0x7F7FFFFF, (20000,), generator=torch.Generator().manual_seed(3)
    )
    powers = torch.exp2(torch.arange(-20, 128).float())
    x = torch.cat([bits.int().view(torch.float32), powers, -powers, SPECIAL_FLOATS])
    for name in ("sin", "cos", "tan"):
        exact = getattr(torch, name)
        with program_of(exact, (x,)) as program:
            made, wanted = program.forward(x), exact(x.double())
        slope = 1 + wanted**2 if name == "tan" else torch.ones(())
        finite = x.isfinite()
        assert ((made.double() - wanted).abs() / slope)[finite].max() < 2e-7, name
        assert made[~finite].isnan().all()


@pytest.mark.parametrize("narrow", (torch.float16, torch.bfloat16), ids=str)
def test_a_cast_rounds_also_within_a_chain(narrow):
    x = torch.cat([SPECIAL_FLOATS, tensor(500) * 100, tensor(500) * 1e-6])
    x = torch.cat([x, torch.tensor([65504.0, 65519.9, 65520.0, 1e9, -1e9, 6e-8, 3e-8, 1e-9])])
    functions = (
        lambda x: x.to(narrow).float(),
        lambda x: x.to(narrow).float() - x,
        lambda x: x.double().to(narrow).float(),
        lambda x: torch.where(x > 0, x, -x).to(narrow).to(torch.float64),
    )
    cases = [
        Case(function, (x,), rtol=0, atol=0, name=str(n)) for n, function in enumerate(functions)
    ]
    check(cases)


def test_gelu_of_all_halves():
    """Against float64, in units of the last place."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[x.isfinite()]
    exact = torch.nn.functional.gelu(x.double())
    with program_of(torch.nn.functional.gelu, (x,)) as program:
        made = program(x).double()
    exponent = torch.frexp(exact.half().double()).exponent
    unit = torch.ldexp(torch.tensor(2.0**-11, dtype=torch.float64), exponent).clamp(min=2.0**-24)
    assert float(((made - exact).abs() / unit).max()) <= 0.51


def test_specials_of_division():
    """Floor division, remainders and powers of NaN, infinity and signed zeros."""
    cases = []
    for dtype in FLOATS:
        x, y = SPECIAL.to(dtype)[:, None], SPECIAL.to(dtype)
        for mode in (None, "floor", "trunc"):
            cases.append(
                Case(aten.div.Tensor_mode, (x, y), {"rounding_mode": mode}, name=f"div {mode}")
            )
        cases += [
            Case(overload, (x, y))
            for overload in (aten.fmod.Tensor, aten.remainder.Tensor, aten.pow.Tensor_Tensor)
        ]
    check(cases)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers_wrap_around(dtype):
    info = torch.iinfo(dtype)
    x = torch.tensor([info.min, info.max, info.min + 1, 0, 1, -1 if info.min else 2], dtype=dtype)
    y = x[:, None]
    cases = [
        Case(overload, (x, y))
        for overload in (
            aten.add.Tensor,
            aten.sub.Tensor,
            aten.mul.Tensor,
            aten.maximum.default,
            aten.lt.Tensor,
        )
    ]
    cases += [
        Case(overload, (x,))
        for overload in (
            aten.neg.default,
            aten.abs.default,
            aten.square.default,
            aten.bitwise_not.default,
        )
    ]
    cases.append(Case(aten.pow.Tensor_Scalar, (x, 3)))
    cases.append(Case(aten.clamp.default, (x, info.min, info.max)))
    cases.append(Case(aten.add.Scalar, (x, info.max)))
    cases.append(Case(aten.eq.Scalar, (x, info.max)))
    check([case for case in cases if works(case.fn, *case.args) is not None])


# What integers do not hold, and numbers beside.
BEYOND = [math.inf, -math.inf, math.nan, 1e10, -1e10, 1e20, -1e20, 70000.7, -70000.7, 300.5, -300.5, -0.5] + [
    sign * 2.0**power + add
    for power in (7, 8, 15, 16, 31, 32, 63, 64)
    for sign in (-1, 1)
    for add in (0, 1, -1, 5, 2.0 ** (power - 22), -(2.0 ** (power - 24)))
]  # fmt: skip


@pytest.mark.parametrize("source", (*ALL, torch.float64, torch.bfloat16), ids=str)
def test_casts(source):
    """Every conversion, also of numbers that the target does not hold exactly."""
    cases = []
    for target in ALL:
        x = tensor(4, 7, dtype=source, low=-100 if source is not torch.uint8 else 0, high=100)
        if source.is_floating_point:
            if target in (torch.uint8,):
                x = x.abs()
            if target is torch.bool:
                x = torch.cat(
                    [
                        x,
                        torch.tensor(
                            [[0.0, -0.0, math.nan, math.inf, 0.5, -0.25, 1e-4]], dtype=source
                        ),
                    ]
                )
            if platform.machine() in (
                "x86_64",
                "AMD64",
            ):  # beyond a range, torch's differ by processor
                edges = torch.tensor(BEYOND, dtype=torch.float64).to(source)
                cases.append(Case(aten._to_copy.default, (edges,), {"dtype": target}))
                joined = lambda x, target=target: (x * 1).to(target)  # noqa: E731
                cases.append(Case(joined, (edges,)))
        for rows in (x, x.reshape(7, 4), x.reshape(-1)[0]) if x.shape == (4, 7) else (x,):
            cases.append(Case(aten._to_copy.default, (rows,), {"dtype": target}))
        is_float = source.is_floating_point or target.is_floating_point
        if not is_float and source is not torch.bool:
            info = torch.iinfo(source)
            edge = torch.tensor(
                [info.min, info.max, info.max // 2 + 1, 127, info.max - 1], dtype=source
            )
            cases.append(Case(aten._to_copy.default, (edge,), {"dtype": target}))
        cases.append(Case(aten.to.dtype, (x, target)))
    if source is torch.float32:
        # Halfway between two neighbours, and beyond the largest.
        hard = torch.tensor(
            [
                1.00048828125,
                1.00146484375,
                65504.0,
                65519.9,
                65520.0,
                1e9,
                -1e9,
                6e-8,
                3e-8,
                1e-9,
                math.nan,
            ]
        )
        cases.append(Case(aten._to_copy.default, (hard,), {"dtype": torch.float16}, rtol=0, atol=0))
    check(cases)


def test_large_integers_are_exact():
    """int64 beyond 2^53, int32 beyond 2^24: no way through floating point."""
    x = torch.tensor([2**53 + 1, -(2**62) + 3, 2**31, -(2**31) - 1, 2**63 - 1], dtype=torch.int64)
    y = torch.tensor([2**24 + 1, -(2**30) + 3, 2**31 - 1], dtype=torch.int32)
    check(
        [
            Case(fn, (t, 1))
            for t in (x, y)
            for fn in (aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.eq.Scalar)
        ]
        + [
            Case(aten.add.Tensor, (x, 2**40)),
            Case(aten.floor_divide.default, (x, 3)),
            Case(aten.remainder.Scalar, (x, 7)),
        ]
        + [
            Case(aten.clamp.default, (x, -(2**40), 2**40)),
            Case(aten.maximum.default, (x, y[:1])),
            Case(aten.abs.default, (x,)),
        ]
        + [
            Case(aten.where.self, (x > 0, x, x * 2)),
            Case(aten.bitwise_and.Scalar, (x, 2**40 - 1)),
            Case(aten.relu.default, (y,)),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_comparisons_with_large_integers(dtype):
    """They are rounded to the dtype: to infinity, beyond its largest number."""
    x = torch.tensor([1.0, -2.0, 65504.0, -65504.0, float("inf"), float("-inf")], dtype=dtype)
    functions = (aten.ge.Scalar, aten.lt.Scalar, aten.eq.Scalar, aten.ne.Scalar)
    numbers = (70000, -(2**24) - 1, 2**62)
    check([Case(function, (x, number)) for function in functions for number in numbers])


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_clamp(dtype):
    x = tensor(3, 8, dtype=dtype)
    cases = []
    for low, high in ((-1, 1), (None, 2), (1, None), (2, -2), (-0.5, 1.5), (0, 2.5)):
        if works(aten.clamp.default, x, low, high) is not None:
            cases.append(Case(aten.clamp.default, (x, low, high)))
    low, high = tensor(8, dtype=dtype, seed=3), tensor(3, 1, dtype=dtype, seed=4)
    for bounds in ((low, high), (low, None), (None, high)):
        if works(aten.clamp.Tensor, x, *bounds) is not None:
            cases.append(Case(aten.clamp.Tensor, (x, *bounds)))
    if dtype.is_floating_point:
        cases.append(Case(aten.clamp.default, (SPECIAL.to(dtype), -1.0, 1.0)))
        cases.append(Case(aten.hardtanh.default, (SPECIAL.to(dtype), -1.0, 1.0)))
        cases.append(Case(aten.relu.default, (SPECIAL.to(dtype),)))
        cases.append(Case(aten.clamp.Tensor, (x.float(), low, high)))
    if cases:
        check(cases)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_where_and_masked_fill(dtype):
    cond = tensor(3, 8, dtype=torch.bool)
    x, y = tensor(3, 8, dtype=dtype), tensor(8, dtype=dtype, seed=5)
    cases = [
        Case(aten.where.self, (cond, x, y)),
        Case(aten.where.self, (cond[:, :1], y, x)),
        Case(aten.where.self, (cond, x, torch.tensor(1, dtype=dtype))),
    ]
    for overload, args in (
        (aten.where.ScalarSelf, (cond, 2, x)),
        (aten.where.ScalarOther, (cond, x, 0.5)),
        (aten.where.Scalar, (cond, 2.0, -1.0)),
        (aten.where.Scalar, (cond, 1, 0)),
        (aten.where.self, (cond, x, tensor(8, dtype=torch.float32))),
        (aten.masked_fill.Scalar, (x, cond, 3)),
        (aten.masked_fill.Scalar, (x, cond, -math.inf)),
        (aten.masked_fill.Scalar, (x, cond[:1], 1)),
        (aten.masked_fill.Tensor, (x, cond, torch.tensor(2, dtype=dtype))),
    ):
        if works(overload, *args) is not None:
            cases.append(Case(overload, args))
    check(cases)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_three_tensors(dtype):
    x, y, z = (
        tensor(3, 8, dtype=dtype),
        tensor(8, dtype=dtype, seed=5),
        tensor(3, 1, dtype=dtype, seed=6, low=1.0),
    )
    check(
        Case(aten.addcmul.default, (x, y, z)),
        Case(aten.addcmul.default, (x, y, z), {"value": 0.5}),
        Case(aten.addcdiv.default, (x, y, z)),
        Case(aten.addcdiv.default, (x, y, z), {"value": -2}),
        Case(aten.lerp.Scalar, (x, y, 0.25)),
        Case(aten.lerp.Tensor, (x, y, z)),
    )


@pytest.mark.parametrize("order", [1, 2, 3])
def test_polygamma(order):
    # Series of the zeta function: a few roundings more than the type's.
    check(Case(aten.polygamma.default, (order, tensor(3, 8, low=0.5, high=9.0)), rtol=1e-4))


def test_every_pointwise_row_is_looked_at():
    """A new row is in one of the tests above or this fails."""
    known = {row.name for row in (*UNARY, *BINARY)} | OTHERS
    left = {
        row.name
        for row in registry.definitions()
        if isinstance(row.form, registry.Pointwise)
        and row.name.startswith("aten.")
        and not row.name.startswith(ELSEWHERE)
    } - known
    assert not left


# Integers that floats do not hold: the way through one rounds them.
THROUGH_FLOATS = {
    "cast": lambda x, f: x.to(f).long(),
    "floor": lambda x, f: x.to(f).floor().long(),
    "product": lambda x, f: (x.to(f) * 1).to(x.dtype),
    "view": lambda x, f: x.to(f).view(-1, 2).long(),
    "choice": lambda x, f: torch.where(x > 5, x.to(f), -x.to(f)).long(),
    "equal": lambda x, f: x.to(f) == (x - 1).to(f),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_through_floats(dtype: torch.dtype) -> None:
    near = torch.tensor(
        [2**24, 2**26, 2**30, 2**53, 2**55, 2**62][: 3 if dtype is torch.int32 else 6]
    )
    x = (near[:, None] + torch.arange(-3, 5)).reshape(-1)
    x = torch.cat([x, -x]).to(dtype)
    cases = [
        Case(function, (x, float_type), name=f"{name} {float_type}")
        for name, function in THROUGH_FLOATS.items()
        for float_type in (torch.float32, torch.float64)
    ]
    check(cases)


ZEROS = {
    "signs": lambda x: (x - x).sign(),
    "choices of 0": lambda x: torch.where(x > 1, -1.0, 0.0),
    "choices of choices": lambda x: torch.where(x > 1, 0.0, torch.where(x > 0.7, 0.0, -2.0)),
    "differences from 0": lambda x: 0 - (x - x),
    "sums with 0": lambda x: x * -0.0 + 0.0,
    "sums with a tensor of zeros": lambda x: torch.zeros_like(x) + x * -0.0,
    "booleans less 1": lambda x: (x > 0).to(x.dtype) - 1,
    "odd functions": lambda x: torch.stack(
        [f(x * -0.0) for f in (torch.sin, torch.tan, torch.tanh, torch.expm1)]
    ),
    "quotients": lambda x: torch.full_like(x, -0.0) / 2,
    "products": lambda x: x * torch.full_like(x, -0.0),
    "choices": lambda x: torch.where(x > 0, -0.0, 1.0),
    "padding": lambda x: F.pad(x, (1, 1), value=-0.0),
    "clamp": lambda x: torch.stack(
        [
            f(y)
            for y in (x * 0, x * -0.0)
            for f in (
                lambda y: y.clamp(min=0),
                lambda y: y.clamp(max=-0.0),
                lambda y: y.clamp(-0.0, 0.0),
                lambda y: y.clamp(torch.zeros_like(y), -torch.zeros_like(y)),
                F.relu6,
            )
        ]
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("function", ZEROS.values(), ids=ZEROS.keys())
def test_minus_zero(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """A compiler may take the number -0.0 for 0.0."""
    x = torch.tensor([1.0, 2, 0.5], dtype=dtype)
    with program_of(function, (x,)) as program:
        found, wanted = program.forward(x), function(x)
    assert torch.equal(found, wanted) and torch.equal(found.signbit(), wanted.signbit())

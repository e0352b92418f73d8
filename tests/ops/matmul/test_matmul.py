"""Matmuls and linear layers of all shapes and layouts, with epilogues."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
import torch.nn.functional as F

from purevk.errors import GraphError
from tests.ops.harness import (
    SINGLE,
    Case,
    aten,
    check,
    dispatches,
    program_of,
    sum_case,
    tensor,
    unit,
)
from tests.ops.quantized.harness import kernels_of, run_with_templates

pytestmark = pytest.mark.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_mm_shapes(dtype):
    """Prime sizes, multiples of the tiles, and one more or less than these."""
    shapes = [
        (1, 1, 1), (3, 5, 7), (13, 17, 19), (64, 64, 64), (65, 33, 63), (8, 32, 8), (1, 67, 31),
        (37, 61, 1), (4, 4, 128), (128, 16, 4), (31, 1, 29), (2, 128, 66),
    ]  # fmt: skip
    of = functools.partial(unit, dtype=dtype)
    check([sum_case(aten.mm.default, of(m, k), of(k, n, seed=1)) for m, k, n in shapes])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_transposed_and_strided_operands(dtype):
    """Either operand transposed, a slice, an expansion, a column of a larger matrix, or made by
    another program."""
    a, b = unit(12, 20, dtype=dtype), unit(20, 28, dtype=dtype, seed=1)
    at, bt = unit(20, 12, dtype=dtype), unit(28, 20, dtype=dtype, seed=1)
    wide = unit(16, 64, dtype=dtype, seed=2)
    forms = {
        "at": (lambda x, y: x.t() @ y, at, b),
        "bt": (lambda x, y: x @ y.t(), a, bt),
        "both": (lambda x, y: x.t() @ y.t(), at, bt),
        "slices": (lambda x: x[:12, 3:23] @ x[:, 40:60].t(), wide),
        "steps": (lambda x: x[:, ::2] @ x[:, 1::2].t(), wide),
        "expanded": (lambda x, y: x[:1].expand(12, 20) @ y, a, b),
        "made": (lambda x, y: (x * 2) @ (y + 1).relu(), a, b),
        "rows": (lambda x, y: x[3:4] @ y, a, b),
        "columns": (lambda x, y: x @ y[:, 5:6], a, b),
        "offset": (lambda x, y: x[5:] @ y[:, 1:], a, b),
        "self": (lambda x: x @ x.t(), a),
        "twice": (lambda x, y: (x @ y) @ y.t(), a, b),
    }
    # The results of "self" and "made" are larger than those of the rest.
    rtol, atol = (1e-5, 1e-4) if dtype is torch.float32 else (4e-3, 4e-2)
    check([Case(fn, args, name=n, rtol=rtol, atol=atol) for n, (fn, *args) in forms.items()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_batches(dtype):
    of = functools.partial(unit, dtype=dtype)
    shapes = [
        ((3, 5, 7), (3, 7, 11)),
        ((2, 3, 5, 7), (2, 3, 7, 4)),
        ((2, 1, 5, 7), (1, 3, 7, 4)),
        ((2, 3, 5, 7), (7, 4)),
        ((5, 7), (3, 7, 4)),
        ((2, 3, 5, 8), (3, 8, 4)),
        ((4, 1, 2, 3, 5), (1, 3, 1, 5, 2)),
        ((2, 3, 2, 4, 8), (2, 1, 2, 8, 4)),
        ((1, 5, 7), (1, 7, 3)),
        ((3, 1, 7), (3, 7, 1)),
        ((7,), (7,)),
        ((7,), (7, 3)),
        ((3, 7), (7,)),
        ((2, 3, 7), (7,)),
        ((7,), (2, 7, 3)),
        ((2, 64, 16), (2, 16, 64)),
        ((2, 2, 1, 16), (2, 2, 16, 24)),
    ]
    cases = [sum_case(aten.matmul.default, of(*a), of(*b, seed=1)) for a, b in shapes]
    for b, m, k, n in [(3, 5, 7, 11), (1, 8, 8, 8), (6, 1, 16, 4), (2, 33, 65, 17)]:
        cases.append(sum_case(aten.bmm.default, of(b, m, k), of(b, k, n, seed=1)))
    cases += [
        sum_case(lambda t: t.transpose(1, 2) @ t.permute(0, 2, 3, 1), of(2, 10, 3, 8)),
        sum_case(lambda t, y: t.permute(2, 0, 1) @ y, of(5, 7, 3), of(3, 7, 4)),
        sum_case(lambda t, y: t.expand(4, 5, 7) @ y, of(1, 5, 7), of(4, 7, 4)),
    ]
    check(cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_linear_and_addmm(dtype):
    of, cases = functools.partial(unit, dtype=dtype), []
    for (shape, n), bias, fixed in itertools.product(
        [((5, 7), 11), ((2, 3, 16), 32), ((8,), 4), ((1, 64), 64), ((2, 2, 3, 5), 1)],
        (True, False),
        (True, False),
    ):
        args = [of(*shape), of(n, shape[-1], seed=1), *([of(n, seed=2)] if bias else [])]
        constants = range(1, len(args)) if fixed else ()
        cases.append(sum_case(aten.linear.default, *args, constants=constants))
    a, b = of(5, 7), of(7, 12, seed=1)
    for bias in (of(12), of(5, 12), of(5, 1), of(1, 12), of(), of(1)):
        for kwargs in ({}, {"beta": 0.5, "alpha": 2}, {"beta": 2, "alpha": 1}, {"alpha": -1}):
            cases.append(sum_case(aten.addmm.default, bias, a, b, **kwargs))
    # A factor of 0 leaves the bias unread.
    cases.append(
        Case(
            lambda a, b: torch.addmm(torch.full((12,), torch.inf), a, b, beta=0),
            (a.float(), b.float()),
        )
    )
    transposed = lambda x, w, b: torch.addmm(b, x, w.t())  # noqa: E731
    cases.append(sum_case(transposed, a, of(12, 7, seed=1), of(12), constants=(1, 2)))
    check(cases)


def test_large_sum():
    """Sums of 4099 numbers: the rounding of a float32 sum, whatever the type of the operands."""
    a, b = unit(3, 4099), unit(4099, 5, seed=1)
    exact = (a.double() @ b.double()).float()
    ah, bh = a.half(), b.half()
    rounded = (ah.double() @ bh.double()).half()
    check(
        Case(aten.mm.default, (a, b), expected=exact, rtol=1e-5, atol=5e-5),
        Case(aten.mm.default, (ah, bh), expected=rounded, rtol=1e-3, atol=1e-3),
    )


@pytest.mark.parametrize("seed", range(3))
def test_error_of_long_sums(seed):
    """Sums of positive numbers, where a float32 sum of one term after the other is wrong by 1e-5."""
    draw = random.Random(seed)
    m, n, depth = draw.randint(1, 9), draw.randint(1, 9), draw.randint(20_000, 300_000)
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.rand(m, depth, generator=generator), torch.rand(depth, n, generator=generator)
    expected = (a.double() @ b.double()).float()
    transposed = b.T.contiguous()
    parts = torch.complex(b, -b)
    check(
        Case(aten.mm.default, (a, b), expected=expected, rtol=1.5e-6, atol=0.0),
        Case(lambda a, b: a @ b.T, (a, transposed), expected=expected, rtol=1.5e-6, atol=0.0),
        Case(
            lambda a, b: a.to(torch.complex64) @ b,
            (a, parts),
            expected=torch.complex(expected, -expected),
            rtol=1.5e-6,
            atol=0.0,
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_epilogues(dtype):
    """What follows a matmul is part of its kernel, whatever the shapes of the other operands."""
    of = functools.partial(unit, dtype=dtype)
    x, w, b, r = of(6, 20), of(12, 20, seed=1), of(12, seed=2), of(6, 12, seed=3)
    forms = {
        "gelu": lambda x, w, b, r: F.gelu(F.linear(x, w, b)),
        "residual": lambda x, w, b, r: F.linear(x, w, b) + r,
        "gelu + residual": lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r,
        "column": lambda x, w, b, r: F.linear(x, w) * r[:, :1],
        "row": lambda x, w, b, r: F.linear(x, w) * r[:1] + b,
        "number": lambda x, w, b, r: F.linear(x, w) * 0.5 + 1,
        "relu": lambda x, w, b, r: (x @ w.t()).relu(),
        "scalar tensor": lambda x, w, b, r: F.linear(x, w, b) * r[0, 0],
        "transposed": lambda x, w, b, r: F.linear(x, w, b) + r.reshape(12, 6).t(),
        "silu gate": lambda x, w, b, r: F.silu(F.linear(x, w)) * r,
        "cast": lambda x, w, b, r: F.linear(x, w, b).float() + 1,
        "mask": lambda x, w, b, r: torch.where(r > 0, F.linear(x, w), 0.0),
        "integers": lambda x, w, b, r: F.linear(x, w) + (r * 5).to(torch.int64),
        "long": lambda x, w, b, r: F.linear(x, w) + torch.where(r > 0, 3, -2),
        "bool": lambda x, w, b, r: F.linear(x, w) * (r > 0),
        "compare": lambda x, w, b, r: F.linear(x, w, b) > r,
        "used twice": lambda x, w, b, r: (lambda y: (y.relu(), y + r))(F.linear(x, w, b)),
        "bytes": lambda x, w, b, r: F.linear(x, w) + (r > 0).to(torch.uint8) * 3,
        "viewed": lambda x, w, b, r: (
            F.linear(x.reshape(2, 3, 20), w, b).relu() + r.reshape(2, 3, 12)
        ),
        "same": lambda x, w, b, r: (lambda y: y * torch.sigmoid(y))(F.linear(x, w, b)),
        "sum, multiplied": lambda x, w, b, r: (F.linear(x, w, b) + r) * F.linear(x, w, b).detach(),
    }
    cases = []
    for fixed in ((1, 2), ()):
        cases += [
            sum_case(fn, x, w, b, r, constants=fixed, name=name)
            for name, fn in forms.items()
            if name != "compare"
        ]
    odd = of(5, 7), of(11, 7, seed=1), of(11, seed=2), of(5, 11, seed=3)
    names = (
        "gelu + residual", "column", "row", "silu gate", "integers", "bool", "bytes", "mask", "cast",
        "scalar tensor",
    )  # fmt: skip
    cases += [sum_case(forms[name], *odd, name=f"odd {name}") for name in names]
    longs = tensor(6, 12, dtype=torch.int64)
    cases += [
        sum_case(lambda x, w, b, n: F.linear(x, w, b) + n, x, w, b, n)
        for n in (longs, longs[0], longs[:, :1].contiguous(), longs[0, 0])
    ]
    batched = of(3, 5, 7), of(3, 7, 8, seed=1), of(8), of(3, 5, 8), of(3, 1, 1), of(5, 1)
    forms = {
        "batched": lambda a, b, c, d, e, f: torch.tanh((a @ b) * e + f) + c * d,
        "batched permuted": lambda a, b, c, d, e, f: (
            (a @ b) / 3 + d.transpose(0, 1).contiguous().transpose(0, 1)
        ),
    }
    cases += [sum_case(fn, *batched, name=name) for name, fn in forms.items()]
    check(cases)


def test_biases_and_scales_that_are_views():
    """Expanded, stepped over, columns of a matrix: where a kernel takes a vector it takes any."""
    x, w, m, image, kernel = unit(6, 8), unit(8, 8), unit(8, 16), unit(2, 8, 5, 5), unit(8, 8, 3, 3)
    vectors = {
        "steps": lambda m: m[0, ::2],
        "column": lambda m: m[:, 3],
        "expanded": lambda m: m[0, :1].expand(8),
        "slice": lambda m: m[0, 5:13],
        "made": lambda m: m[:, 2] * 2,
    }
    cases = []
    for name, v in vectors.items():
        forms = {
            "linear": (lambda x, w, m, v=v: F.linear(x, w, v(m)), x, w),
            "addmm": (lambda x, w, m, v=v: torch.addmm(v(m), x, w), x, w),
            "conv2d": (lambda x, k, m, v=v: F.conv2d(x, k, v(m)), image, kernel),
            "depthwise": (
                lambda x, k, m, v=v: F.conv2d(x, k[:, :1], v(m), groups=8), image, kernel),
            "pointwise": (
                lambda x, k, m, v=v: F.conv2d(x, k[:, :, :1, 1:2], v(m)), image, kernel),
            "layer norm": (lambda x, m, v=v: F.layer_norm(x, (8,), v(m), v(m.flip(0))), x),
            "scale": (lambda x, m, v=v: F.layer_norm(x, (8,), v(m)), x),
            "rms norm": (lambda x, m, v=v: F.rms_norm(x, (8,), v(m)), x),
            "batch norm": (
                lambda x, m, v=v: F.batch_norm(x, v(m), v(m).abs() + 1, v(m), v(m)), image),
            "group norm": (lambda x, m, v=v: F.group_norm(x, 2, v(m), v(m)), image),
            "transposed": (
                lambda x, k, m, v=v: F.conv_transpose2d(x, k, v(m), stride=2), image, kernel),
        }  # fmt: skip
        cases += [
            sum_case(fn, *args, m, name=f"{form} {name}") for form, (fn, *args) in forms.items()
        ]
    check(cases)


def test_one_dispatch():
    """linear + bias + gelu + residual is one kernel; so are a matmul, its scale and its mask."""
    x, w, b, r = unit(6, 20), unit(12, 20), unit(12), unit(6, 12)
    for fn, args in (
        (lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, (x, w, b, r)),
        (lambda x, w, b, r: (F.linear(x, w, b) * 2).sigmoid() * r, (x, w, b, r)),
        (
            lambda q, k, m: q @ k.transpose(-1, -2) * 0.125 + m,
            (unit(2, 3, 5, 8), unit(2, 3, 5, 8), unit(5)),
        ),
        (
            lambda x, w, b, r: F.linear(x.reshape(2, 3, 20), w, b).relu() + r.reshape(2, 3, 12),
            (x, w, b, r),
        ),
    ):
        with program_of(fn, args) as program:
            assert len(dispatches(program)) == 1, dispatches(program)
            torch.testing.assert_close(program.forward(*args), fn(*args), rtol=1e-5, atol=SINGLE)


@pytest.mark.parametrize("constants", [(), (1,)], ids=["input", "constant"])
def test_weight_larger_than_a_binding(constants):
    """200 rows of 16 bytes in parts of 2048 bytes, also where a call brings the
    weight."""
    x, w = tensor(3, 4), tensor(200, 4, seed=1)
    with kernels_of("small"):
        have, templates = run_with_templates("aten.linear.default", (x, w, None), (), constants)
        assert sum("matmul" in template for template in templates) == 2
        torch.testing.assert_close(have, F.linear(x, w), rtol=1e-5, atol=SINGLE)


def test_weight_larger_than_a_binding_from_the_cpu():
    """No kernel makes a tensor larger than a binding."""
    x, w = tensor(3, 4), tensor(200, 2, seed=1)
    with kernels_of("small"):
        fn = lambda x, w: F.linear(x, torch.cat([w, w.relu()], 1))  # noqa: E731
        check(Case(fn, (x, w), rtol=1e-5, atol=SINGLE, host=True))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_biases_that_broadcast(device):
    """torch adds any bias that broadcasts to the result of a linear layer."""
    weight = unit(5, 4, seed=1)
    shapes = {
        (2, 4): [(1,), (), (2, 1), (2, 5), (1, 5)],
        (3, 2, 4): [(1,), (), (2, 5), (3, 2, 5), (1, 5)],
        (4,): [(1,), (), (1, 5)],
    }
    cases = [
        sum_case(
            aten.linear.default, unit(*rows, dtype=dtype), weight.to(dtype), unit(*bias).to(dtype)
        )
        for rows, biases in shapes.items()
        for bias in biases
        for dtype in (torch.float32, torch.float16)
    ]
    with kernels_of(device):
        check(cases)


def test_linear_layers_of_one_column_without_a_dim():
    fn, weight = aten.linear.default, unit(4, seed=1)
    cases = [sum_case(fn, unit(*rows), weight) for rows in ((4,), (3, 4), (2, 3, 4))]
    check([*cases, sum_case(fn, unit(2, 3, 4), weight, unit(seed=2))])


@pytest.mark.parametrize("bias", [(3,), (6,), (3, 5), (3, 1, 5)], ids=str)
def test_biases_that_do_not_broadcast_are_refused(bias):
    weight = unit(5, 4, seed=1)
    with pytest.raises(GraphError, match="bias|broadcast|cannot add"):
        run_with_templates("aten.linear.default", (unit(2, 4), weight, unit(*bias)))
